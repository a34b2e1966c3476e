#!/bin/sh
# Builds the programs and prints the folder that they are in. PROFILE is release (the default), dev, or demo: without optimization, and without
# vmmd-kube, so that they are built in minutes.
set -eu
cd "$(dirname "$0")/../.."
profile=${PROFILE:-release}
cargo=${CARGO:-cargo}
# The programs have no time in them. Build scripts that watch this variable would compile their crate, and the daemon, anew whenever it
# comes or goes.
unset SOURCE_DATE_EPOCH

if [ "$profile" = dev ]; then
    # The very programs that the tests of the workspace are built with, with the same features (FEATURES): nothing is compiled twice, or
    # built over by one that lacks them.
    # shellcheck disable=SC2086 # a list of words
    "$cargo" test --locked --workspace ${FEATURES:-} --no-run --quiet >&2
    profile=debug
elif [ "$profile" = demo ]; then
    "$cargo" build --profile demo --locked -p vmmd -p vmmctl -p vmmd-network -p vmm-core -p vmm-image \
        --bin vmmd --bin vmmctl --bin vmmd-netd --bin vmm --bin vmm-image >&2
else
    # Apart, so that features that only one of them needs (gRPC, HTTP clients) are not switched on in the crates that the others share with it.
    "$cargo" build --profile "$profile" --locked -p vmmd -p vmmctl -p vmmd-network --bin vmmd --bin vmmctl --bin vmmd-netd >&2
    "$cargo" build --profile "$profile" --locked -p vmm-core --bin vmm >&2
    "$cargo" build --profile "$profile" --locked -p vmm-image --bin vmm-image >&2
    "$cargo" build --profile "$profile" --locked -p vmmd-kube --bin vmmd-kube >&2
fi
if [ "$profile" != demo ]; then
    # It runs in an image without any other file. With a target that is named, cargo does not give these flags to build scripts.
    target=$(uname -m)-unknown-linux-gnu
    name=$profile
    [ "$profile" != debug ] || name=dev
    RUSTFLAGS="-C target-feature=+crt-static" "$cargo" build --profile "$name" --locked --target "$target" -p vmmd-pod --bin vmmd-pod >&2
    cp "${CARGO_TARGET_DIR:-target}/$target/$profile/vmmd-pod" "${CARGO_TARGET_DIR:-target}/$profile/vmmd-pod.static"
fi
echo "${CARGO_TARGET_DIR:-target}/$profile"
