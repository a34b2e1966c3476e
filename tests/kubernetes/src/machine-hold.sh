#!/bin/sh
# The first process of a machine (machine.rs), in namespaces of its own: shows the folder $1 at the places that kubelet and containerd take for
# granted, and files at the settings of the kernel that kubelet writes, which are those of the whole computer. When it ends, all others do.
set -eu
cd "$1"
mount --bind log /var/log
mkdir -p /var/lib/kubelet
mount --bind kubelet /var/lib/kubelet
mkdir -p run/sysctl
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000 \
    kernel/keys/root_maxbytes=25000000; do
    file=run/sysctl/$(basename "${setting%=*}")
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${setting%=*}"
done
mount --bind run /run
echo 1 >/proc/sys/net/ipv4/ip_forward
touch /run/ready
exec sleep infinity
