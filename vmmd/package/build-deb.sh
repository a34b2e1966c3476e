#!/bin/sh
# Builds target/deb/vmmd_<version>_amd64.deb from the release binaries. Needs cargo, binutils and dpkg-deb only.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
cd "$top"
target=${CARGO_TARGET_DIR:-target}
cargo=${CARGO:-cargo}

# Apart, so that features that only the daemon needs (gRPC) are not switched on in the crates that vmm shares with it.
"$cargo" build --release --locked -p vmmd -p vmmctl --bin vmmd --bin vmmctl
"$cargo" build --release --locked -p vmm-core --bin vmm

version=$("$cargo" pkgid -p vmmd)
version=${version##*[@#]}
# Times in the package are those of the commit, so that the same sources give the same package.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

release="$target/release"
package="$target/deb/vmmd_${version}_amd64.deb"
if [ -e "$package" ] && [ -z "$(find "$release/vmmd" "$release/vmm" "$release/vmmctl" "$here" "$top/proto" "$top/docs/examples" -type f -newer "$package")" ]; then
    echo "$package"
    exit 0
fi

mkdir -p "$target/deb"
root=$(mktemp -d "$target/deb/root.XXXXXX")
trap 'rm -rf "$root" "$root.deb"' EXIT
chmod 755 "$root"

# put MODE SOURCE DESTINATION
put() {
    install -D -m "$1" "$2" "$root/$3"
}
# put_gz SOURCE DESTINATION
put_gz() {
    mkdir -p "$(dirname "$root/$2")"
    gzip -9nc "$1" >"$root/$2"
    chmod 644 "$root/$2"
}

put 755 "$release/vmmd" usr/lib/vmmd/vmmd
put 755 "$release/vmm" usr/lib/vmmd/vmm
put 755 "$here/stop-guests" usr/lib/vmmd/stop-guests
put 755 "$release/vmmctl" usr/bin/vmmctl
mkdir -p "$root/usr/sbin"
ln -s ../lib/vmmd/vmmd "$root/usr/sbin/vmmd"
ln -s ../lib/vmmd/vmm "$root/usr/sbin/vmm"
for unit in "$here"/systemd/*.service; do
    put 644 "$unit" "lib/systemd/system/${unit##*/}"
done
put 644 "$here/vmmd.sysusers" usr/lib/sysusers.d/vmmd.conf
put 644 "$here/config.toml" etc/vmmd/config.toml
for example in "$here"/examples/*.yaml; do
    put 644 "$example" "usr/share/doc/vmmd/examples/${example##*/}"
done
put 644 "$here/debian/copyright" usr/share/doc/vmmd/copyright

for file in "$top"/proto/vmmd/v1/*.proto "$top"/proto/google/rpc/*.proto; do
    put 644 "$file" "usr/share/vmmd/proto/${file#"$top"/proto/}"
done
for file in "$top"/docs/examples/*/*; do
    put 644 "$file" "usr/share/doc/vmmd/examples/${file#"$top"/docs/examples/}"
done

generated="$root/generated"
"$release/vmmctl" generate "$generated"
put 644 "$generated/bash/vmmctl" usr/share/bash-completion/completions/vmmctl
put 644 "$generated/zsh/_vmmctl" usr/share/zsh/vendor-completions/_vmmctl
put 644 "$generated/fish/vmmctl.fish" usr/share/fish/vendor_completions.d/vmmctl.fish
for page in "$generated"/man1/*.1; do
    put_gz "$page" "usr/share/man/man1/${page##*/}.gz"
done
for page in "$here"/man/*.8; do
    put_gz "$page" "usr/share/man/man8/${page##*/}.gz"
done
rm -r "$generated"

cat >"$root/changelog" <<CHANGES
vmmd ($version) unstable; urgency=medium

  * Built from the sources; their history is in the repository.

 -- The vmmd project <vmmd@vmmd.invalid>  $(date -R -u -d "@$SOURCE_DATE_EPOCH")
CHANGES
put_gz "$root/changelog" usr/share/doc/vmmd/changelog.gz
rm "$root/changelog"

# The packages of the libraries that the binaries name; any other library than these is a mistake in the build.
depends() {
    programs="$root/usr/lib/vmmd/vmmd $root/usr/lib/vmmd/vmm $root/usr/bin/vmmctl"
    # shellcheck disable=SC2086 # a list of paths
    objdump -p $programs | awk '
        $1 == "NEEDED" && $2 ~ /^(libc\.so\.6|libm\.so\.6|ld-linux-x86-64\.so\.2)$/ { next }
        $1 == "NEEDED" && $2 == "libgcc_s.so.1" { gcc = 1; next }
        $1 == "NEEDED" { print "build-deb.sh: unexpected library " $2 > "/dev/stderr"; wrong = 1 }
        $NF ~ /^GLIBC_[0-9.]+$/ {
            split(substr($NF, 7), part, ".")
            value = part[1] * 1000 + part[2]
            if (value > newest) { newest = value; glibc = part[1] "." part[2] }
        }
        END {
            if (wrong) exit 1
            printf "libc6 (>= %s)%s", glibc, gcc ? ", libgcc-s1" : ""
        }'
}
depends=$(depends)

size=$(du -sk --apparent-size "$root" | cut -f1)
mkdir -m 755 "$root/DEBIAN"
sed -e "s/@VERSION@/$version/" -e "s/@SIZE@/$size/" -e "s/@DEPENDS@/$depends/" "$here/debian/control.in" \
    >"$root/DEBIAN/control"
echo /etc/vmmd/config.toml >"$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    put 755 "$here/debian/$script" "DEBIAN/$script"
done
(cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) \
    >"$root/DEBIAN/md5sums"
chmod -R u=rwX,go=rX "$root"

dpkg-deb --root-owner-group -Zxz -z1 --build "$root" "$root.deb" >/dev/null
mv "$root.deb" "$package"
echo "$package"
