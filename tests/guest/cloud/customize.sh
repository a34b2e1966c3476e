#!/bin/sh
# Last step of a cloud image's root: runs on the build host with the root folder as its argument.
set -eu
root=$1

# The second kernel is not installed: a guest does that.
suite=$(sed -n 's/^VERSION_CODENAME=//p' "$root/etc/os-release")
kernel=$(sed -n "s/^$suite [^ ]* //p" "$(dirname "$0")/kernels")
APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -q -y --download-only install "$kernel"
mkdir -p "$root/opt/kernel"
cp "$root"/var/cache/apt/archives/linux-image-*-cloud-amd64_*.deb "$root/opt/kernel"
systemctl --root="$root" enable -q ssh.service systemd-networkd.service serial-getty@ttyS0.service
systemctl --root="$root" disable -q systemd-networkd-wait-online.service
# A test guest does nothing on its own that would be measured with what it is asked to do.
systemctl --root="$root" mask -q apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-tmpfiles-clean.timer systemd-timesyncd.service systemd-pstore.service \
    systemd-binfmt.service systemd-update-utmp.service systemd-update-utmp-runlevel.service getty@tty1.service
# Drivers of machines that this is not, which would only be unpacked and packed again.
for folder in "$root"/lib/modules/*/kernel; do
    rm -rf "$folder"/drivers/infiniband "$folder"/drivers/net/ethernet "$folder"/drivers/scsi "$folder"/drivers/gpu \
        "$folder"/drivers/nvme "$folder"/drivers/md "$folder"/net/sched "$folder"/net/netfilter "$folder"/fs/xfs "$folder"/fs/btrfs \
        "$folder"/fs/ceph "$folder"/fs/smb "$folder"/fs/nfs "$folder"/fs/nfsd "$folder"/fs/ocfs2 "$folder"/fs/gfs2 "$folder"/fs/f2fs
    release=$(basename "$(dirname "$folder")")
    depmod -b "$root" "$release"
done
rm -f "$root/vmlinuz" "$root/initrd.img" "$root/vmlinuz.old" "$root/initrd.img.old"
# A quarter of what the image would have: the hardware database (a virtual machine has no such hardware), the data of a library that only
# gdisk uses and nobody here calls, conversions of character sets.
rm -rf "$root"/usr/lib/udev/hwdb.d "$root"/usr/lib/udev/hwdb.bin "$root"/usr/lib/x86_64-linux-gnu/libicudata.so.* \
    "$root"/usr/lib/x86_64-linux-gnu/gconv
# cloud-init makes keys at the first boot.
rm -f "$root"/etc/ssh/ssh_host_*_key "$root"/etc/ssh/ssh_host_*_key.pub
rm -rf "$root"/usr/share/locale "$root"/usr/share/i18n "$root"/var/cache/apt "$root"/var/lib/apt/lists
mkdir -p "$root"/var/lib/apt/lists/partial "$root"/var/cache/apt/archives/partial "$root/boot/efi" "$root/boot/grub"
: > "$root/etc/resolv.conf"
rm -f "$root/etc/machine-id" "$root/var/lib/dbus/machine-id"
: > "$root/etc/machine-id"
touch "$root/usr"
touch -r "$root/usr" "$root/etc/.updated" "$root/var/.updated"
