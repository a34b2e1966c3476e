#!/bin/sh
# image.sh NAME PROGRAM [ARGUMENT…]: writes to standard output a container image, as an archive of Docker's format, that has this static program
# as its only file and runs it with the arguments.
set -eu
name=$1 program=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
word=$(basename "$program")
mkdir "$work/root"
cp "$program" "$work/root/$word"
chmod 755 "$work/root/$word"
tar --create --format=ustar --owner=0 --group=0 --numeric-owner --mtime=@0 --directory="$work/root" "$word" >"$work/layer.tar"
layer=$(sha256sum "$work/layer.tar" | cut -d ' ' -f 1)
words="\"/$word\""
for argument; do
    words="$words, \"$argument\""
done
printf '{"architecture": "amd64", "os": "linux", "config": {"Entrypoint": [%s]}, "rootfs": {"type": "layers", "diff_ids": ["sha256:%s"]}}' \
    "$words" "$layer" >"$work/config.json"
printf '[{"Config": "config.json", "RepoTags": ["%s"], "Layers": ["layer.tar"]}]' "$name" >"$work/manifest.json"
tar --create --format=ustar --owner=0 --group=0 --numeric-owner --mtime=@0 --directory="$work" manifest.json config.json layer.tar
