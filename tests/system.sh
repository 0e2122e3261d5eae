#!/usr/bin/env bash
# What tests/package.sh and tests/systemd.sh share; they source it, and have a function `fail`.
set -euo pipefail

# A fresh system as ARCHIVE, with what PACKAGE depends on and MORE packages, once: it takes half a
# minute.
#
#   make_base ARCHIVE PACKAGE [MORE,MORE...]
make_base() {
    local base=$1 package=$2 more=${3:-} fresh=target/package/fresh mirror suite depends
    [[ -e $base ]] && return 0
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
        awk -v suite="$suite" '$1 == suite { print $2; exit }')
    depends=$(dpkg-deb -f "$package" Depends | sed 's/([^)]*)//g; s/ //g')
    mkdir -p target/package
    rm -rf "$fresh"
    debootstrap --variant=minbase --include="$depends${more:+,$more}" "$suite" "$fresh" "$mirror" \
        >target/package/debootstrap.log
    tar -C "$fresh" -cf "$base.part" .
    mv "$base.part" "$base"
    rm -rf "$fresh"
}

# Waits for half a minute at most.
until_true() {
    local tries
    for ((tries = 0; tries < 150; tries++)); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.2
    done
    fail "in vain: $*"
}
