#!/bin/sh
# Builds target/deb/vmmd_<version>_amd64.deb. Needs cargo, python3, binutils, dpkg-deb and what virtiofsd.sh needs. PROFILE=dev packages a development
# build, in target/deb/dev, and PROFILE=demo what the demonstration needs, in target/deb/demo; VERSION is another version than that of the commit.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
target=${CARGO_TARGET_DIR:-target}
profile=${PROFILE:-release}
programs=$("$here/programs.sh")
# What the package is older than, when a source has changed since.
sources="$programs/vmmd $programs/vmmd-netd $programs/vmm $programs/vmm-image $programs/vmmctl"
[ "$profile" = demo ] || sources="$sources $programs/vmmd-kube $("$here/virtiofsd.sh")"
version=${VERSION:-$("$here/version.sh")}
# Times in the package are those of the commit, so that the same sources give the same package.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

packages="$target/deb"
compression="-Zxz -z1"
if [ "$profile" != release ]; then
    # It is installed in an emulated node again and again: unpacking is to be quick.
    packages="$target/deb/$profile"
    compression="-Zgzip -z1"
fi
package="$packages/vmmd_${version}_amd64.deb"
# shellcheck disable=SC2086 # a list of paths
if [ -e "$package" ] && [ -z "$(find $sources "$here" vmmd/kube/manifests proto docs/examples -type f -newer "$package")" ]; then
    # The newest package is the one that is installed.
    touch "$package"
    echo "$package"
    exit 0
fi

mkdir -p "$packages"
root=$(mktemp -d "$packages/root.XXXXXX")
trap 'rm -rf "$root" "$root.deb" "$root.changelog"' EXIT
chmod 755 "$root"
"$here/stage.sh" "$root"
install -D -m 644 "$here/debian/copyright" "$root/usr/share/doc/vmmd/copyright"
install -D -m 644 "$here/debian/lintian-overrides" "$root/usr/share/lintian/overrides/vmmd"
cat >"$root.changelog" <<CHANGES
vmmd ($version) unstable; urgency=medium

  * Built from the sources; their history is in the repository.

 -- The vmmd project <vmmd@vmmd.invalid>  $(date -R -u -d "@$SOURCE_DATE_EPOCH")
CHANGES
gzip -9nc "$root.changelog" >"$root/usr/share/doc/vmmd/changelog.gz"

# The packages of the libraries that the binaries name; any other library than these is a mistake in the build.
depends() {
    find "$root/usr/lib/vmmd" "$root/usr/bin" -type f -exec sh -c 'for file; do case $(head -c 4 "$file") in ?ELF) objdump -p "$file" ;; esac; done' sh {} + | awk '
        $1 == "NEEDED" && $2 ~ /^(libc\.so\.6|libm\.so\.6|ld-linux-x86-64\.so\.2)$/ { next }
        $1 == "NEEDED" && $2 == "libgcc_s.so.1" { gcc = 1; next }
        # Of virtiofsd.
        $1 == "NEEDED" && $2 == "libcap-ng.so.0" { capabilities = 1; next }
        $1 == "NEEDED" && $2 == "libseccomp.so.2" { seccomp = 1; next }
        $1 == "NEEDED" { print "build-deb.sh: unexpected library " $2 > "/dev/stderr"; wrong = 1 }
        $NF ~ /^GLIBC_[0-9.]+$/ {
            split(substr($NF, 7), part, ".")
            value = part[1] * 1000 + part[2]
            if (value > newest) { newest = value; glibc = part[1] "." part[2] }
        }
        END {
            if (wrong) exit 1
            printf "libc6 (>= %s)%s%s%s", glibc, gcc ? ", libgcc-s1" : "", capabilities ? ", libcap-ng0 (>= 0.7.9)" : "",
                seccomp ? ", libseccomp2 (>= 2.5.0)" : ""
        }'
}
depends=$(depends)

size=$(du -sk --apparent-size "$root" | cut -f1)
mkdir -m 755 "$root/DEBIAN"
sed -e "s/@VERSION@/$version/" -e "s/@SIZE@/$size/" -e "s/@DEPENDS@/$depends/" "$here/debian/control.in" \
    >"$root/DEBIAN/control"
(cd "$root" && find etc -type f -printf '/%p\n' | LC_ALL=C sort) >"$root/DEBIAN/conffiles"
for script in preinst postinst prerm postrm; do
    sed -e "s/@VERSION@/$version/" "$here/debian/$script" >"$root/DEBIAN/$script"
    chmod 755 "$root/DEBIAN/$script"
done
(cd "$root" && find . -type f ! -path './DEBIAN/*' ! -path './etc/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) \
    >"$root/DEBIAN/md5sums"
chmod -R u=rwX,go=rX "$root"

# shellcheck disable=SC2086 # two options
dpkg-deb --root-owner-group $compression --build "$root" "$root.deb" >/dev/null
mv "$root.deb" "$package"
# Those of a few commits before are enough.
find "$packages" -maxdepth 1 -name 'vmmd_*.deb' -printf '%T@ %p\n' | sort -rn | tail -n +6 | cut -d' ' -f2- | xargs -r rm --
echo "$package"
