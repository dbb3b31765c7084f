#!/usr/bin/env bash
# Prints one `deb` line per index of the running distribution itself that apt of this machine uses, mirror included.
#
# Usage: apt-sources.sh
#
# Third-party sources, backports and proposed updates are left out. A list of packages that was never fetched is fetched.
# Needs: apt, as root where the lists must be fetched.
set -euo pipefail
export LC_ALL=C

fail() { printf 'package sources: error: %s\n' "$*" >&2; exit 1; }

# shellcheck source=/dev/null
. /etc/os-release
suite=${VERSION_CODENAME:?/etc/os-release names no release}

lines() {
  apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    | awk -v suite="$suite" 'tolower($1) ~ /^(debian|ubuntu)$/ && index($3, suite) == 1 && $3 !~ /-(backports|proposed)/ {
        components["deb " $2 " " $3] = components["deb " $2 " " $3] " " $4
      }
      END { for (source in components) print source components[source] }' | sort
}

found=$(lines)
if [ -z "$found" ]; then
  apt-get -q update >/dev/null || fail "apt-get update failed"
  found=$(lines)
fi
[ -n "$found" ] || fail "apt of this machine has no source of $suite"
printf '%s\n' "$found"
