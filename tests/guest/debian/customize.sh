#!/bin/sh
# Last step of the Debian guest's root disk: runs on the build host with the disk's root folder as its argument.
set -eu
root=$1

# A login for the serial console; sshd takes the tests' key only.
echo root:vmmd | chroot "$root" chpasswd
systemctl --root="$root" enable -q ssh.service systemd-networkd.service systemd-network-generator.service \
    serial-getty@ttyS0.service
systemctl --root="$root" disable -q systemd-networkd-wait-online.service
# A test guest does nothing on its own that would be measured with what it is asked to do.
systemctl --root="$root" mask -q apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-tmpfiles-clean.timer systemd-timesyncd.service systemd-pstore.service \
    systemd-binfmt.service systemd-update-utmp.service systemd-update-utmp-runlevel.service getty@tty1.service
: > "$root/etc/resolv.conf"
rm -f "$root/etc/machine-id" "$root/var/lib/dbus/machine-id"
: > "$root/etc/machine-id"
touch "$root/usr"
touch -r "$root/usr" "$root/etc/.updated" "$root/var/.updated"
