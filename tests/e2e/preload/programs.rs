//! Programs that everybody has, at both ends: outcomes as over TCP, and SMC-R counted for each.

use std::fs;
use std::net::SocketAddrV4;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use super::{LIMIT, Preload, Site, carried};
use crate::clock::wait_until;
use crate::gateway::{SETTLE_LIMIT, local};
use crate::hosts::{Host, Hosts};
use crate::process::{Process, run, wait_for_listener};

/// A program at both ends, as scripts of bash; `$at` and `$port` are where the server is.
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) port: u16,
    pub(super) server: &'static str,
    /// What it prints must not depend on what carries the connections.
    pub(super) client: &'static str,
    /// So many connections a client makes, at least.
    pub(super) connections: u64,
}

pub(super) const PROGRAMS: [Program; 9] = [
    Program {
        name: "nginx",
        port: 8001,
        server: "sed \"s/AT/$at:$port/\" ../nginx.conf > nginx.conf; mkdir html
            seq 700000 > html/big; exec nginx -p $PWD -c nginx.conf",
        client:
            "curl --silent --show-error --fail --max-time 20 $at:$port/big $at:$port/big | sha1sum
            wrk -t 2 -c 16 -d 1s -H 'Connection: close' http://$at:$port/ |
                grep -E 'errors|Non-2xx' || true",
        connections: 1 + 100,
    },
    Program {
        name: "redis",
        port: 8002,
        server: "exec redis-server --bind $at --port $port --protected-mode no --save '' --dir .",
        client: "redis='-h $at -p $port'
            eval redis-cli $redis set key value; eval redis-cli $redis get key
            eval redis-benchmark $redis -q --csv -n 4000 -c 8 -t set,get | cut -d, -f1
            eval redis-benchmark $redis -q --csv -n 9000 -c 8 -P 16 -t set,get | cut -d, -f1",
        connections: 2 + 8 + 8,
    },
    Program {
        name: "memcached",
        port: 8003,
        server: "exec memcached -u root -l $at -p $port -t 4",
        client: "exec python3 -B ../memcached.py $at $port",
        connections: 8,
    },
    Program {
        name: "iperf3",
        port: 8004,
        server: "exec iperf3 -s -B $at -p $port --forceflush",
        client: "for options in '' -R '-P 4' --bidir; do
                sleep 0.2 # Between two tests the server does not listen for a moment.
                iperf3 -c $at -p $port -n 32M $options -J |
                    jq -c '[.error, .end.sum_received.bytes > 1e5]'
            done",
        connections: 2 + 2 + 5 + 3,
    },
    Program {
        name: "postgres",
        port: 8005,
        server: "bin=$(ls -d /usr/lib/postgresql/*/bin | tail -1)
            folder=$(mktemp -d); chown postgres $folder; cd $folder
            LD_PRELOAD= setsid sh -c \"tail --pid=$$ -f /dev/null; rm -rf $folder\" &
            as() { setpriv --reuid=postgres --regid=postgres --clear-groups \"$@\"; }
            LD_PRELOAD= as $bin/initdb --pgdata=data --auth=trust --no-sync >&2
            echo 'host all all all trust' >> data/pg_hba.conf
            as setpriv --pdeathsig KILL \\
                $bin/postgres -D data -p $port -k $folder -h $at -c fsync=off & wait $!",
        client: "export PGHOST=$at PGPORT=$port PGUSER=postgres PGDATABASE=postgres
            psql -tAc 'select 6 * 7, length(repeat($$x$$, 3000000))'
            pgbench=$(ls /usr/lib/postgresql/*/bin/pgbench | tail -1)
            $pgbench -i -q -s 1 2>/dev/null
            $pgbench -n -c 4 -j 2 -t 25 2>/dev/null | grep -E 'processed|failed'",
        connections: 1 + 1 + 5,
    },
    Program {
        name: "ssh",
        port: 8006,
        server: "ssh-keygen -q -t ed25519 -N '' -f host_key; mkdir -p /run/sshd
            exec /usr/sbin/sshd -D -e -f /dev/null -h $PWD/host_key -o ListenAddress=$at \
                -o Port=$port -o AuthorizedKeysFile=$PWD/../client_key.pub -o StrictModes=no \
                -o PermitRootLogin=yes -o UsePAM=no -o PidFile=none",
        client: "seq 400000 | ssh -F none -i ../client_key -o BatchMode=yes \
                -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \
                -p $port root@$at 'sha1sum; seq 200000' | sha1sum",
        connections: 1,
    },
    Program {
        name: "asyncio",
        port: 8007,
        server: "exec python3 -B ../asyncio_server.py $at $port",
        client: "exec python3 -B ../asyncio_client.py $at $port",
        connections: 20,
    },
    Program {
        name: "threads",
        port: 8008,
        server: "exec python3 -B ../threads.py server $at $port",
        client: "exec python3 -B ../threads.py client $at $port",
        connections: 12,
    },
    Program {
        name: "java",
        port: 8009,
        server: "exec java -XX:TieredStopAtLevel=1 -cp .. Echo server $at $port",
        client: "exec java -XX:TieredStopAtLevel=1 -cp .. Echo client $at $port",
        connections: 1 + 8,
    },
];

/// Servers behind gateway B have their port and this.
const BEHIND: u16 = 100;

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_programs() {
    play("preload_programs", Preload::Sockets, |_| true);
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_programs_by_rings() {
    // A process of sshd gives up the system calls by which the other side is woken; see README.
    play("preload_programs_by_rings", Preload::Rings, |program| program.name != "ssh");
}

/// Those that wait in `epoll_wait`, by threads that rather look than sleep.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_programs_that_spin() {
    let waits_by_epoll = ["nginx", "redis", "memcached", "asyncio"];
    let is_played = |program: &Program| waits_by_epoll.contains(&program.name);
    play("preload_programs_that_spin", Preload::Spinning, is_played);
}

fn play(test: &str, how: Preload, is_played: impl Fn(&Program) -> bool) {
    let site = Site::new(test);
    let Hosts { a, b, logs } = &site.hosts;
    prepare(&site);
    let mut far = site.gateway(b);
    let mut near = site.gateway(a);
    for Program { port, .. } in &PROGRAMS {
        // To a plain server, and from a plain client.
        far = far.listener((b.at(port + BEHIND), "smc"), (local(*port), "tcp"));
        near = near.towards(b.address, *port);
    }
    let far = far.start(&site.hosts, b);
    let near = near.start(&site.hosts, a);
    let start = |program: &Program, preload: Option<Preload>| {
        let at = if preload.is_some() { b.at(program.port) } else { local(program.port) };
        let name = format!("{}-{preload:?}", program.name);
        let preload = preload.map(|preload| (b, preload));
        let mut command = script(&site, program.server, preload, at, &name);
        Process::start(b, logs, &name, &mut command)
    };
    let played: Vec<_> = PROGRAMS.iter().filter(|program| is_played(program)).collect();
    let servers: Vec<_> =
        played.iter().flat_map(|it| [start(it, None), start(it, Some(how))]).collect();
    for Program { port, .. } in &played {
        wait_for_listener(b, local(*port));
        wait_for_listener(b, b.at(*port));
    }
    for program in played {
        let port = program.port;
        let ask = |way: &str, preloads: bool, at| {
            let name = format!("{}-{way}", program.name);
            let mut command =
                script(&site, program.client, preloads.then_some((a, how)), at, &name);
            run(&site.hosts, a, &name, LIMIT, &mut command).expect_success(&name)
        };
        // A plain client of a preloaded server: its connections are the kernel's own.
        let before = carried(&far);
        let expected = ask("tcp", false, b.at(port));
        assert_eq!(carried(&far), before, "{}", program.name);
        for (way, preloads, at) in [
            ("client", true, b.at(port + BEHIND)),
            ("server", false, local(port)),
            ("both", true, b.at(port)),
        ] {
            let before = [&near, &far].map(carried);
            assert_eq!(ask(way, preloads, at), expected, "{}, preloaded: {way}", program.name);
            for (gateway, (smc, tcp)) in [&near, &far].into_iter().zip(before) {
                let wanted = smc + program.connections;
                let what = format!("{} over SMC-R, preloaded: {way}", program.name);
                wait_until(&what, SETTLE_LIMIT, || carried(gateway).0 >= wanted);
                assert_eq!(carried(gateway).1, tcp, "{what}");
            }
        }
    }
    // A program that calls the kernel without libc is left alone, at either end.
    let before = [&near, &far].map(carried);
    let page = format!("http://{}/", b.at(PROGRAMS[0].port));
    let mut command = site.preloaded(a, &["hey", "-n", "200", "-c", "4", &page]);
    let said = run(&site.hosts, a, "hey", LIMIT, &mut command).expect_success("hey");
    assert!(said.contains("[200]\t200 responses"), "{said}");
    assert_eq!([&near, &far].map(carried), before, "Go stays TCP");
    drop(servers);
    for gateway in [&near, &far] {
        // Of all that were carried, each gateway had a program of its own in two of three ways.
        let totals = gateway.stats().totals;
        let by_rings = if how == Preload::Sockets { 0 } else { totals.connections_smc / 2 };
        assert!(totals.rings >= by_rings && (how != Preload::Sockets || totals.rings == 0));
        gateway.holdings_at_rest();
    }
}

/// A script that runs in a folder of its own, with the library of `host` or without.
pub(super) fn script(
    site: &Site,
    text: &str,
    preload: Option<(&Host, Preload)>,
    at: SocketAddrV4,
    name: &str,
) -> Command {
    let folder = folder(site).join(name);
    fs::create_dir_all(&folder).expect("the directory is ours");
    let words = ["bash", "-euo", "pipefail", "-c", text];
    let mut command = match preload {
        Some((host, how)) => site.preloaded_by(host, how, &words),
        None => site.command(&site.hosts.a, None, &words),
    };
    command.env("at", at.ip().to_string()).env("port", at.port().to_string());
    command.current_dir(folder);
    command
}

fn folder(site: &Site) -> PathBuf {
    site.hosts.logs.join("programs")
}

/// Writes what the scripts need, one folder above theirs.
pub(super) fn prepare(site: &Site) {
    let folder = folder(site);
    fs::create_dir_all(&folder).expect("the directory is ours");
    for (name, text) in [
        ("nginx.conf", NGINX),
        ("memcached.py", include_str!("memcached.py")),
        ("asyncio_server.py", include_str!("asyncio_server.py")),
        ("asyncio_client.py", include_str!("asyncio_client.py")),
        ("threads.py", include_str!("threads.py")),
        ("Echo.java", include_str!("Echo.java")),
    ] {
        fs::write(folder.join(name), text).expect("the directory is ours");
    }
    let mut javac = Command::new("javac");
    javac.arg("-d").arg(&folder).arg(folder.join("Echo.java"));
    assert!(javac.status().expect("scripts/setup installs it").success());
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join("client_key"));
    assert!(keygen.status().expect("scripts/setup installs it").success());
    // The database runs as another user, and so does its client of the gateway.
    fs::set_permissions(site.doors.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
}

const NGINX: &str = "daemon off; user root; pid nginx.pid; error_log error.log;
    worker_processes 2;
    events { worker_connections 1024; }
    http { access_log off; sendfile on;
      client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
      uwsgi_temp_path uwsgi; scgi_temp_path scgi;
      server { listen AT; location = / { return 200 \"here\\n\"; } } }
";
