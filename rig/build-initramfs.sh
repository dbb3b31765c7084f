#!/usr/bin/env bash
# Packs the rig's initial RAM filesystem: a static busybox, the modules that reach a disk, and a script that enters it.
#
# Usage: build-initramfs.sh KERNELDIR OUT
#   KERNELDIR  made by fetch-kernel.sh        OUT  a cpio archive (newc), not compressed
#
# The rig cannot stay in it: Firecracker's jailer calls pivot_root, which the kernel refuses where / is an initramfs.
# A second call with the same input does nothing. Needs: apt, dpkg, cpio. No root needed.
set -euo pipefail
export LC_ALL=C

say() { printf 'rig initramfs: %s\n' "$*"; }
fail() { printf 'rig initramfs: error: %s\n' "$*" >&2; exit 1; }

[ $# -eq 2 ] || fail "usage: $0 KERNELDIR OUT"
kernel_dir=$1 out=$2
for tool in apt-get dpkg cpio; do command -v "$tool" >/dev/null || fail "$tool is missing"; done
[ -e "$kernel_dir/.stamp" ] || fail "$kernel_dir holds no kernel: run fetch-kernel.sh $kernel_dir first"
stamp=$(cat "$0" "$kernel_dir/.stamp" | sha256sum | cut -c1-64)
if [ -s "$out" ] && [ "$(cat "$out.stamp" 2>/dev/null)" = "$stamp" ]; then
  say "$out is up to date"
  exit 0
fi

modules=$kernel_dir/lib/modules/$(cat "$kernel_dir/kernel.release")
mkdir -p "$(dirname "$out")"
work=$(mktemp -d -p "$(dirname "$out")" .initramfs-XXXXXX)
trap 'rm -rf "$work"' EXIT
say "downloading busybox-static"
(cd "$work" && apt-get -q -o APT::Sandbox::User=root download busybox-static >download.log 2>&1) \
  || fail "download failed: $(tail -n 3 "$work/download.log")"
dpkg -x "$work"/busybox-static_*.deb "$work/tree"
busybox=$(find "$work/tree" -path '*bin/busybox' | head -n 1)
[ -n "$busybox" ] || fail "the package busybox-static contains no busybox"

root=$work/root
mkdir -p "$root"/{bin,dev,proc,sys,newroot,modules}
install -m 0755 "$busybox" "$root/bin/busybox"
: > "$root/modules/order"
# Adds a module after everything that its .modinfo section says it depends on; nothing when it is built in.
add_module() {
  local name=$1 file dependency
  if grep -qx "$name.ko" "$root/modules/order"; then return; fi
  file=$(find "$modules" -name "${name//[-_]/[-_]}.ko" | head -n 1)
  [ -n "$file" ] || return 0
  for dependency in $(tr '\0' '\n' < "$file" | sed -n 's/^depends=//p' | head -n 1 | tr ',-' ' _'); do add_module "$dependency"; done
  install -m 0644 "$file" "$root/modules/$name.ko"
  echo "$name.ko" >> "$root/modules/order"
}
for module in virtio_pci virtio_blk virtio_console ext4; do add_module "$module"; done

cat > "$root/init" <<'INIT'
#!/bin/busybox sh
# From the initramfs to the root disk, which is the first of the virtio disks.
export PATH=/bin
/bin/busybox --install -s /bin
# PID 1 that ends panics the kernel, which ends the machine: the console says why.
fail() { echo "rig: $*"; exit 1; }
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
while read -r module; do insmod "/modules/$module" || fail "cannot insert $module"; done < /modules/order
tries=0
until [ -b /dev/vda ]; do
  tries=$((tries + 1))
  [ "$tries" -lt 1000 ] || fail "the root disk does not appear"
  usleep 10000
done
mount -t ext4 -o noatime /dev/vda /newroot || fail "the root disk cannot be mounted"
for directory in dev proc sys; do mount -o move "/$directory" "/newroot/$directory"; done
exec switch_root /newroot /init
INIT
chmod 0755 "$root/init"
find "$root" -exec touch -h -d @0 {} +
(cd "$root" && find . | sort | cpio --quiet --reproducible -o -H newc -R 0:0) > "$work/archive"
mv "$work/archive" "$out"
echo "$stamp" > "$out.stamp"
say "$out: $(stat -c %s "$out") bytes, modules: $(tr '\n' ' ' < "$root/modules/order")"
