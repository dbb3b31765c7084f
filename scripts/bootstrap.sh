#!/usr/bin/env bash
# Installs what building and running AgentENV needs and this machine lacks. Debian 12, Debian 13, Ubuntu 24.04; root.
#
# Usage: bootstrap.sh [--tests]      --tests: also what only the test suites need (venv of Python, npm,
#                                                  the nested machine's tools and, on Debian 12, the backports' package list)
#
# Looks for programs and files first and calls the package manager only for what is missing, so a second call is
# instant. It only adds packages: nothing that is installed is removed or replaced by another version.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
PATH=$PATH:/usr/sbin:/sbin:${CARGO_HOME:-$HOME/.cargo}/bin

say() { printf 'bootstrap: %s\n' "$*"; }
fail() { printf 'bootstrap: error: %s\n' "$*" >&2; exit 1; }

with_tests=
case "${1:-}" in
  '') ;;
  --tests) with_tests=1 ;;
  *) fail "usage: $0 [--tests]" ;;
esac

missing=()
# need PROGRAM PACKAGE
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need cc build-essential
need make make
need git git
need curl curl
need qemu-system-x86_64 qemu-system-x86
need mmdebstrap mmdebstrap
need mke2fs e2fsprogs
need mkfs.xfs xfsprogs
need cpio cpio
need zstd zstd
need lz4 lz4
need xz xz-utils
need losetup mount
need pkg-config pkg-config
[ -e /usr/include/libmnl/libmnl.h ] || missing+=(libmnl-dev)
[ -e /usr/include/libnftnl/table.h ] || missing+=(libnftnl-dev)
need setsid util-linux
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
if [ -n "$with_tests" ]; then
  need python3 python3
  need ip iproute2
  need nft nftables
  need setpriv util-linux
  need node nodejs
  # The packages of other sources bring npm inside nodejs.
  need npm npm
  python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
fi

# Where `qemu-utils` of the backports is installed, the release's own QEMU cannot be installed beside it: take QEMU from
# the same suite then. Prints the suite, or nothing.
qemu_suite() {
  local version
  version=$(dpkg-query -W -f '${db:Status-Status} ${Version}' qemu-utils 2>/dev/null || true)
  case "$version" in
    installed*~bpo*) echo "$VERSION_CODENAME-backports" ;;
  esac
}

# Adds the backports to apt's sources in a file of our own, from the mirror this machine uses already. apt names the
# mirrors only of lists it has fetched, so this comes after `refresh_lists`, and fetches the new list itself.
# enable_backports SUITE REASON
enable_backports() {
  local suite=$1 reason=$2 mirror
  if apt-get indextargets --format '$(RELEASE)' 'Created-By: Packages' | grep -qx "$suite"; then return; fi
  mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' \
    | awk -v release="$VERSION_CODENAME" '$1 == release { print $2; exit }')
  [ -n "$mirror" ] || fail "apt has no source for $VERSION_CODENAME, so the mirror of $suite is not known: add $suite to apt's sources"
  say "enabling $suite: $reason"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
    "$mirror" "$suite" > /etc/apt/sources.list.d/agentenv-backports.sources
  refresh_lists
}

refresh_lists() {
  local errors
  errors=$(apt-get -q update 2>&1 >/dev/null) || { printf '%s\n' "$errors" | tail -n 5 >&2; fail "apt-get update failed"; }
}

install_packages() {
  local log suite qemu=() others=() package
  for package in "$@"; do
    case "$package" in qemu-system-x86) qemu+=("$package") ;; *) others+=("$package") ;; esac
  done
  log=$(mktemp)
  # shellcheck disable=SC2064
  trap "rm -f '$log'" RETURN
  # shellcheck source=/dev/null
  . /etc/os-release
  suite=$(qemu_suite)
  refresh_lists
  if [ ${#qemu[@]} -gt 0 ] && [ -n "$suite" ]; then
    enable_backports "$suite" "QEMU must be of the same version as the installed qemu-utils"
  fi
  if [ ${#others[@]} -gt 0 ]; then
    apt-get -q install -y --no-install-recommends "${others[@]}" >"$log" 2>&1 \
      || { tail -n 20 "$log" >&2; fail "cannot install ${others[*]}"; }
  fi
  if [ ${#qemu[@]} -gt 0 ]; then
    apt-get -q install -y --no-install-recommends ${suite:+-t "$suite"} "${qemu[@]}" >"$log" 2>&1 \
      || { tail -n 20 "$log" >&2; fail "cannot install ${qemu[*]}${suite:+ from $suite}"; }
  fi
}

# A toolchain only where there is none: from the distribution's rustup where it has one, else from rustup's own site.
install_rust() {
  if [ -n "$(apt-cache policy rustup 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }')" ]; then
    say "installing rustup from the distribution and the stable toolchain"
    install_packages rustup
    rustup default stable || fail "rustup cannot fetch the stable toolchain"
  else
    say "installing rustup and the stable toolchain"
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y -q --profile minimal -c clippy -c rustfmt \
      || fail "rustup could not be installed: install Rust (https://rustup.rs), then call this again"
  fi
}

if [ ${#missing[@]} -gt 0 ]; then
  [ "$(id -u)" -eq 0 ] || fail "these packages are missing: ${missing[*]}; install them, or call this as root"
  command -v apt-get >/dev/null || fail "only Debian and Ubuntu are known; install what corresponds to: ${missing[*]}"
  say "installing ${missing[*]}"
  install_packages "${missing[@]}"
fi
# The nested machine's kernel has drivers that Debian 12's own lacks. It is unpacked from its package and never installed.
backports_for_rig() {
  local suite
  # shellcheck source=/dev/null
  . /etc/os-release
  suite=$VERSION_CODENAME-backports
  [ "$VERSION_CODENAME" = bookworm ] && [ -z "${RIG_KERNEL_PACKAGE:-}" ] || return 0
  if apt-get indextargets --format '$(RELEASE)' 'Created-By: Packages' | grep -qx "$suite"; then return; fi
  [ "$(id -u)" -eq 0 ] || fail "$suite is not among apt's sources: add it, or call this as root"
  refresh_lists
  enable_backports "$suite" "the kernel of the nested test machine comes from there; nothing is installed from it"
}
if [ -n "$with_tests" ] && command -v apt-get >/dev/null; then backports_for_rig; fi
if ! command -v cargo >/dev/null; then
  install_rust
  command -v cargo >/dev/null || fail "cargo is still not found"
fi
say "everything is there ($(cargo --version | cut -d' ' -f1-2))"
