#!/bin/sh
# Installs what the test node, the guest images and the package need on the build host; with the argument `demo` only what `make demo` needs.
# Idempotent; quick when nothing is missing.
set -eu
cd "$(dirname "$0")/.."

# package:file that shows it is there. qemu-system-x86 is asked for without qemu-utils: apt may not be able to bring both
# to one version when a newer qemu-utils is already installed. It removes that one then; see below.
wanted="
mmdebstrap:/usr/bin/mmdebstrap
debian-archive-keyring:/usr/share/keyrings/debian-archive-keyring.gpg
qemu-system-x86:/usr/bin/qemu-system-x86_64
e2fsprogs:/sbin/mkfs.ext4
dosfstools:/sbin/mkfs.vfat
mtools:/usr/bin/mcopy
grub-common:/usr/bin/grub-mkimage
grub-pc-bin:/usr/lib/grub/i386-pc/boot.img
grub-efi-amd64-bin:/usr/lib/grub/x86_64-efi/monolithic/grubx64.efi
openssh-client:/usr/bin/ssh
kmod:/sbin/depmod
xz-utils:/usr/bin/xz
zstd:/usr/bin/zstd
lz4:/usr/bin/lz4
gcc:/usr/bin/gcc
libc6-dev:/usr/lib/x86_64-linux-gnu/libc.a
python3:/usr/bin/python3
"
for_tests="
make:/usr/bin/make
python3-venv:/usr/share/doc/python3-venv
libcap-ng-dev:/usr/include/cap-ng.h
libseccomp-dev:/usr/include/seccomp.h
chromium:/usr/bin/chromium
libnss3-tools:/usr/bin/certutil
"
demo=
if [ "${1:-}" = demo ]; then demo=yes; else wanted="$wanted $for_tests"; fi

missing=
for entry in $wanted; do
    [ -e "${entry#*:}" ] || missing="$missing ${entry%%:*}"
done
# Unit tests have qcow2 images checked by it where it is there.
qemu_img=/usr/bin/qemu-img
# Brought into the node by a test. Only its files are wanted, and not the packages that it depends on (Node.js, NumPy).
novnc=${CARGO_TARGET_DIR:-target}/test-node/novnc.deb
[ -z "$missing" ] && [ -e "$qemu_img" ] && { [ -n "$demo" ] || [ -e "$novnc" ]; } && exit 0

if [ "$(id -u)" != 0 ]; then
    [ -e "$qemu_img" ] || missing="$missing qemu-utils"
    [ -n "$demo" ] || [ -e "$novnc" ] || missing="$missing novnc"
    echo "tests/setup-host.sh: these packages are missing, run this script as root:$missing" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
install="apt-get install -q -y --no-install-recommends"
# shellcheck disable=SC2086 # lists of words
{
    [ -z "$missing" ] || $install $missing
    [ -e "$qemu_img" ] || $install qemu-utils
}
if [ -z "$demo" ] && [ ! -e "$novnc" ]; then
    folder=$(mktemp -d)
    (cd "$folder" && apt-get download -q -o APT::Sandbox::User=root novnc)
    mkdir -p "$(dirname "$novnc")"
    mv "$folder"/novnc_*.deb "$novnc"
    rmdir "$folder"
fi
