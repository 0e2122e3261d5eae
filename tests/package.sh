#!/usr/bin/env bash
# The life of the Debian package on a fresh system: installed, run as its own user, upgraded, purged.
# Called by `scripts/test package`; needs root, and the packages of the distribution.
#
#   tests/package.sh FIRST.deb SECOND.deb
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/system.sh

root=target/package/root
base=target/package/base.tar
image=target/package/image
first=$1 second=$2
wants=/etc/systemd/system/multi-user.target.wants
caps=+bpf,+net_admin,+net_raw,+net_bind_service,+sys_nice,+ipc_lock

main() {
    if [[ ${PACKAGE_TEST:-} != inside ]]; then
        make_base "$base" "$first"
        rm -rf "$root"
        mkdir -p "$root"
        tar -C "$root" -xf "$base"
        # Mounts and processes that are left end with the namespaces.
        PACKAGE_TEST=inside scripts/netns "$0" "$first" "$second"
        rm -rf "$root"
        return
    fi
    mount --bind "$root" "$root"
    mount --rbind /sys "$root/sys"
    mount -t proc proc "$root/proc"
    mount -t tmpfs run "$root/run"
    mount --bind /dev/null "$root/dev/null"
    mount --bind /dev/urandom "$root/dev/urandom"
    mkdir -p "$root/dev/shm"
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm"

    mkdir -p "$root$wants"
    files >target/package/before
    install_first "$first"
    main_job
    upgrade "$second"
    purge
    files >target/package/after
    if ! diff target/package/before target/package/after; then
        fail "this is left behind, or was changed"
    fi
    echo "package: nothing is left behind"
    container
}

# All files, and what is in them, but for what dpkg writes down of any package, and the copies that
# the system makes of its lists of users (`passwd-`) whenever one comes or goes.
files() {
    (cd "$root" && find . -xdev \( -path ./var/lib/dpkg -o -path ./var/log/dpkg.log \
        -o -path ./var/cache/debconf -o -path './etc/*-' \) -prune -o -type f -exec sha256sum {} + -o -printf '%p %y %l\n' |
        sort)
}

inside() { chroot "$root" env PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C "$@"; }

install_first() {
    cp "$1" "$root/run/first.deb"
    inside dpkg -i /run/first.deb >/dev/null
    inside getent passwd smcgate >/dev/null
    inside smcgate check -c /etc/smcgate/smcgate.toml >/dev/null
    inside test -s /usr/share/smcgate/grafana/smcgate.json
    inside test -s /usr/share/smcgate/prometheus/alerts.yml
    # Whoever makes an image enables it without a systemd that runs.
    ln -s /usr/lib/systemd/system/smcgate.service "$root$wants/"
    echo "package: installed, as $(inside dpkg-query -W smcgate)"
}

# Runs the gateway on a host as its unit does: as its user, with those capabilities and no others.
gateway() {
    local host=$1 name=$2
    nsenter --net="$host" -- chroot "$root" setpriv --reuid=smcgate --regid=smcgate --clear-groups \
        --inh-caps="-all,$caps" --ambient-caps="-all,$caps" --bounding-set="-all,$caps" --no-new-privs \
        /usr/bin/smcgate run -c "/etc/smcgate/$name.toml" >"target/package/$name.log" 2>&1 &
}

# The same on the root of a container, which has nothing else: not even a program to become a user
# with. The program is that of the package.
container() {
    dpkg-deb --fsys-tarfile "$first" | tar -x -O ./usr/bin/smcgate >target/package/smcgate
    packaging/container/rootfs.sh "$image" target/package/smcgate
    for folder in proc sys dev; do
        mount --rbind "/$folder" "$image/$folder"
    done
    gateway() {
        local names=cap_bpf,cap_net_admin,cap_net_raw,cap_net_bind_service,cap_sys_nice
        nsenter --net="$1" -- capsh --chroot="$image" --keep=1 --gid=65532 --uid=65532 \
            --inh="$names" --addamb="$names" --shell=/usr/bin/smcgate -- \
            run -c "/etc/smcgate/$2.toml" >"target/package/$2.log" 2>&1 &
    }
    root=$image main_job
    # As an init step of a pod does it: as root, with one capability.
    sed 's/^upstream = .*/upstream = "original-dst"\nintercept = "redirect"\nintercept_ports = [9]/' \
        "$image/etc/smcgate/a.toml" >"$image/etc/smcgate/i.toml"
    for step in "intercept add -c /etc/smcgate/i.toml" "intercept remove"; do
        # shellcheck disable=SC2086 # Words on purpose.
        nsenter --net="$SMCGATE_HOST_A" -- capsh --chroot="$image" --inh=cap_net_admin --drop=all \
            --shell=/usr/bin/smcgate -- $step
    done
    echo "package: a container's root of $(du -sh --one-file-system "$image" | cut -f1)" \
        "has what it takes"
}

# Carries a file from one host to the other over SMC-R.
main_job() {
    local server=target/package/www
    mkdir -p "$server"
    head -c 3000000 /dev/urandom >"$server/file"
    cat >"$root/etc/smcgate/a.toml" <<'END'
[[listener]]
name = "to-b"
bind = "127.0.0.1:7001"
connect = "smc"
upstream = "10.8.0.2:7002"
END
    cat >"$root/etc/smcgate/b.toml" <<'END'
[[listener]]
name = "from-a"
bind = "10.8.0.2:7002"
accept = "smc"
upstream = "127.0.0.1:7010"
END
    nsenter --net="$SMCGATE_HOST_B" -- python3 -m http.server -d "$server" -b 127.0.0.1 7010 \
        >target/package/server.log 2>&1 &
    gateway "$SMCGATE_HOST_B" b
    gateway "$SMCGATE_HOST_A" a
    for host in "$SMCGATE_HOST_A" "$SMCGATE_HOST_B"; do
        until_true nsenter --net="$host" -- curl -sf http://127.0.0.1:9180/readyz
    done
    until_true nsenter --net="$SMCGATE_HOST_B" -- curl -sf http://127.0.0.1:7010/ -o /dev/null
    fetch
    expect 1 '.totals.connections_smc' 0 '.totals.connections_tcp'
    expect true '.confinement.no_new_privs' true '.confinement.seccomp == "on"' \
        true '.confinement.landlock | startswith("on")'
    local users
    users=$(ps -o uid= -C smcgate | sort -u | xargs)
    if [[ $users == *" "* || $users == 0 || -z $users ]]; then
        fail "the gateways run as users $users"
    fi
    echo "package: one connection over SMC-R, by gateways of user $users"
}

fetch() {
    nsenter --net="$SMCGATE_HOST_A" -- curl -sf http://127.0.0.1:7001/file |
        cmp - target/package/www/file
}

# Compares what a gateway says with what it should say: pairs of a value and a filter of jq.
expect() {
    local stats
    stats=$(nsenter --net="$SMCGATE_HOST_A" -- curl -sf http://127.0.0.1:9180/stats)
    while [[ $# -gt 0 ]]; do
        if [[ $(jq -r "$2" <<<"$stats") != "$1" ]]; then
            fail "$2 is not $1: $(jq -c '.totals, .fallbacks, .confinement' <<<"$stats")"
        fi
        shift 2
    done
}

# The gateways that run go on, and what an operator has written stays.
upgrade() {
    echo '# mine' >>"$root/etc/smcgate/smcgate.toml"
    cp "$1" "$root/run/second.deb"
    inside dpkg -i --force-confdef --force-confold /run/second.deb >/dev/null 2>&1
    grep -q '^# mine' "$root/etc/smcgate/smcgate.toml"
    fetch
    expect 2 '.totals.connections_smc' 0 '.totals.connections_tcp'
    echo "package: upgraded under gateways that went on, to $(inside dpkg-query -W smcgate)"
    pkill -TERM -x smcgate
    until_true eval '! pgrep -x smcgate >/dev/null'
}

purge() {
    inside dpkg --remove smcgate >/dev/null
    if [[ -L $root$wants/smcgate.service ]]; then
        fail "it is enabled, and gone"
    fi
    inside dpkg --purge smcgate >/dev/null
    ! inside getent passwd smcgate >/dev/null
    umount "$root/dev/shm"
}

fail() {
    echo "package: $*" >&2
    cat target/package/*.log >&2
    exit 1
}

main
