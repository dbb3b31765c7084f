#!/usr/bin/env bash
# Makes the root filesystem of the rig: the running distribution, so that programs built here find the same C library there.
#
# Usage: build-root.sh KERNELDIR OUT.ext4
#   KERNELDIR  made by fetch-kernel.sh        OUT.ext4  a raw, sparse ext4 image
#
# No init system: the file `init` beside this script is PID 1. A second call with the same input does nothing; REFRESH=1 makes
# it anew, with what the distribution has by then. Needs: root, mmdebstrap, mke2fs.
set -euo pipefail
export LC_ALL=C

# What the suites call. Everything else of a minimal system is a part of it because dpkg is.
PACKAGES=(ca-certificates e2fsprogs iproute2 kmod mount nftables procps python3-minimal util-linux xfsprogs)
SIZE=6G

say() { printf 'rig root: %s\n' "$*"; }
fail() { printf 'rig root: error: %s\n' "$*" >&2; exit 1; }

[ $# -eq 2 ] || fail "usage: $0 KERNELDIR OUT.ext4"
kernel_dir=$1 out=$2
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/sbin:/sbin
[ "$(id -u)" -eq 0 ] || fail "must run as root: file owners and device nodes are made"
for tool in mmdebstrap mke2fs; do command -v "$tool" >/dev/null || fail "$tool is missing: install mmdebstrap and e2fsprogs"; done
# shellcheck source=/dev/null
. /etc/os-release

stamp=$({ cat "$0" "$here/init" "$kernel_dir/.stamp"; echo "$ID ${VERSION_CODENAME:-}"; } | sha256sum | cut -c1-64)
if [ -z "${REFRESH:-}" ] && [ -s "$out" ] && [ "$(cat "$out.stamp" 2>/dev/null)" = "$stamp" ]; then
  say "$out is there (REFRESH=1 makes it anew)"
  exit 0
fi

source_lines=$("$here/../scripts/apt-sources.sh")
mkdir -p "$(dirname "$out")"
work=$(mktemp -d -p "$(dirname "$out")" .root-XXXXXX)
trap 'rm -rf "$work"' EXIT
root=$work/root
# How this machine reaches its sources (a proxy, for instance) holds for the new system's apt while it is made.
apt-config dump | grep -E '^Acquire::(https?::)?(Proxy|Retries|ForceIPv|CaInfo)' > "$work/apt.conf" || true
options=(--aptopt="$work/apt.conf" --aptopt='Acquire::Languages "none"' --aptopt='Apt::Install-Recommends "false"')
for excluded in man locale doc info; do options+=(--dpkgopt="path-exclude=/usr/share/$excluded/*"); done
[ ! -e "/usr/share/keyrings/$ID-archive-keyring.gpg" ] || options+=(--keyring="/usr/share/keyrings/$ID-archive-keyring.gpg")
say "installing ${#PACKAGES[@]} packages of $ID $VERSION_CODENAME and what they need (takes half a minute)"
if ! printf '%s\n' "$source_lines" | mmdebstrap --mode=root --variant=minbase --format=directory "${options[@]}" \
  --include="$(IFS=,; echo "${PACKAGES[*]}")" "$VERSION_CODENAME" "$root" - >"$work/log" 2>&1; then
  tail -n 20 "$work/log" >&2
  fail "mmdebstrap failed"
fi

say "adding the kernel's modules and PID 1"
release=$(cat "$kernel_dir/kernel.release")
mkdir -p "$root/lib/modules"
cp -r "$kernel_dir/lib/modules/$release" "$root/lib/modules/$release"
chroot "$root" depmod "$release"
install -m 0755 "$here/init" "$root/init"
echo rig > "$root/etc/hostname"
printf '127.0.0.1 localhost rig\n::1 localhost ip6-localhost\n' > "$root/etc/hosts"
: > "$root/etc/fstab"
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/* "$root"/tmp/* "$root/etc/apt/apt.conf.d/99mmdebstrap"

say "making the ext4 image"
truncate -s "$SIZE" "$work/image"
mke2fs -q -t ext4 -F -m 0 -L rig -O '^has_journal' -E lazy_itable_init=0,nodiscard -d "$root" "$work/image" || fail "mke2fs failed"
mv "$work/image" "$out"
echo "$stamp" > "$out.stamp"
say "$out: $(du -m "$out" | cut -f1) MB"
