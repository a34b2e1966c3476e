#!/bin/sh
# Last step of the desktop's root disk: runs on the build host with the disk's root folder as its argument.
set -eu
root=$1

systemctl --root="$root" enable -q serial-getty@ttyS0.service desktop.service
# A test guest does nothing on its own that would be measured with what it is asked to do.
systemctl --root="$root" mask -q apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-tmpfiles-clean.timer systemd-timesyncd.service systemd-pstore.service \
    systemd-binfmt.service systemd-update-utmp.service systemd-update-utmp-runlevel.service getty@tty1.service
# Drivers of machines that this is not.
for folder in "$root"/lib/modules/*/kernel; do
    rm -rf "$folder"/drivers/infiniband "$folder"/drivers/net "$folder"/drivers/scsi "$folder"/drivers/media "$folder"/sound \
        "$folder"/drivers/gpu/drm/amd "$folder"/drivers/gpu/drm/i915 "$folder"/drivers/gpu/drm/nouveau "$folder"/drivers/gpu/drm/radeon \
        "$folder"/drivers/iio "$folder"/drivers/usb "$folder"/net/netfilter "$folder"/fs/xfs "$folder"/fs/btrfs
    depmod -b "$root" "$(basename "$(dirname "$folder")")"
done
rm -f "$root/etc/machine-id" "$root/var/lib/dbus/machine-id"
: > "$root/etc/machine-id"
touch "$root/usr"
touch -r "$root/usr" "$root/etc/.updated" "$root/var/.updated"
