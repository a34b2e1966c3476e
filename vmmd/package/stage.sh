#!/bin/sh
# stage.sh ROOT: puts every file of the package below ROOT. Both packages, .deb and .rpm, have these files. Builds the programs first,
# with optimization; PROFILE=dev packages those of a development build. PROFILE=demo leaves out what takes long to build and is no part of the
# demonstration: vmmd-kube and virtiofsd.
set -eu

root=$1
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
target=${CARGO_TARGET_DIR:-target}
programs=$("$here/programs.sh")
if [ "${PROFILE:-release}" = demo ]; then
    names="vmmd vmmd-netd vmm vmm-image"
    virtiofsd=
    launcher=
else
    names="vmmd vmmd-netd vmm vmm-image vmmd-kube"
    virtiofsd=$("$here/virtiofsd.sh")
    launcher=$programs/vmmd-pod.static
fi

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

for program in $names; do
    put 755 "$programs/$program" "usr/lib/vmmd/$program"
    strip "$root/usr/lib/vmmd/$program"
done
if [ -n "$virtiofsd" ]; then
    put 755 "$virtiofsd/bin/virtiofsd" usr/lib/vmmd/virtiofsd
    strip "$root/usr/lib/vmmd/virtiofsd"
fi
if [ -n "$launcher" ]; then
    put 755 "$launcher" usr/lib/vmmd/vmmd-pod
    strip "$root/usr/lib/vmmd/vmmd-pod"
    put 755 "$here/pod-image" usr/lib/vmmd/pod-image
fi
put 755 "$here/stop-guests" usr/lib/vmmd/stop-guests
put 755 "$here/default-network" usr/lib/vmmd/default-network
put 755 "$programs/vmmctl" usr/bin/vmmctl
strip "$root/usr/bin/vmmctl"
mkdir -p "$root/usr/sbin"
ln -s ../lib/vmmd/vmmd "$root/usr/sbin/vmmd"
ln -s ../lib/vmmd/vmm "$root/usr/sbin/vmm"
ln -s ../lib/vmmd/vmm-image "$root/usr/sbin/vmm-image"
for unit in "$here"/systemd/*.service; do
    put 644 "$unit" "lib/systemd/system/${unit##*/}"
done
put 644 "$here/vmmd.sysusers" usr/lib/sysusers.d/vmmd.conf
put 644 "$here/config.toml" etc/vmmd/config.toml
put 644 "$here/vmmd.logrotate" etc/logrotate.d/vmmd
put 644 "$here/apparmor/vmmd" usr/share/vmmd/apparmor/vmmd
for example in "$here"/examples/*.yaml; do
    put 644 "$example" "usr/share/doc/vmmd/examples/${example##*/}"
done
# For a cluster whose nodes these are.
put 644 "$here/systemd/pods.conf" usr/share/vmmd/pods.conf
for manifest in vmmd/kube/manifests/*.yaml; do
    put 644 "$manifest" "usr/share/vmmd/kubernetes/${manifest#vmmd/kube/manifests/}"
done
# What a client of the API is written with.
for file in proto/vmmd/v1/*.proto proto/google/rpc/*.proto; do
    put 644 "$file" "usr/share/vmmd/$file"
done
for file in docs/examples/*/*; do
    put 644 "$file" "usr/share/doc/vmmd/examples/${file#docs/examples/}"
done

work=$(mktemp -d "$target/stage.XXXXXX")
trap 'rm -rf "$work"' EXIT
"$programs/vmmctl" generate "$work"
put 644 "$work/bash/vmmctl" usr/share/bash-completion/completions/vmmctl
put 644 "$work/zsh/_vmmctl" usr/share/zsh/vendor-completions/_vmmctl
put 644 "$work/fish/vmmctl.fish" usr/share/fish/vendor_completions.d/vmmctl.fish
for page in "$work"/man1/*.1; do
    put_gz "$page" "usr/share/man/man1/${page##*/}.gz"
done
for page in "$here"/man/*.8; do
    put_gz "$page" "usr/share/man/man8/${page##*/}.gz"
done
# Licences of what is linked in.
{
    "$here/notices.py"
    if [ -n "$virtiofsd" ]; then
        printf '\n%s\n' "$(printf '%080d' 0 | tr 0 '=')"
        cat "$virtiofsd/notices"
    fi
} >"$work/notices"
put_gz "$work/notices" usr/share/doc/vmmd/third-party-notices.gz
