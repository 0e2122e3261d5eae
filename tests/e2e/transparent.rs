//! Programs that know of no gateway, led to one: by eBPF, by NAT, and on the way through a router.

mod field;
mod programs;

use std::cell::Cell;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use socket2::{Domain, Socket, Type};

use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Active, Gateway, Setup, program, smcgate};
use crate::hosts::{Host, Hosts};
use crate::process::run;
use programs::{Servers, ask_all};

const LIMIT: Duration = Duration::from_secs(20);

/// The clients' host, with a router's role for a host behind it, and the servers' host.
struct Site {
    hosts: Hosts,
    /// A host whose way to the servers goes through host a.
    behind: Host,
    /// How often `smcgate intercept` has run.
    told: Cell<u32>,
}

impl Site {
    fn new(test: &str) -> Self {
        let hosts = Hosts::new(test);
        let behind = Host::new(&format!("{}-c", hosts.a.name), "vc", Ipv4Addr::new(10, 7, 0, 1));
        hosts.a.ip(&["link", "add", "xa", "type", "veth", "peer", "name", "vc"]);
        hosts.a.ip(&["link", "set", "vc", "netns", &behind.name]);
        for (host, device, addresses) in [
            (&hosts.a, "va", &["fd08::1/64"][..]),
            (&hosts.b, "vb", &["fd08::2/64"]),
            (&hosts.a, "xa", &["10.7.0.254/24", "fd07::fe/64"]),
            (&behind, "vc", &["10.7.0.1/24", "fd07::1/64"]),
        ] {
            for address in addresses {
                let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
                host.ip(&[&["address", "add", address, "dev", device], nodad].concat());
            }
            host.ip(&["link", "set", device, "up"]);
        }
        behind.ip(&["link", "set", "lo", "up"]);
        for (host, by) in
            [(&behind, ["10.7.0.254", "fd07::fe"]), (&hosts.b, ["10.8.0.1", "fd08::1"])]
        {
            for router in by {
                host.ip(&["route", "add", "default", "via", router]);
            }
        }
        let forward = || {
            for switch in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
                fs::write(format!("/proc/sys/net/{switch}"), "1").expect("we are root");
            }
        };
        hosts.a.enter(forward);
        Self { hosts, behind, told: Cell::new(0) }
    }

    /// The gateway on the clients' side, exactly as an operator writes it.
    fn out(&self, way: &str, family: &Family, more: &str) -> Gateway<'_> {
        self.out_setup(way, family, more).start(&self.hosts, &self.hosts.a)
    }

    fn out_setup(&self, way: &str, family: &Family, more: &str) -> Setup {
        let config = format!(
            "[[listener]]\nname = \"out\"\nbind = \"{}:15001\"\naccept = \"tcp\"\n\
             connect = \"smc\"\nupstream = \"original-dst\"\nintercept = \"{way}\"\n\
             intercept_ports = [7010, \"8000-8099\"]\nintercept_networks = [\"{}\"]\n{more}\n",
            family.loopback, family.servers
        );
        Setup::of_text("gateway-a", &config)
    }

    /// The gateway on the servers' side. Servers see the clients' addresses.
    fn within(&self, way: &str, family: &Family) -> Gateway<'_> {
        let config = format!(
            "[[listener]]\nname = \"in\"\nbind = \"{}:15002\"\naccept = \"smc\"\n\
             connect = \"tcp\"\nupstream = \"original-dst\"\nintercept = \"{way}\"\n\
             intercept_ports = [7010, \"8000-8099\"]\nsource = \"client\"\n",
            bracketed(family.server)
        );
        Setup::of_text("gateway-b", &config).start(&self.hosts, &self.hosts.b)
    }

    /// Runs `smcgate intercept` with these arguments on host a.
    fn intercept(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(program());
        command.arg("intercept").args(arguments);
        let name = format!("intercept-{}", self.told.replace(self.told.get() + 1));
        let finished = run(&self.hosts, &self.hosts.a, &name, LIMIT, &mut command);
        finished.expect_success("smcgate intercept")
    }
}

/// Addresses of one family.
struct Family {
    loopback: &'static str,
    servers: &'static str,
    server: IpAddr,
    /// The host that is both a client and a gateway, and the one behind it.
    clients: [&'static str; 2],
}

fn families() -> [Family; 2] {
    [
        Family {
            loopback: "127.0.0.1",
            servers: "10.8.0.0/24",
            server: IpAddr::from([10, 8, 0, 2]),
            clients: ["10.8.0.1", "10.7.0.1"],
        },
        Family {
            loopback: "[::1]",
            servers: "fd08::/64",
            server: IpAddr::from([0xfd08, 0, 0, 0, 0, 0, 0, 2]),
            clients: ["fd08::1", "fd07::1"],
        },
    ]
}

fn bracketed(address: IpAddr) -> String {
    if address.is_ipv6() { format!("[{address}]") } else { address.to_string() }
}

/// curl, redis, iperf3, psql, ssh and a program with asyncio connect to a server's own address,
/// over SMC-R, and the servers see their addresses. `ways` are those of the two gateways.
fn programs_over_smc_r(test: &str, ways: [&str; 2]) {
    let site = Site::new(test);
    for family in &families() {
        let through = ways[0] == "tproxy";
        let client = if through { &site.behind } else { &site.hosts.a };
        let expected = family.clients[usize::from(through)];
        let more = if through { "source = \"client\"" } else { "" };
        let far = site.within(ways[1], family);
        let near = site.out(ways[0], family, more);
        let servers = Servers::start(&site.hosts, family.server);
        let asked = ask_all(&site.hosts, client, &servers, expected);
        let totals = [near.stats().totals, far.stats().totals];
        for totals in totals {
            assert_eq!(totals.connections_tcp, 0, "{ways:?} {expected}: {totals:?}");
            assert!(totals.connections_smc >= asked, "{ways:?} {expected}: {totals:?}");
        }
        // A port that is not listed is nobody's business.
        servers.ask_aside(&site.hosts, client, expected);
        assert_eq!(near.stats().totals.connections_smc, totals[0].connections_smc);
    }
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_programs_are_intercepted_at_connect() {
    programs_over_smc_r("smoke_programs_are_intercepted_at_connect", ["ebpf", "tproxy"]);
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn programs_are_intercepted_by_nat() {
    programs_over_smc_r("programs_are_intercepted_by_nat", ["redirect", "redirect"]);
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn programs_are_intercepted_by_a_router() {
    programs_over_smc_r("programs_are_intercepted_by_a_router", ["tproxy", "tproxy"]);
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn programs_are_intercepted_by_ebpf_at_both_ends() {
    programs_over_smc_r("programs_are_intercepted_by_ebpf_at_both_ends", ["ebpf", "ebpf"]);
}

/// A gateway that dies must not take the applications' network with it.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_gateway_that_was_killed_intercepts_nothing() {
    let site = Site::new("a_gateway_that_was_killed_intercepts_nothing");
    let family = &families()[0];
    let server = SocketAddr::new(family.server, 7010);
    let _listener = site.hosts.b.listen(server);
    let is_direct = || {
        let stream = site.hosts.a.connect(server);
        stream.is_ok_and(|stream| stream.peer_addr().is_ok_and(|peer| peer == server))
    };
    let killed = |way: &str| {
        let mut gateway = site.out(way, family, "");
        let client = if way == "tproxy" { &site.behind } else { &site.hosts.a };
        client.connect(server).expect("the gateway listens");
        wait_until("the gateway has seen it", LIMIT, || gateway.stats().totals.connections_tcp > 0);
        gateway.process.signal(Signal::KILL);
        gateway.process.wait(LIMIT);
    };
    killed("ebpf");
    wait_until("connections are direct", LIMIT, is_direct);
    assert_eq!(site.intercept(&["show"]), "");

    killed("redirect");
    let left = site.intercept(&["show"]);
    assert!(left.contains("dnat ip to 127.0.0.1:15001"), "{left}");
    assert!(!is_direct(), "the rules outlive the gateway");
    site.intercept(&["remove"]);
    assert_eq!(site.intercept(&["show"]), "");
    assert!(is_direct());
    site.intercept(&["remove"]);

    killed("tproxy");
    // Whoever is started next finds everything as it needs it, and leaves nothing.
    let mut gateway = site.out("redirect", family, "");
    let shown = site.intercept(&["show"]);
    assert!(shown.contains("dnat") && !shown.contains("tproxy ip"), "{shown}");
    gateway.process.signal(Signal::TERM);
    assert!(gateway.process.wait(LIMIT).success());
    assert_eq!(site.intercept(&["show"]), "");
}

/// A gateway uses the address of a client, and many of its ports in the course of time. What the
/// client itself connects from such a port must still be intercepted: at once if it goes elsewhere,
/// and all of it when the gateway's connection is over.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn ports_that_were_used_in_the_name_of_a_client_are_not_exempt() {
    let site = Site::new("ports_that_were_used_in_the_name_of_a_client_are_not_exempt");
    let family = &families()[0];
    let gateway = site.within("ebpf", family);
    let [server, other] = [7010, 8000].map(|port| SocketAddr::new(family.server, port));
    let listeners = [server, other].map(|at| site.hosts.b.listen(at));
    // A client of TCP, which comes by another port than the gateway goes on by.
    let connect = |from: u16, to: SocketAddr| -> TcpStream {
        site.hosts.a.enter(|| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            // Ports are used again at once, because ends are resets.
            socket.set_linger(Some(Duration::ZERO)).expect("a socket");
            let from: SocketAddr = (family.clients[0].parse::<IpAddr>().expect("one"), from).into();
            socket.bind(&from.into()).expect("the port is free");
            socket.connect(&to.into()).expect("the gateway or the server listens");
            socket.into()
        })
    };
    let intercepted = || gateway.stats().totals.connections_tcp;
    let client = connect(0, server);
    let accepted = crate::hosts::accept(&listeners[0], LIMIT);
    let port = accepted.peer_addr().expect("it is connected").port();
    assert_ne!(port, client.local_addr().expect("it is connected").port());
    wait_until("it is intercepted", LIMIT, || intercepted() == 1);

    let aside = connect(port, other);
    crate::hosts::accept(&listeners[1], LIMIT);
    wait_until("it is intercepted", LIMIT, || intercepted() == 2);
    drop((aside, client, accepted));
    wait_until("both are over", LIMIT, || gateway.stats().active == Active::default());
    let _same = connect(port, server);
    crate::hosts::accept(&listeners[0], LIMIT);
    wait_until("it is intercepted, too", LIMIT, || intercepted() == 3);
}

/// The rules of a gateway that runs are not what an operator means who cleans up, nor what a unit
/// means whose own gateway did not start.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn the_rules_of_a_living_gateway_stay() {
    let site = Site::new("the_rules_of_a_living_gateway_stay");
    let gateway = site.out("redirect", &families()[0], "");
    let file = site.hosts.logs.join("gateway-a.toml").display().to_string();
    for (name, arguments) in
        [("remove", &["intercept", "remove"][..]), ("add", &["intercept", "add", "-c", &file])]
    {
        let refused = smcgate(&site.hosts, name, arguments);
        assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
        assert!(refused.stderr.contains("--force"), "{}", refused.stderr);
        assert!(site.intercept(&["show"]).contains("dnat ip to 127.0.0.1:15001"));
    }
    site.intercept(&["remove", "--force"]);
    assert_eq!(site.intercept(&["show"]), "");
    drop(gateway);
}

/// Two gateways would fight over the same connections. And without the privilege to intercept, an
/// operator must learn at once that nothing is intercepted, and what can be done.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn who_cannot_intercept_does_not_start() {
    let site = Site::new("who_cannot_intercept_does_not_start");
    let family = &families()[0];
    let first = site.out("redirect", family, "");
    let other = "[admin]\nlisten = \"127.0.0.1:9181\"\n[[listener]]\nname = \"x\"\n\
                 bind = \"127.0.0.1:15009\"\nupstream = \"original-dst\"\nintercept = \"tproxy\"\n\
                 intercept_ports = [1]\n";
    let setup = Setup::of_text("second", other);
    let (code, said) = setup.start_in_vain(&site.hosts, &site.hosts.a);
    // The first one may end: whoever starts the second is to try again.
    assert_eq!(code, Some(1), "{said}");
    let holder = format!("process {}, user 0", first.process.id());
    assert!(said.contains("another gateway intercepts") && said.contains(&holder), "{said}");
    assert!(site.intercept(&["show"]).contains("dnat"), "the first one still has its rules");
    drop(first);
    site.intercept(&["remove"]);
    for (way, other) in [("ebpf", "intercept = \"redirect\""), ("redirect", "intercept = \"ebpf\"")]
    {
        let setup = site.out_setup(way, family, "").under(&[
            "setpriv",
            "--bounding-set=-all",
            "--inh-caps=-all",
        ]);
        let (code, said) = setup.start_in_vain(&site.hosts, &site.hosts.a);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("CAP_NET_ADMIN") && said.contains(other), "{said}");
    }
}

/// A name for a cgroup, and a child of it, below the mount of cgroup v2; gone when dropped.
struct Cgroups {
    outer: PathBuf,
    name: String,
}

impl Cgroups {
    fn new() -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("/proc is mounted");
        let of_v2 = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("cgroup v2");
        let mount = of_v2.split(' ').nth(4).expect("a mount has a place");
        let name = format!("smcgate-e2e-{}", std::process::id());
        let outer = Path::new(mount).join(&name);
        fs::create_dir_all(outer.join("child")).expect("we are root");
        Self { outer, name }
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for path in [self.outer.join("child"), self.outer.clone()] {
            // A directory that is left behind is no reason to panic while panicking.
            drop(fs::remove_dir(path));
        }
    }
}

/// Where only some applications are to be intercepted, it is those in the listed cgroups and in
/// cgroups below; all others go where they want to, directly.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn only_applications_in_the_listed_cgroups_are_intercepted() {
    let site = Site::new("only_applications_in_the_listed_cgroups_are_intercepted");
    let family = &families()[0];
    let cgroups = Cgroups::new();
    let listed = format!("intercept_cgroups = [\"/{}\"]", cgroups.name);
    let near = site.out("ebpf", family, &listed);
    let server = SocketAddr::new(family.server, 7010);
    let listener = site.hosts.b.listen(server);
    let connect = |inside: Option<&str>| {
        let enter = inside.map(|below| {
            format!("echo $$ > {} &&", cgroups.outer.join(below).join("cgroup.procs").display())
        });
        let line = format!("{} exec 3<> /dev/tcp/10.8.0.2/7010", enter.unwrap_or_default());
        let mut command = Command::new("bash");
        command.args(["-c", &line]);
        let name = format!("client-{}", site.told.replace(site.told.get() + 1));
        run(&site.hosts, &site.hosts.a, &name, LIMIT, &mut command).expect_success("bash");
        crate::hosts::accept(&listener, LIMIT);
        near.stats().totals.connections_tcp
    };
    assert_eq!(connect(None), 0, "outside");
    assert_eq!(connect(Some("")), 1, "in the cgroup");
    assert_eq!(connect(Some("child")), 2, "below it");
    assert_eq!(connect(None), 2, "outside");
}

/// In a pod, a gateway sees the cgroup of its container, and the tree of the node beside it if that
/// is mounted. It needs both: its own for the TCP option, and the other for applications outside.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn applications_of_the_host_are_intercepted_from_a_container() {
    let site = Site::new("applications_of_the_host_are_intercepted_from_a_container");
    let family = &families()[0];
    let cgroups = Cgroups::new();
    let node = tempfile::tempdir().expect("there is room");
    let own = cgroups.outer.parent().expect("it is below the mount").display();
    let script = format!(
        "echo $$ > {}/child/cgroup.procs && exec unshare -C -m sh -c '\
         mount --bind {own} {} && umount -l {own} && mount -t cgroup2 none {own} && \
         exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin \"$@\"' sh \"$@\"",
        cgroups.outer.display(),
        node.path().display(),
    );
    let far = site.within("tproxy", family);
    let near = site.out_setup("ebpf", family, "").under(&["sh", "-c", &script, "sh"]);
    let near = near.start(&site.hosts, &site.hosts.a);
    let remote = SocketAddr::new(family.server, 7010);
    let listener = site.hosts.b.listen(remote);
    let client = site.hosts.a.connect(remote).expect("the gateway listens");
    assert_echo(&client, &crate::hosts::accept(&listener, LIMIT));
    for gateway in [&near, &far] {
        assert_eq!(gateway.stats().totals.connections_smc, 1, "{}", near.process.log());
    }
}

/// A gateway that has given up its privileges cannot look for the cgroups any more, and where it
/// runs no mount may show them. A reload must find them all the same.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_reload_brings_an_interception_where_no_mount_shows_the_cgroups() {
    let site = Site::new("a_reload_brings_an_interception_where_no_mount_shows_the_cgroups");
    let family = &families()[0];
    let hide = ["unshare", "-m", "sh", "-c", "umount -l -a -t cgroup2; exec \"$@\"", "sh"];
    let gateway = site.out_setup("ebpf", family, "").under(&hide);
    let text = gateway.text();
    let gateway = gateway.start(&site.hosts, &site.hosts.a);
    let more = "[[listener]]\nname = \"more\"\nbind = \"127.0.0.1:15003\"\n\
                upstream = \"original-dst\"\nintercept = \"ebpf\"\nintercept_ports = [9001]\n";
    fs::write(site.hosts.logs.join("gateway-a.toml"), format!("{more}{text}")).expect("ours");
    smcgate(&site.hosts, "reload", &["reload"]).expect_success("reload");
    let remote = SocketAddr::new(family.server, 9001);
    let listener = site.hosts.b.listen(remote);
    let client = site.hosts.a.connect(remote).expect("the gateway listens");
    assert_echo(&client, &crate::hosts::accept(&listener, LIMIT));
    assert_eq!(gateway.stats().totals.connections_tcp, 1);
}

/// A listener that takes the place of another one in a reload intercepts in its own way: it must
/// not look for connections where those of the other one were kept.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_listener_intercepts_in_the_place_of_another() {
    let site = Site::new("a_listener_intercepts_in_the_place_of_another");
    let family = &families()[0];
    let out = "[[listener]]\nname = \"out\"\nbind = \"127.0.0.1:15001\"\n\
               upstream = \"original-dst\"\nintercept = \"ebpf\"\nintercept_ports = [7010]\n";
    let within = "[[listener]]\nname = \"in\"\nbind = \"10.8.0.1:15002\"\naccept = \"smc\"\n\
                  upstream = \"original-dst\"\nintercept = \"ebpf\"\nintercept_ports = [7010]\n";
    let stays = "[[listener]]\nname = \"stays\"\nbind = \"127.0.0.1:7001\"\n\
                 upstream = \"10.8.0.2:7001\"\n";
    let with = |listener: &str| format!("{stays}{listener}");
    let gateway = Setup::of_text("gateway-a", &with(out)).start(&site.hosts, &site.hosts.a);
    let remote = SocketAddr::new(family.server, 7010);
    let servers = [site.hosts.b.listen(remote), site.hosts.a.listen(site.hosts.a.at(7010))];
    let client = site.hosts.a.connect(remote).expect("the gateway listens");
    drop((client, crate::hosts::accept(&servers[0], LIMIT)));
    wait_until("it is over", LIMIT, || gateway.stats().active == Active::default());
    for listener in ["", within] {
        fs::write(site.hosts.logs.join("gateway-a.toml"), with(listener)).expect("ours");
        smcgate(&site.hosts, "reload", &["reload"]).expect_success("reload");
    }
    let before = gateway.stats().totals.connections_tcp;
    let client = site.hosts.b.connect(site.hosts.a.at(7010)).expect("the gateway listens");
    let server = crate::hosts::accept(&servers[1], LIMIT);
    assert_echo(&client, &server);
    assert_eq!(gateway.stats().totals.connections_tcp, before + 1);
}
