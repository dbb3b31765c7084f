#!/usr/bin/env bash
# Packs the initial RAM filesystem of every guest: the guest daemon as /init and the kernel modules it inserts.
#
# Usage: build-initramfs.sh KERNELDIR ENVD OUT
#   KERNELDIR  made by fetch-kernel.sh        ENVD  the guest daemon, statically linked        OUT  a cpio archive (newc)
#
# The same input gives the same bytes: sorted names, no times, no owners, no inode numbers.
# Not compressed: an emulated CPU would spend longer on unpacking than the host on copying.
# /dev/console is not in it: every kernel brings that node in its own built-in archive.
# Needs: cpio. No root needed.
set -euo pipefail
export LC_ALL=C

say() { printf 'initramfs: %s\n' "$*"; }
fail() { printf 'initramfs: error: %s\n' "$*" >&2; exit 1; }

[ $# -eq 3 ] || fail "usage: $0 KERNELDIR ENVD OUT"
kernel_dir=$1 envd=$2 out=$3
command -v cpio >/dev/null || fail "cpio is missing: install the package cpio"
[ -e "$kernel_dir/modules/order" ] || fail "$kernel_dir/modules/order is missing: run fetch-kernel.sh $kernel_dir first"
[ -x "$envd" ] || fail "$envd is not a program: build it with cargo rustc --release -p envd -- -C target-feature=+crt-static"
if LC_ALL=C head -c 4096 "$envd" | grep -aq 'ld-linux'; then
  fail "$envd is dynamically linked: build it with -C target-feature=+crt-static"
fi

stamp=$(cat "$0" "$envd" "$kernel_dir/.stamp" | sha256sum | cut -c1-64)
if [ -s "$out" ] && [ -e "$out.stamp" ] && [ "$(cat "$out.stamp")" = "$stamp" ]; then
  say "$out is up to date"
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{dev,proc,sys,newroot,modules}
install -m 0755 "$envd" "$root/init"
install -m 0644 "$kernel_dir"/modules/order "$root/modules/order"
while read -r module; do install -m 0644 "$kernel_dir/modules/$module" "$root/modules/$module"; done < "$kernel_dir/modules/order"
find "$root" -exec touch -h -d @0 {} +
mkdir -p "$(dirname "$out")"
(cd "$root" && find . | sort | cpio --quiet --reproducible -o -H newc -R 0:0) > "$work/archive"
mv "$work/archive" "$out"
echo "$stamp" > "$out.stamp"
say "$out: $(stat -c %s "$out") bytes"
