#!/usr/bin/env bash
# The unit of the Debian package under a real systemd, in a container of its own: started, reloaded,
# stopped, restarted when it was killed or hangs, and its socket held by systemd meanwhile.
# Called by `scripts/test package`; needs root, systemd-nspawn, and the packages of the distribution.
#
#   tests/systemd.sh PACKAGE.deb
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/system.sh

folder=target/package
root=$folder/systemd
base=$folder/systemd.tar
package=$1
landlock="landlock_create_ruleset landlock_add_rule landlock_restrict_self"

main() {
    make_base "$base" "$package" systemd,systemd-sysv,dbus,iproute2,curl,jq,procps,python3
    trap 'stop_container' EXIT
    rm -rf "$root"
    mkdir -p "$root"
    tar -C "$root" -xf "$base"
    cp "$package" "$root/root/smcgate.deb"
    files
    start_container
    inside dpkg -i /root/smcgate.deb >/dev/null
    cp "$root/root/a.toml" "$root/etc/smcgate/smcgate.toml"
    hosts

    starts
    reloads
    comes_back
    keeps_its_socket
    waits_for_its_device
    gives_up
    echo "systemd: the unit does what it says"
}

files() {
    cat >"$root/root/a.toml" <<'END'
[admin]
listen = "127.0.0.1:9180"
[[listener]]
name = "to-b"
bind = "127.0.0.1:7001"
connect = "smc"
upstream = "10.8.0.2:7002"
END
    cat >"$root/root/b.toml" <<'END'
[[listener]]
name = "from-a"
bind = "10.8.0.2:7002"
accept = "smc"
upstream = "127.0.0.1:7010"
END
    head -c 3000000 /dev/urandom >"$root/root/file"
}

# The container has a network of its own, and may do in it what a host may.
start_container() {
    systemd-nspawn --quiet --directory="$root" --boot --register=no --keep-unit --private-network \
        --capability=all --system-call-filter="bpf seccomp @raw-io $landlock" --machine=smcgate-systemd \
        </dev/null >"$folder/boot.log" 2>&1 &
    nspawn=$!
    local tries
    for ((tries = 0; tries < 300; tries++)); do
        leader=$(pgrep -P "$nspawn" -x systemd || true)
        if [[ -n $leader ]] && inside systemctl is-system-running --wait >"$folder/state" 2>&1; then
            break
        fi
        # "degraded": some unit of the distribution does not like containers.
        grep -q degraded "$folder/state" 2>/dev/null && break
        sleep 0.1
    done
    inside systemctl is-system-running | grep -qE 'running|degraded'
    echo "systemd: $(inside systemctl --version | head -1) runs in a container"
}

stop_container() {
    [[ -n ${nspawn:-} ]] || return 0
    [[ -n ${leader:-} ]] && kill -RTMIN+4 "$leader" 2>/dev/null
    for _ in $(seq 100); do
        kill -0 "$nspawn" 2>/dev/null || break
        sleep 0.1
    done
    kill -9 "$nspawn" 2>/dev/null || true
    rm -rf "$root"
}

inside() {
    nsenter --target "$leader" --all -- env PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C "$@"
}

# Host A is the container; host B, with a gateway and a server, a network namespace in it.
hosts() {
    inside ip link set lo up
    inside ip netns add b
    inside ip link add to-b type veth peer name to-a netns b
    inside ip addr add 10.8.0.1/24 dev to-b
    inside ip link set to-b up
    inside ip -n b addr add 10.8.0.2/24 dev to-a
    inside ip -n b link set to-a up
    inside ip -n b link set lo up
    inside systemd-run --quiet --unit=server ip netns exec b \
        python3 -m http.server -d /root -b 127.0.0.1 7010
    inside systemd-run --quiet --unit=other ip netns exec b smcgate run -c /root/b.toml
    until_true inside ip netns exec b curl -sf http://127.0.0.1:7010/ -o /dev/null
    until_true inside ip netns exec b curl -sf http://127.0.0.1:9180/readyz
}

# Started means ready: the first connection is served at once, over SMC-R.
starts() {
    inside systemctl start smcgate
    inside curl -sf http://127.0.0.1:9180/readyz >/dev/null
    fetch
    expect 1 .totals.connections_smc 0 .totals.connections_tcp true .confinement.no_new_privs
    local user
    user=$(inside ps -o user= -p "$(pid)")
    [[ $user == smcgate ]] || fail "it runs as $user"
    echo "systemd: started as $user, and ready when systemctl said so"
    inside systemd-analyze security smcgate --no-pager >"$folder/security" 2>&1 || true
    echo "systemd: $(tail -1 "$folder/security" | tr -d '→😀🙂😐' | xargs)"
}

reloads() {
    local before
    before=$(pid)
    sed -i 's/name = "to-b"/name = "renamed"/' "$root/etc/smcgate/smcgate.toml"
    inside systemctl reload smcgate
    inside curl -sf http://127.0.0.1:9180/config | grep -q renamed ||
        fail "reload changed nothing"
    sed -i 's/^upstream = .*/upstream = "nonsense:"/' "$root/etc/smcgate/smcgate.toml"
    if inside systemctl reload smcgate 2>/dev/null; then
        fail "a wrong configuration was reloaded"
    fi
    inside systemctl is-active --quiet smcgate
    fetch
    [[ $(pid) == "$before" ]] || fail "it was restarted"
    cp "$root/root/a.toml" "$root/etc/smcgate/smcgate.toml"
    inside systemctl reload smcgate
    echo "systemd: reloaded, and a wrong configuration refused, by the same process"
}

# Killed, it comes back; and so it does when it hangs.
comes_back() {
    local before
    before=$(pid)
    inside kill -9 "$before"
    until_true is_another "$before"
    until_true fetch
    echo "systemd: back after kill -9"
    before=$(pid)
    inside kill -STOP "$before"
    until_true is_another "$before"
    until_true fetch
    inside journalctl --sync
    inside journalctl -u smcgate --no-pager | grep -q "Watchdog timeout" || fail "no watchdog"
    echo "systemd: back after a hang, by the watchdog"
}

# While the gateway restarts, its clients wait instead of being refused.
keeps_its_socket() {
    inside systemctl stop smcgate
    cp packaging/systemd/smcgate.socket.example "$root/etc/systemd/system/smcgate.socket"
    inside systemctl daemon-reload
    inside systemctl start smcgate.socket
    # The connection starts the gateway, and waits for it.
    fetch
    local refused=0 at
    inside systemctl restart smcgate &
    for at in 1 2 3 4 5 6 7 8 9 10; do
        fetch || refused=$at
    done
    wait $!
    [[ $refused == 0 ]] || fail "a client was refused while the gateway restarted"
    expect 0 .totals.connections_tcp
    inside systemctl stop smcgate.socket smcgate
    echo "systemd: started by a connection; ten clients during a restart, none was refused"
}

# A device may come late, and an address later than that: systemd tries for as long as it takes.
waits_for_its_device() {
    printf '[[rnic]]\nname = "late"\nkind = "roce-udp"\ndevice = "late0"\n' \
        >>"$root/etc/smcgate/smcgate.toml"
    if inside systemctl start smcgate 2>/dev/null; then
        fail "it started without its device"
    fi
    until_true tried_again 6
    inside ip link add late0 type veth peer name late1
    inside ip addr add 10.8.9.1/24 dev late0
    inside ip link set late0 up
    until_true inside curl -sf http://127.0.0.1:9180/readyz
    inside systemctl stop smcgate
    cp "$root/root/a.toml" "$root/etc/smcgate/smcgate.toml"
    echo "systemd: tried again until the device of an RNIC was there"
}

tried_again() { (($(property NRestarts) >= $1)); }

# A wrong configuration does not get better by itself: it is said once.
gives_up() {
    echo 'nonsense = 1' >>"$root/etc/smcgate/smcgate.toml"
    if inside systemctl start smcgate 2>/dev/null; then
        fail "it started with a wrong configuration"
    fi
    [[ $(property ExecMainStatus) == 2 && $(property NRestarts) == 0 ]] || fail "it was tried again"
    inside journalctl --sync
    inside journalctl -u smcgate --no-pager | grep -q 'is not a key' || fail "the journal says nothing"
    # This system has no nft, and nothing to remove with it.
    if inside journalctl -u smcgate --no-pager | grep "cannot be started"; then
        fail "a stop looks like an error"
    fi
    echo "systemd: a wrong configuration is said once, in the journal"
}

pid() { property MainPID; }

property() { inside systemctl show --value -p "$1" smcgate; }

is_another() {
    local now
    now=$(pid)
    [[ $now != 0 && $now != "$1" ]] && inside systemctl is-active --quiet smcgate
}

fetch() { inside curl -sf --max-time 10 http://127.0.0.1:7001/file | cmp - "$root/root/file"; }

# Pairs of a value and a filter of jq.
expect() {
    local stats
    stats=$(inside curl -sf http://127.0.0.1:9180/stats)
    while [[ $# -gt 0 ]]; do
        [[ $(jq -r "$2" <<<"$stats") == "$1" ]] || fail "$2 is not $1: $(jq -c .totals <<<"$stats")"
        shift 2
    done
}

fail() {
    echo "systemd: $*" >&2
    inside journalctl --no-pager -n 60 >&2 || true
    exit 1
}

main
