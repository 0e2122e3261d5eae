//! Interception on hosts as they are: services that start again, and more addresses than one.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use super::{Cgroups, LIMIT, Site, families};
use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Setup};
use crate::hosts::{accept, set_limit};
use crate::process::run;

/// systemd makes a new cgroup of the same name when a service starts again, and at boot a gateway
/// may come before the services whose connections it is to intercept.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_service_that_starts_again_is_intercepted_again() {
    let site = Site::new("a_service_that_starts_again_is_intercepted_again");
    let family = &families()[0];
    let cgroups = Cgroups::new();
    let service = cgroups.outer.join("child");
    fs::remove_dir(&service).expect("we have made it");
    let listed = format!("intercept_cgroups = [\"/{}/child\"]", cgroups.name);
    let near = site.out("ebpf", family, &listed);
    assert!(near.process.log().contains("there is none"), "{}", near.process.log());
    let server = SocketAddr::new(family.server, 7010);
    let listener = site.hosts.b.listen(server);
    let connect = || {
        let enter = service.join("cgroup.procs");
        let line = format!("echo $$ > {} && exec 3<> /dev/tcp/10.8.0.2/7010", enter.display());
        let mut command = Command::new("bash");
        command.args(["-c", &line]);
        let name = format!("client-{}", site.told.replace(site.told.get() + 1));
        run(&site.hosts, &site.hosts.a, &name, LIMIT, &mut command).expect_success("bash");
        accept(&listener, LIMIT);
        near.stats().totals.connections_tcp
    };
    for start in 1..=3 {
        fs::create_dir(&service).expect("we are root");
        let said = || {
            near.process.log().matches("its connections are intercepted\u{1b}").count()
                + near.process.log().matches("its connections are intercepted cgroup=").count()
        };
        wait_until("the gateway has seen the service", LIMIT, || said() >= start);
        assert_eq!(connect(), start as u64, "start {start}");
        wait_until("the cgroup is empty", LIMIT, || fs::remove_dir(&service).is_ok());
    }
}

/// A host has an address more, and a program of its own connects to it, by way of a server whose
/// connections from outside are intercepted. It comes from the first address: taken for somebody
/// else, it came to the gateway, whose own connection came to it again, without end.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn what_comes_from_another_own_address_is_left_alone() {
    let site = Site::new("what_comes_from_another_own_address_is_left_alone");
    let host = &site.hosts.b;
    host.ip(&["address", "add", "10.8.0.3/24", "dev", host.device]);
    let text = "[[listener]]\nname = \"in\"\nbind = \"0.0.0.0:15002\"\naccept = \"smc\"\n\
                connect = \"tcp\"\nupstream = \"original-dst\"\nintercept = \"ebpf\"\n\
                intercept_ports = [7010]\n";
    let gateway = Setup::of_text("gateway-b", text).start(&site.hosts, host);
    // One that is there when the gateway starts, one that comes later, and one of loopback.
    host.ip(&["address", "add", "10.8.0.4/24", "dev", host.device]);
    let accepted = |gateway: &Gateway<'_>| {
        let stats: serde_json::Value = serde_json::from_str(&gateway.get("/stats")).expect("JSON");
        stats["listeners"][0]["accepted"].as_u64().expect("a number")
    };
    std::thread::sleep(std::time::Duration::from_secs(1));
    for at in ["10.8.0.3:7010", "10.8.0.4:7010", "127.0.0.2:7010"] {
        let at: SocketAddr = at.parse().expect("an address");
        let before = accepted(&gateway);
        let listener = host.listen(at);
        let client = host.connect(at).expect("the server listens");
        set_limit(&client, LIMIT);
        assert_echo(&client, &accept(&listener, LIMIT));
        assert_eq!(accepted(&gateway), before, "{at}: it comes from this host");
        if at.ip().is_loopback() {
            continue;
        }
        // From outside it is intercepted, and goes on to the server, once.
        let client = site.hosts.a.connect(at).expect("the gateway listens");
        set_limit(&client, LIMIT);
        assert_echo(&client, &accept(&listener, LIMIT));
        assert_eq!(accepted(&gateway), before + 1, "{at}");
    }
}

/// An address that means something only together with a device cannot be connected to in turn:
/// who uses one must not be led to a gateway.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn link_local_addresses_are_left_alone() {
    let site = Site::new("link_local_addresses_are_left_alone");
    let far = "[[listener]]\nname = \"in\"\nbind = \"[::]:15002\"\naccept = \"smc\"\n\
               connect = \"tcp\"\nupstream = \"original-dst\"\nintercept = \"WAY\"\n\
               intercept_ports = [7010]\n";
    let near = "[[listener]]\nname = \"out\"\nbind = \"[::]:15001\"\naccept = \"tcp\"\n\
                connect = \"smc\"\nupstream = \"original-dst\"\nintercept = \"WAY\"\n\
                intercept_ports = [7010]\n";
    for (host, at) in [(&site.hosts.a, "fe80::a1/64"), (&site.hosts.b, "fe80::b2/64")] {
        host.ip(&["address", "add", at, "dev", host.device, "nodad"]);
    }
    let client_and_server = || {
        let line = "import socket,sys\n\
            s=socket.socket(socket.AF_INET6)\n\
            s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEADDR,1)\n\
            s.bind(('fe80::b2',7010,0,socket.if_nametoindex('vb'))); s.listen()\n\
            sys.stderr.write('listens\\n'); sys.stderr.flush()\n\
            c,_=s.accept(); c.sendall(c.recv(4))";
        let mut server = Command::new("python3");
        server.args(["-c", line]);
        let name = format!("server-{}", site.told.get());
        let logs = &site.hosts.logs;
        let server = crate::process::Process::start(&site.hosts.b, logs, &name, &mut server);
        wait_until("the server listens", LIMIT, || server.log().contains("listens"));
        let line = "import socket\n\
            c=socket.socket(socket.AF_INET6); c.settimeout(10)\n\
            c.connect(('fe80::b2',7010,0,socket.if_nametoindex('va')))\n\
            c.sendall(b'ping'); assert c.recv(4)==b'ping'";
        let mut client = Command::new("python3");
        client.args(["-c", line]);
        let name = format!("client-{}", site.told.replace(site.told.get() + 1));
        run(&site.hosts, &site.hosts.a, &name, LIMIT, &mut client).expect_success("the client");
    };
    for way in ["ebpf", "redirect", "tproxy"] {
        let far = Setup::of_text("gateway-b", &far.replace("WAY", way));
        let far = far.start(&site.hosts, &site.hosts.b);
        let near = Setup::of_text("gateway-a", &near.replace("WAY", way));
        let near = near.start(&site.hosts, &site.hosts.a);
        client_and_server();
        for gateway in [&near, &far] {
            let stats = gateway.stats();
            assert_eq!(stats.totals.connections_tcp + stats.totals.connections_smc, 0, "{way}");
        }
    }
}
