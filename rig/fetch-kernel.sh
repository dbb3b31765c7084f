#!/usr/bin/env bash
# Takes the rig's own kernel (of the nested production machine, not of guests) from packages without installing them.
#
# Usage: fetch-kernel.sh OUT
#   OUT/vmlinuz                    the kernel (bzImage)
#   OUT/kernel.release             what `uname -r` says in the rig
#   OUT/lib/modules/RELEASE/…      all its modules, uncompressed: unpacking them in an emulated machine would take longer
#
# It must have AMD's KVM, ublk, tun, XFS and nf_tables: Debian 12 takes it from its backports (scripts/bootstrap.sh --tests
# makes them known to apt), Debian 13 and Ubuntu from the release itself. RIG_KERNEL_PACKAGE names another image package.
# A second call does nothing, unless REFRESH=1 finds a newer package. Needs: apt, dpkg, xz, zstd. No root needed.
set -euo pipefail
export LC_ALL=C

# What the tests in the rig need; each may be built in as well.
WANTED="kvm-amd ublk_drv tun veth xfs ext4 loop fuse nf_tables nft_chain_nat nft_masq virtio_pci virtio_blk virtio_console"

say() { printf 'rig kernel: %s\n' "$*"; }
fail() { printf 'rig kernel: error: %s\n' "$*" >&2; exit 1; }

[ $# -eq 1 ] || fail "usage: $0 OUT"
for tool in apt-get apt-cache dpkg xz zstd; do
  command -v "$tool" >/dev/null || fail "$tool is missing: install apt, dpkg, xz-utils and zstd"
done
mkdir -p "$1"
out=$(cd "$1" && pwd)

script=$({ cat "$0"; echo "${RIG_KERNEL_PACKAGE:-}"; } | sha256sum | cut -c1-16)
if [ -z "${REFRESH:-}" ] && [ -s "$out/vmlinuz" ] && grep -qs " $script\$" "$out/.stamp"; then
  say "$(cat "$out/kernel.release") is there (REFRESH=1 looks for a newer one)"
  exit 0
fi

# shellcheck source=/dev/null
. /etc/os-release
meta='' suite=()
case "$ID ${VERSION_CODENAME:-}" in
  "debian bookworm") meta=linux-image-cloud-$(dpkg --print-architecture) suite=(-t bookworm-backports) ;;
  debian*) meta=linux-image-cloud-$(dpkg --print-architecture) ;;
  ubuntu*) meta=linux-image-virtual ;;
esac
image_package() {
  if [ -n "${RIG_KERNEL_PACKAGE:-}" ]; then echo "$RIG_KERNEL_PACKAGE"; return; fi
  [ -n "$meta" ] || fail "no kernel package is known for this distribution: name one in RIG_KERNEL_PACKAGE"
  apt-cache "${suite[@]}" depends "$meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-/ { print $2; exit }'
}
if [ ${#suite[@]} -gt 0 ] && [ -z "${RIG_KERNEL_PACKAGE:-}" ] \
  && ! apt-get indextargets --format '$(RELEASE)' 'Created-By: Packages' | grep -qx "${suite[1]}"; then
  fail "${suite[1]} is not among apt's sources: run scripts/bootstrap.sh --tests, or name a kernel in RIG_KERNEL_PACKAGE"
fi
package=$(image_package || true)
if [ -z "$package" ]; then
  say "no package list is here: apt-get update"
  apt-get -q update >/dev/null || fail "apt-get update failed"
  package=$(image_package)
fi
[ -n "$package" ] || fail "the package sources of this machine offer no kernel for the rig: name one in RIG_KERNEL_PACKAGE"
version=$(apt-cache "${suite[@]}" policy "$package" | awk '$1 == "Candidate:" { print $2 }')
[ -n "$version" ] && [ "$version" != "(none)" ] || fail "package $package cannot be had from this machine's sources"

stamp="$package $version $script"
if [ -s "$out/vmlinuz" ] && [ "$(cat "$out/.stamp" 2>/dev/null)" = "$stamp" ]; then
  say "$package $version is there"
  exit 0
fi

work=$(mktemp -d -p "$out" .kernel-XXXXXX)
trap 'rm -rf "$work"' EXIT
packages=("$package=$version")
# Ubuntu keeps the modules in two packages of their own.
for modules in "linux-modules-${package#linux-image-}" "linux-modules-extra-${package#linux-image-}"; do
  if apt-cache show "$modules" >/dev/null 2>&1; then packages+=("$modules"); fi
done
say "downloading ${packages[*]}"
(cd "$work" && apt-get -q -o APT::Sandbox::User=root download "${packages[@]}" >download.log 2>&1) \
  || fail "download failed: $(tail -n 3 "$work/download.log")"
for deb in "$work"/*.deb; do dpkg -x "$deb" "$work/tree"; done

kernel=("$work"/tree/boot/vmlinuz-*)
[ -e "${kernel[0]}" ] || fail "$package contains no /boot/vmlinuz-*"
release=${kernel[0]##*/vmlinuz-}
modules=$work/tree/lib/modules/$release
[ -d "$modules" ] || modules=$work/tree/usr/lib/modules/$release
[ -d "$modules" ] || fail "$package and its modules packages contain no modules of $release"
say "unpacking the modules of $release"
find "$modules" -name '*.ko.xz' -print0 | xargs -0 -r -P "$(nproc)" -n 16 xz -d
find "$modules" -name '*.ko.zst' -print0 | xargs -0 -r -P "$(nproc)" -n 16 zstd -q -d --rm
for name in $WANTED; do
  pattern=${name//[-_]/[-_]}
  [ -n "$(find "$modules" -name "$pattern.ko" | head -n 1)" ] || grep -qE "/$pattern\.ko$" "$modules/modules.builtin" \
    || fail "kernel $release has no $name, neither built in nor as a module: name another kernel in RIG_KERNEL_PACKAGE"
done

rm -rf "$out/lib" "$out/.stamp"
mkdir -p "$out/lib/modules"
mv "$modules" "$out/lib/modules/$release"
cp "${kernel[0]}" "$out/vmlinuz"
echo "$release" > "$out/kernel.release"
echo "$stamp" > "$out/.stamp"
say "$release: $(du -sm "$out/lib" | cut -f1) MB of modules"
