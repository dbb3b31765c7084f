#!/usr/bin/env bash
# Takes the guest kernel from the running distribution's packages without installing it.
#
# Usage: fetch-kernel.sh OUT
#   OUT/vmlinuz          the kernel (bzImage), as QEMU takes it
#   OUT/vmlinux          the same kernel as an uncompressed ELF file, as Firecracker takes it
#   OUT/modules/*.ko     the modules a guest needs before it can mount its root disk, uncompressed
#   OUT/modules/order    their file names in the order to insert them, one a line (empty when all are built in)
#   OUT/kernel.release   what `uname -r` says in the guest
#
# Debian: the package behind linux-image-cloud-amd64. Ubuntu: the one behind linux-image-virtual, and its modules package.
# GUEST_KERNEL_PACKAGE names another image package. A second call does nothing, unless REFRESH=1 finds a newer package.
# Needs: apt, dpkg, gzip, lz4, od, xz, zstd. No root needed.
set -euo pipefail
export LC_ALL=C

# What must be there to find, mount and reach: whatever of it is a module comes along with what it depends on.
WANTED_MODULES="virtio_mmio virtio_net virtio_blk ext4"
# What a guest can do without: a kernel that has it neither built in nor as a module is taken all the same.
OPTIONAL_MODULES="virtio_balloon"

say() { printf 'guest kernel: %s\n' "$*"; }
fail() { printf 'guest kernel: error: %s\n' "$*" >&2; exit 1; }

[ $# -eq 1 ] || fail "usage: $0 OUT"
for tool in apt-get apt-cache dpkg gzip lz4 od xz zstd; do
  command -v "$tool" >/dev/null || fail "$tool is missing: install apt, dpkg, gzip, lz4, coreutils, xz-utils and zstd"
done
mkdir -p "$1"
out=$(cd "$1" && pwd)

# A kernel that is there stays: captures are bound to it, so a newer one must be asked for.
script=$(sha256sum < "$0" | cut -c1-16)
if [ -z "${REFRESH:-}" ] && [ -s "$out/vmlinuz" ] && [ -s "$out/vmlinux" ] && grep -qs " $script\$" "$out/.stamp"; then
  say "$(cat "$out/kernel.release") is there (REFRESH=1 looks for a newer one)"
  exit 0
fi

# The image package that the distribution's meta package stands for; a list of packages that was never fetched is fetched.
image_package() {
  local meta
  if [ -n "${GUEST_KERNEL_PACKAGE:-}" ]; then echo "$GUEST_KERNEL_PACKAGE"; return; fi
  # shellcheck source=/dev/null
  case "$(. /etc/os-release && echo "$ID ${ID_LIKE:-}")" in
    *ubuntu*) meta=linux-image-virtual ;;
    *debian*) meta=linux-image-cloud-$(dpkg --print-architecture) ;;
    *) fail "no kernel package is known for this distribution: name one in GUEST_KERNEL_PACKAGE" ;;
  esac
  apt-cache depends "$meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-/ { print $2; exit }'
}
package=$(image_package || true)
if [ -z "$package" ]; then
  say "no package list is here: apt-get update"
  apt-get -q update >/dev/null || fail "apt-get update failed"
  package=$(image_package)
fi
[ -n "$package" ] || fail "the package sources of this machine offer no cloud kernel: name one in GUEST_KERNEL_PACKAGE"
version=$(apt-cache policy "$package" | awk '$1 == "Candidate:" { print $2 }')
[ -n "$version" ] && [ "$version" != "(none)" ] || fail "package $package cannot be had from this machine's sources"

stamp="$package $version $script"
if [ -s "$out/vmlinuz" ] && [ -s "$out/vmlinux" ] && [ "$(cat "$out/.stamp" 2>/dev/null)" = "$stamp" ]; then
  say "$package $version is there"
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
release=${package#linux-image-}
release=${release#unsigned-}
packages=("$package=$version")
# Ubuntu keeps the modules in a package of their own.
if apt-cache show "linux-modules-$release" >/dev/null 2>&1; then packages+=("linux-modules-$release"); fi
say "downloading ${packages[*]}"
(cd "$work" && apt-get -q -o APT::Sandbox::User=root download "${packages[@]}" >download.log 2>&1) \
  || fail "download failed: $(tail -n 3 "$work/download.log")"
for deb in "$work"/*.deb; do dpkg -x "$deb" "$work/tree"; done

kernel=("$work"/tree/boot/vmlinuz-*)
[ -e "${kernel[0]}" ] || fail "$package contains no /boot/vmlinuz-*"
release=${kernel[0]##*/vmlinuz-}
module_dir=$work/tree/lib/modules/$release
[ -d "$module_dir" ] || module_dir=$work/tree/usr/lib/modules/$release
[ -d "$module_dir" ] || fail "$package and its modules package contain no modules of $release"

# Prints the file of a module, or nothing when it is built in.
module_file() {
  local pattern=${1//[-_]/[-_]}
  find "$module_dir" -name "$pattern.ko*" | head -n 1
}
is_builtin() { grep -qE "/${1//[-_]/[-_]}\.ko$" "$module_dir/modules.builtin"; }

mkdir "$work/modules"
: > "$work/modules/order"
# What a module says it depends on: the string `depends=` of its .modinfo section.
dependencies() { tr '\0' '\n' < "$1" | sed -n 's/^depends=//p' | head -n 1 | tr ',-' ' _'; }
is_there() { [ -n "$(module_file "$1")" ] || is_builtin "$1"; }
# Adds a module after everything it depends on.
add_module() {
  local name=$1 file target dependency
  grep -qx "$name.ko" "$work/modules/order" && return
  file=$(module_file "$name")
  if [ -z "$file" ]; then
    is_builtin "$name" || fail "kernel $release has no $name, neither built in nor as a module"
    return
  fi
  target=$work/modules/$name.ko
  case "$file" in
    *.ko) cp "$file" "$target" ;;
    *.ko.xz) xz -dc "$file" > "$target" ;;
    *.ko.zst) zstd -qdc "$file" > "$target" ;;
    *.ko.gz) gzip -dc "$file" > "$target" ;;
    *) fail "unknown compression of $file" ;;
  esac
  for dependency in $(dependencies "$target"); do add_module "$dependency"; done
  echo "$name.ko" >> "$work/modules/order"
}
for module in $WANTED_MODULES; do add_module "$module"; done
for module in $OPTIONAL_MODULES; do
  if is_there "$module"; then add_module "$module"; else say "kernel $release has no $module: guests do without"; fi
done

# Takes the ELF file out of a bzImage. Where it lies is said by the header of Linux' x86 boot protocol
# (Documentation/arch/x86/boot.rst): setup_sects (one byte at 0x1f1, 0 means 4), payload_offset (0x248), payload_length (0x24c).
# Except for gzip, which knows it itself, the kernel's build appends the size of the unpacked file in four bytes.
unpack_kernel() {
  local image=$1 target=$2 sectors offset length start magic
  number() { od -An -v -j "$1" -N "$2" -t "u$2" "$image" | tr -d ' '; }
  sectors=$(number 0x1f1 1) offset=$(number 0x248 4) length=$(number 0x24c 4)
  [ "$sectors" -ne 0 ] || sectors=4
  start=$(((sectors + 1) * 512 + offset))
  magic=$(od -An -v -j "$start" -N 4 -t x1 "$image" | tr -d ' ')
  payload() { dd if="$image" iflag=skip_bytes,count_bytes skip="$start" count="$1" bs=1M status=none; }
  case "$magic" in
    02214c18) payload $((length - 4)) | lz4 -dcq > "$target" ;;
    28b52ffd) payload $((length - 4)) | zstd -dcq > "$target" ;;
    fd377a58) payload $((length - 4)) | xz -dcq > "$target" ;;
    1f8b*) payload "$length" | gzip -dcq > "$target" ;;
    7f454c46) payload "$length" > "$target" ;;
    *) fail "the payload of $image begins with $magic: no compression that is known here" ;;
  esac
  [ "$(head -c 4 "$target" | od -An -t x1 | tr -d ' ')" = 7f454c46 ] || fail "the payload of $image is no ELF file"
}
unpack_kernel "${kernel[0]}" "$work/vmlinux"

rm -rf "$out/modules" "$out/.stamp"
cp "${kernel[0]}" "$out/vmlinuz"
cp "$work/vmlinux" "$out/vmlinux"
cp -r "$work/modules" "$out/modules"
echo "$release" > "$out/kernel.release"
echo "$stamp" > "$out/.stamp"
say "$release: $(stat -c %s "$out/vmlinuz") bytes, unpacked $(stat -c %s "$out/vmlinux"), modules: $(tr '\n' ' ' < "$out/modules/order")"
