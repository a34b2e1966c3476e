#!/bin/sh
# Last step of the node image: runs on the build host with the image's root folder as its argument.
set -eu
root=$1

systemctl --root="$root" enable -q ssh.service management-network.service kvm-idle-vm.service node-ready.service
# Nothing runs in the node that a test did not start, and nothing that only costs time at boot.
systemctl --root="$root" mask -q apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-tmpfiles-clean.timer systemd-timesyncd.service systemd-networkd.service \
    systemd-logind.service systemd-pstore.service systemd-update-utmp.service systemd-update-utmp-runlevel.service \
    systemd-random-seed.service systemd-binfmt.service dev-mqueue.mount getty@tty1.service serial-getty@ttyS0.service serial-getty@ttyS1.service
mkdir -p "$root/var/lib/guests"
: > "$root/etc/resolv.conf"
# The machine's id comes with the kernel command line: nodes from one image are different machines.
rm -f "$root/etc/machine-id" "$root/var/lib/dbus/machine-id"
: > "$root/etc/machine-id"
# What is to be done once after an update of /usr has been done.
touch "$root/usr" "$root/etc/.updated" "$root/var/.updated"
touch -r "$root/usr" "$root/etc/.updated" "$root/var/.updated"
