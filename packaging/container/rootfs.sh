#!/usr/bin/env bash
# Collects what the gateway needs to run, and nothing else, in a folder: the root of a container.
#
#   packaging/container/rootfs.sh FOLDER [PROGRAM]
#
# PROGRAM is target/release/smcgate if it is left out. Needs nftables and iproute2, which the gateway
# runs where interception is by nftables.
set -euo pipefail
cd "$(dirname "$0")/../.."

main() {
    local root=$1 program=${2:-target/release/smcgate} file
    rm -rf "$root"
    mkdir -p "$root"/{proc,sys,tmp,usr/bin,etc/smcgate,run/smcgate,dev/shm}
    chmod 1777 "$root/tmp" "$root/dev/shm"
    for link in bin sbin lib lib64; do
        mkdir -p "$root/usr/$link"
        ln -s "usr/$link" "$root/$link"
    done
    install -m 755 "$program" "$root/usr/bin/smcgate"
    for file in "$(command -v nft)" "$(command -v ip)"; do
        install -D -m 755 "$file" "$root/usr/sbin/${file##*/}"
    done
    local libraries
    libraries=$(ldd "$root/usr/bin/smcgate" "$root/usr/sbin/nft" "$root/usr/sbin/ip" |
        grep -o '/[^ ]*' | grep -v ':$' | sort -u)
    for file in $libraries; do
        install -D -m 755 "$file" "$root$file"
    done
    libibverbs "$root"
    echo 'root:x:0:0:root:/:/sbin/nologin' >"$root/etc/passwd"
    echo 'smcgate:x:65532:65532:smcgate:/:/sbin/nologin' >>"$root/etc/passwd"
    printf 'root:x:0:\nsmcgate:x:65532:\n' >"$root/etc/group"
    echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
    install -m 644 packaging/debian/smcgate.toml "$root/etc/smcgate/"
    install -D -m 644 LICENSE "$root/usr/share/doc/smcgate/LICENSE"
}

# For kind "verbs", where this machine has it: the library and its drivers, which are looked for when
# they are needed and are no dependencies of any program.
libibverbs() {
    local root=$1 library folder driver file
    library=$(ldconfig -p | sed -n 's/.*libibverbs[.]so[.]1 .*=> //p' | head -1)
    if [[ -z $library ]]; then
        echo "rootfs: no libibverbs here, so the image has no RNICs of kind \"verbs\"" >&2
        return 0
    fi
    library=$(readlink -f "${library%/*}")/${library##*/}
    folder=${library%/*}/libibverbs
    if ! compgen -G "$folder/*.so" >/dev/null || ! compgen -G '/etc/libibverbs.d/*.driver' >/dev/null; then
        echo "rootfs: libibverbs has no drivers here, so the image has no RNICs of kind \"verbs\"" >&2
        return 0
    fi
    for file in "$library" "$folder"/*.so $(ldd "$library" "$folder"/*.so | grep -o '/[^ ]*' |
        grep -v ':$' | sort -u); do
        install -D -m 755 "$file" "$root$file"
    done
    for driver in /etc/libibverbs.d/*.driver; do
        install -D -m 644 "$driver" "$root$driver"
    done
}

main "$@"
