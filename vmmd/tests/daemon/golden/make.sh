#!/usr/bin/env bash
# Makes the store of this folder with the first release's own programs: make.sh BUILT TO. README.md says more.
set -euo pipefail
built=$(realpath "$1") to=$(realpath "$2")
folder=$(mktemp -d /tmp/vmmd-golden.XXXXXX)
space=$(basename "$folder")

finish() {
    for job in $(jobs -p); do kill -9 "$job" 2>/dev/null || true; done
    if ip netns list | grep -q "^$space\b"; then
        # The mock VMMs that are left; each is in the namespace.
        ip netns pids "$space" | xargs -r kill -9
        ip netns delete "$space"
    fi
    rm -rf "$folder"
}
trap finish EXIT

cd "$folder"
ip netns add "$space"
ip -n "$space" link add br0 type bridge
ip -n "$space" tuntap add tap9 mode tap
printf kernel >kernel
truncate -s 1M root.img data.img spare.img
cat >config.toml <<CONFIG
state_dir = "$folder/state"
run_dir = "$folder/run"
log_dir = "$folder/log"
vmm = "$built/mock-vmm"
kvm_device = "/dev/null"
CONFIG

ctl() { "$built/vmmctl" --socket "$folder/run/vmmd.sock" "$@"; }
# What is typed on a guest's console are commands to the mock.
type_in() { python3 - "$folder"/run/vms/"$(ctl get vm "$1" -o json | jq -r .metadata.uid)"/console.sock "$2" <<'PYTHON'; }
import socket, sys
console = socket.socket(socket.AF_UNIX)
console.connect(sys.argv[1])
console.sendall(sys.argv[2].encode() + b"\n")
while console.recv(4096):
    pass
PYTHON
phase() { until [ "$(ctl get vm "$1" -o json | jq -r .status.phase)" = "VM_PHASE_$2" ]; do :; done; }

# Whoever opens the store later is another boot of the node, on this machine too: `ip netns exec` gives mounts of their own.
echo 00000000-0000-4000-8000-000000000001 >boot_id
begin() {
    ip netns exec "$space" sh -c \
        "mount --bind boot_id /proc/sys/kernel/random/boot_id && exec '$built/vmmd' --config config.toml" 2>>vmmd.log &
    daemon=$!
    until ctl version >/dev/null 2>&1; do kill -0 $daemon; done
}
# Running VMs go on.
end() {
    kill -TERM $daemon
    wait $daemon
}

manifest() { # NAME CMDLINE MORE-OF-SPEC
    cat <<MANIFEST
apiVersion: vmmd/v1
kind: Vm
metadata: {name: $1, labels: {release: first, purpose: $1}}
spec:
  cpu: {cores: 1}
  memory: {sizeBytes: 128Mi}
  boot: {linux: {kernel: /proc/self/cwd/kernel, cmdline: "console=ttyS0 $2"}}
$3
MANIFEST
}

begin
manifest created "" "
  disks:
  - {name: spare, path: /proc/self/cwd/spare.img, format: raw, readOnly: true, serial: SPARE-1}
  nics:
  - {name: eth0, tap: tap9, mac: '52:54:00:00:00:01'}" | ctl create -f -
manifest running "" "
  disks:
  - {name: root, path: /proc/self/cwd/root.img, format: raw}
  - {name: data, path: /proc/self/cwd/data.img, format: raw}
  nics:
  - {name: eth0, bridge: br0}" | ctl create -f -
for name in stopped killed powered-off panicked lost deleted; do manifest $name "" "" | ctl create -f -; done
manifest refused mock.boot=image "" | ctl create -f -

for name in running stopped killed powered-off panicked lost deleted; do ctl start $name; done
ctl start refused && exit 1
ctl stop stopped
ctl stop --force killed
type_in powered-off poweroff
type_in panicked panic
kill -9 "$(ctl get vm lost -o json | jq .status.instance.pid)"
ctl stop --force deleted
ctl delete deleted
phase powered-off STOPPED
phase panicked FAILED
phase lost FAILED
# What it tells from the store alone.
end
begin
ctl get vm -o json | jq -cS '.[]' >"$to/first-release.json"
end
cp state/vmmd.redb first-release.redb
gzip -9n first-release.redb
mv first-release.redb.gz "$to"
