#!/usr/bin/env bash
# Makes the root filesystem of the template `base` from the running distribution's packages, without a container registry.
#
# Usage: build-base-rootfs.sh OUT.ext4 [VIRTUAL_SIZE]
#   OUT.ext4         a raw, sparse ext4 image with a journal (VIRTUAL_SIZE: default 2G)
#   OUT.ext4.sha256  its checksum
#
# In it: bash, sudo (no password for `user`), python3 as `python` too, pip, git, curl, nodejs, npm, certificates, iproute2,
# procps and ping. `user` has uid and gid 1000 and /home/user. pip installs for everybody: the distribution's marker that
# forbids it (EXTERNALLY-MANAGED) is removed, since a sandbox is a machine to be used up, and E2B's base allows it too
# (npm brings 200 MB of the 600 MB.)
#
# The packages come from the distribution's own sources as apt of this machine knows them (mirror and proxy included;
# third-party sources and backports are left out). A second call with the same arguments does nothing; REFRESH=1
# makes it anew, with what the distribution has by then. Needs: root, mmdebstrap, mke2fs.
set -euo pipefail
export LC_ALL=C

PACKAGES=(bash sudo python3 python-is-python3 python3-pip git curl nodejs npm ca-certificates iproute2 procps iputils-ping)

say() { printf 'base root filesystem: %s\n' "$*"; }
fail() { printf 'base root filesystem: error: %s\n' "$*" >&2; exit 1; }

[ $# -ge 1 ] && [ $# -le 2 ] || fail "usage: $0 OUT.ext4 [VIRTUAL_SIZE]"
out=$1 size=${2:-2G}
PATH=$PATH:/usr/sbin:/sbin
[ "$(id -u)" -eq 0 ] || fail "must run as root: file owners and device nodes are made"
for tool in mmdebstrap mke2fs apt-get; do
  command -v "$tool" >/dev/null || fail "$tool is missing: install mmdebstrap, e2fsprogs and apt"
done
# shellcheck source=/dev/null
. /etc/os-release
suite=${VERSION_CODENAME:?/etc/os-release names no release}
case $ID in debian | ubuntu) ;; *) fail "only Debian and Ubuntu are known, this is $ID" ;; esac

stamp=$({ cat "$0"; echo "$ID $suite" "${PACKAGES[@]}" "$size"; } | sha256sum | cut -c1-64)
if [ -z "${REFRESH:-}" ] && [ -s "$out" ] && [ "$(cat "$out.stamp" 2>/dev/null)" = "$stamp" ]; then
  say "$out is there (REFRESH=1 makes it anew)"
  exit 0
fi

source_lines=$("$(dirname "$0")/../scripts/apt-sources.sh")

mkdir -p "$(dirname "$out")"
work=$(mktemp -d -p "$(dirname "$out")" .rootfs-XXXXXX)
trap 'rm -rf "$work"' EXIT
root=$work/root
# What apt of this machine needs to reach its sources (a proxy, for instance) holds for the new system's apt while it is made.
apt-config dump | grep -E '^Acquire::(https?::|ftp::)?(Proxy|Retries|ForceIPv|CaInfo)' > "$work/apt.conf" || true
keyring=()
[ ! -e "/usr/share/keyrings/$ID-archive-keyring.gpg" ] || keyring=(--keyring="/usr/share/keyrings/$ID-archive-keyring.gpg")
include=$(IFS=,; echo "${PACKAGES[*]}")
say "installing ${#PACKAGES[@]} packages of $ID $suite and what they need (takes about a minute)"
if ! echo "$source_lines" | mmdebstrap --mode=root --variant=minbase --format=directory "${keyring[@]}" \
  --aptopt="$work/apt.conf" --aptopt='Acquire::Languages "none"' --aptopt='Apt::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-include=/usr/share/locale/locale.alias' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --include="$include" "$suite" "$root" - >"$work/log" 2>&1; then
  tail -n 20 "$work/log" >&2
  fail "mmdebstrap failed"
fi

say "setting up user, sudo and network files"
in_root() { chroot "$root" "$@"; }
in_root groupadd --gid 1000 user
in_root useradd --uid 1000 --gid 1000 --groups sudo --create-home --home-dir /home/user --shell /bin/bash user
in_root passwd --delete --quiet root >/dev/null
install -m 0440 /dev/stdin "$root/etc/sudoers.d/user" <<<'user ALL=(ALL:ALL) NOPASSWD: ALL'
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
echo sandbox > "$root/etc/hostname"
printf '127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n' > "$root/etc/hosts"
printf '# The guest daemon mounts everything.\n' > "$root/etc/fstab"
rm -f "$root/etc/resolv.conf"
echo 'nameserver 8.8.8.8' > "$root/etc/resolv.conf"
echo 'LANG=C.UTF-8' > "$root/etc/default/locale"
: > "$root/etc/machine-id"

say "removing package lists, caches and logs"
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/cache/debconf/*-old \
  "$root"/var/log/*.log "$root"/var/log/apt/* "$root"/tmp/* "$root"/etc/apt/apt.conf.d/99mmdebstrap "$root"/usr/share/info/*
rm -f "$root"/var/cache/ldconfig/aux-cache

say "making the ext4 image"
rm -f "$work/image"
truncate -s "$size" "$work/image"
mke2fs -q -t ext4 -F -m 0 -L root -E lazy_itable_init=0,lazy_journal_init=0,nodiscard -d "$root" "$work/image" \
  || fail "mke2fs failed: is $size enough for $(du -sm "$root" | cut -f1) MB?"
mv "$work/image" "$out"
(cd "$(dirname "$out")" && sha256sum "$(basename "$out")") > "$out.sha256"
echo "$stamp" > "$out.stamp"
say "$out: $(du -m "$out" | cut -f1) MB stored of $(($(stat -c %s "$out") >> 20)) MB"
