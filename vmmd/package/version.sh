#!/bin/sh
# Prints the version of the package: that of Cargo.toml at the commit that the tag v<version> names, elsewhere followed by the
# commit's time and name, so that a newer build is an upgrade: 0.1.0+git20261124.063000.3adf65d. A tree with changes that are not
# committed adds `.changed`.
set -eu
cd "$(dirname "$0")/../.."

version=$("${CARGO:-cargo}" pkgid -p vmmd)
version=${version##*[@#]}
if commit=$(git rev-parse --short=7 HEAD 2>/dev/null); then
    tagged=$(git tag --points-at HEAD --list "v$version")
    changed=$(git status --porcelain --untracked-files=no)
    if [ -z "$tagged" ] || [ -n "$changed" ]; then
        version="$version+git$(TZ=UTC git log -1 --date=format-local:%Y%m%d.%H%M%S --format=%cd).$commit"
    fi
    if [ -n "$changed" ]; then
        version="$version.changed"
    fi
fi
echo "$version"
