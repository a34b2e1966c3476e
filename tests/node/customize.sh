#!/bin/sh
# Last step of the node image: runs on the build host with the image's root folder as its argument.
set -eu
root=$1

systemctl --root="$root" enable -q ssh.service systemd-networkd.service kvm-idle-vm.service node-ready.service
# Nothing runs in the node that a test did not start.
systemctl --root="$root" mask -q apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-timesyncd.service getty@tty1.service serial-getty@ttyS0.service \
    serial-getty@ttyS1.service
mkdir -p "$root/var/lib/guests"
: > "$root/etc/machine-id"
: > "$root/etc/resolv.conf"
