#!/bin/sh
# Builds virtiofsd, which serves shares, once for each version, from its crate. Prints the folder that has it as bin/virtiofsd, with the
# notices of its licences as notices. Needs libcap-ng and libseccomp with what is compiled against them; its other sources are crates, at the versions of
# its own Cargo.lock.
set -eu

version=1.14.0
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
cargo=${CARGO:-cargo}
folder="${CARGO_TARGET_DIR:-target}/virtiofsd/$version"
mkdir -p "${folder%/*}"
exec 9>"${folder%/*}/lock"
flock 9
if [ ! -e "$folder/notices" ]; then
    rm -rf "$folder"
    # Cargo's own messages are for a developer's folder of programs.
    if ! "$cargo" install --quiet --locked --version "=$version" --root "$folder" --target-dir "${folder%/*}/build" virtiofsd >&2; then
        echo "virtiofsd.sh: virtiofsd was not built. It needs libcap-ng and libseccomp (Debian: libcap-ng-dev and libseccomp-dev)" >&2
        exit 1
    fi
    rm -rf "${folder%/*}/build"
    for source in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/virtiofsd-"$version"; do
        "$here/notices.py" --of "$source" >"$folder/notices.new"
    done
    mv "$folder/notices.new" "$folder/notices"
fi
echo "$folder"
