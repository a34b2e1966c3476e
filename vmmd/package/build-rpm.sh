#!/bin/sh
# Builds target/rpm/vmmd-<version>-1.x86_64.rpm with the files of the Debian package. Needs rpmbuild (Debian: rpm) beside what that
# one needs; PROFILE and VERSION mean the same.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
target=${CARGO_TARGET_DIR:-target}
"$here/programs.sh" >/dev/null
version=${VERSION:-$("$here/version.sh")}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

packages="$target/rpm"
[ "${PROFILE:-release}" != dev ] || packages="$target/rpm/dev"
mkdir -p "$packages"
work=$(mktemp -d "$packages/work.XXXXXX")
work=$(cd "$work" && pwd)
trap 'rm -rf "$work"' EXIT
root="$work/root"
mkdir "$root"
"$here/stage.sh" "$root"
# /lib is a link to /usr/lib where packages are RPMs.
mkdir -p "$root/usr/lib/systemd"
mv "$root/lib/systemd/system" "$root/usr/lib/systemd/system"
rmdir "$root/lib/systemd" "$root/lib"
install -D -m 644 LICENSE "$root/usr/share/doc/vmmd/LICENSE"
(cd "$root" && find . \( -type f -o -type l \) -printf '/%P\n' | LC_ALL=C sort | sed 's|^/etc/|%config(noreplace) &|') >"$work/files"
sed "s/@VERSION@/$version/" "$here/vmmd.spec" >"$work/vmmd.spec"

rpmbuild -bb --quiet --buildroot "$work/build" --define "_topdir $work" --define "_rpmdir $work" --define "staged $root" \
    --define "list $work/files" --define "use_source_date_epoch_as_buildtime 1" --define "_build_id_links none" \
    --target x86_64-linux "$work/vmmd.spec"
mv "$work/x86_64/vmmd-$version-1.x86_64.rpm" "$packages/"
echo "$packages/vmmd-$version-1.x86_64.rpm"
