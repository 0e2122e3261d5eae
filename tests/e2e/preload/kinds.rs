//! Kinds of programs: written for kernel SMC-R, linked statically, or for another libc.

use std::fs;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;

use super::{LIMIT, Preload, Site, carried, library};
use crate::clock::wait_until;
use crate::gateway::SETTLE_LIMIT;
use crate::hosts::Hosts;
use crate::process::{Process, run};

/// Programs written for kernel SMC-R run here, whose kernel has none: with a family and protocols
/// of its own, and with a protocol of IP; over IPv4 and IPv6.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_programs_for_kernel_smc() {
    const PORT: u16 = 7010;
    let site = Site::new("preload_programs_for_kernel_smc");
    let Hosts { a, b, logs } = &site.hosts;
    let addresses = [1, 2].map(|last| Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, last));
    for (host, address) in [a, b].into_iter().zip(addresses) {
        host.ip(&["address", "add", &format!("{address}/64"), "dev", host.device, "nodad"]);
    }
    let far = site.gateway(b).start(&site.hosts, b);
    let near = site.gateway(a).start(&site.hosts, a);
    let python = |role: &str, (family, protocol): (&str, &str), to: SocketAddr| {
        let (ip, port) = (to.ip().to_string(), to.port().to_string());
        ["python3", "-Bc", KERNEL_SMC, role, family, protocol, &ip, &port].map(str::to_owned)
    };
    let own_tool = |role: &str, part: &str| {
        let (tool, at) = (env!("CARGO_BIN_EXE_smcgate-guest"), b.at(PORT).to_string());
        [tool, role, "--times", "3", &at]
            .map(str::to_owned)
            .into_iter()
            .chain(part.split(' ').map(str::to_owned))
            .collect::<Vec<_>>()
    };
    let four = SocketAddr::from(b.at(PORT));
    let six = SocketAddr::from((addresses[1], PORT));
    // Family AF_SMC with SMCPROTO_SMC and SMCPROTO_SMC6, and IPPROTO_SMC.
    let mut ways: Vec<_> =
        [(four, ("43", "0")), (six, ("43", "1")), (four, ("2", "256")), (six, ("10", "256"))]
            .map(|(at, kind)| {
                (python("server", kind, at).to_vec(), python("client", kind, at).to_vec())
            })
            .into();
    // The tool of the Linux guests.
    ways.push((
        own_tool("accept", "drain send=1000000"),
        own_tool("connect", "send=1000000 shut drain"),
    ));
    for (number, (server, client)) in (1..).zip(&ways) {
        let name = format!("server-{number}");
        let mut command = site.preloaded(b, &words(server));
        let mut server = Process::start(b, logs, &name, &mut command);
        wait_until("the server listens", LIMIT, || server.log().contains("listening"));
        let name = format!("client-{number}");
        let mut command = site.preloaded(a, &words(client));
        let said = run(&site.hosts, a, &name, LIMIT, &mut command).expect_success(&name);
        assert!(server.wait(LIMIT).success(), "{}", server.log());
        assert!(said.contains("3 x "), "{said}");
        for gateway in [&near, &far] {
            wait_until("all are counted", SETTLE_LIMIT, || carried(gateway).0 >= 3 * number);
            assert_eq!(carried(gateway), (3 * number, 0));
        }
    }
    near.holdings_at_rest();
    far.holdings_at_rest();
}

fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

/// Serves three connections, or makes them.
const KERNEL_SMC: &str = r#"
import ctypes, os, socket, sys
role, family, protocol, ip, port = sys.argv[1:]
of_ip = socket.AF_INET6 if ":" in ip else socket.AF_INET
def make():
    fd = ctypes.CDLL(None, use_errno=True).socket(int(family), socket.SOCK_STREAM, int(protocol))
    assert fd >= 0, os.strerror(ctypes.get_errno())
    return socket.socket(of_ip, socket.SOCK_STREAM, 0, fileno=fd)
if role == "server":
    listener = make()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((ip, int(port)))
    listener.listen()
    print("listening", file=sys.stderr, flush=True)
    for _ in range(3):
        s = listener.accept()[0]
        while data := s.recv(65536):
            s.sendall(data)
        s.close()
else:
    for _ in range(3):
        s = make()
        s.connect((ip, int(port)))
        s.sendall(b"x" * 1000)
        s.shutdown(socket.SHUT_WR)
        assert s.makefile("rb").read() == b"x" * 1000
        assert s.getpeername()[:2] == (ip, int(port))
        s.close()
    print("3 x right")
"#;

/// Nothing can be preloaded into a program that is linked statically, or for musl where the library
/// for that was not built (`scripts/musl`). It must run all the same, over TCP, and its user must
/// hear of it. Where it was built, programs for musl are as good as others.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_programs_for_any_libc_or_none() {
    const PORT: u16 = 7010;
    let site = Site::new("preload_programs_for_any_libc_or_none");
    let Hosts { a, b, logs } = &site.hosts;
    let far = site.gateway(b).start(&site.hosts, b);
    let near = site.gateway(a).start(&site.hosts, a);
    let without_musl = "is for musl, and there is no libsmcgate-musl.so: its connections stay TCP";
    let has_musl = library().with_file_name("libsmcgate-musl.so").exists();
    let kinds: [(&[&str], &str); 3] = [
        (&["cc"], ""),
        (&["cc", "-static"], "is linked statically: its connections stay TCP"),
        (&["musl-gcc"], if has_musl { "" } else { without_musl }),
    ];
    let ways = [Preload::Sockets, Preload::Rings];
    let kinds = kinds.iter().flat_map(|kind| ways.map(|preload| (kind, preload)));
    let mut carried_so_far = 0;
    for (number, ((compiler, warning), preload)) in (0..).zip(kinds) {
        let program = compile(&site, number, compiler);
        let at = b.at(PORT + number);
        let (ip, port) = (at.ip().to_string(), at.port().to_string());
        let program = program.to_str().expect("our own paths are text");
        let mut command = site.preloaded_by(b, preload, &[program, "server", &ip, &port]);
        let name = format!("server-{number}");
        let mut server = Process::start(b, logs, &name, &mut command);
        wait_until("the server listens", LIMIT, || server.log().contains("listening"));
        let mut command = site.preloaded_by(a, preload, &[program, "client", &ip, &port]);
        let name = format!("client-{number}");
        let ran = run(&site.hosts, a, &name, LIMIT, &mut command);
        assert_eq!(ran.status.code(), Some(7), "{}", ran.stderr);
        assert!(server.wait(LIMIT).success(), "{}", server.log());
        let is_told = |said: &str| said.contains("smcgate: ") && said.contains(warning);
        for said in [&ran.stderr, &server.log()] {
            assert!(warning.is_empty() != is_told(said), "{compiler:?}: {said}");
        }
        carried_so_far += u64::from(warning.is_empty());
        wait_until("it is counted", SETTLE_LIMIT, || carried(&near).0 == carried_so_far);
        assert_eq!(
            [&near, &far].map(carried),
            [(carried_so_far, 0); 2],
            "{compiler:?} {preload:?}"
        );
    }
}

/// A program that asks a server to be told a number, or is that server.
fn compile(site: &Site, number: u16, compiler: &[&str]) -> PathBuf {
    let folder = &site.hosts.logs;
    let (source, program) = (folder.join("asks.c"), folder.join(format!("asks-{number}")));
    fs::write(&source, include_str!("asks.c")).expect("the directory is ours");
    let mut command = Command::new(compiler[0]);
    command.args(&compiler[1..]).args(["-Wall", "-Werror", "-o"]).arg(&program).arg(&source);
    assert!(command.status().expect("scripts/setup installs it").success(), "{compiler:?}");
    program
}
