//! What operators read when a file is wrong, and what they get when it is right.

use super::*;

const UDP: RnicKind = RnicKind::RoceUdp { address: None };

/// The example every document shows.
const EXAMPLE: &str = r#"
[admin]
listen = "127.0.0.1:9180"
[[rnic]]
name = "soft0"
kind = "roce-udp"
device = "va"
[[listener]]
name = "to-b"
bind = "127.0.0.1:7001"
accept = "tcp"
connect = "smc"              # try SMC-R, else stay TCP
upstream = "10.8.0.2:7002"
[[listener]]
name = "from-a"
bind = "10.8.0.2:7002"
accept = "smc"
connect = "tcp"
upstream = "127.0.0.1:7010"
"#;

#[test]
fn the_example_means_what_it_says() {
    let config = Config::parse(EXAMPLE, "gate.toml").unwrap();
    assert_eq!(config.admin.listen, Some("127.0.0.1:9180".parse().unwrap()));
    let [rnic] = &config.rnics[..] else { panic!("{:?}", config.rnics) };
    assert_eq!((rnic.name.as_str(), rnic.device.as_str()), ("soft0", "va"));
    assert_eq!((&rnic.kind, rnic.core, rnic.mtu), (&UDP, None, None));
    let [to_b, from_a] = &config.listeners[..] else { panic!("{:?}", config.listeners) };
    assert_eq!((to_b.accept, to_b.connect), (Protocol::Tcp, Protocol::Smc));
    assert_eq!((from_a.accept, from_a.connect), (Protocol::Smc, Protocol::Tcp));
    assert_eq!(to_b.upstream.all, [Upstream::Address("10.8.0.2:7002".parse().unwrap())]);
    assert_eq!(from_a.bind, "10.8.0.2:7002".parse().unwrap());
}

/// Everything but the listeners may be left out: each default is a promise to operators.
#[test]
fn every_other_key_has_a_default() {
    let text = "[[listener]]\nname='a'\nbind='0.0.0.0:1'\nupstream='host.name:2'";
    let config = Config::parse(text, "gate.toml").unwrap();
    assert_eq!(config.admin.listen, Some("127.0.0.1:9180".parse().unwrap()));
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    assert_eq!(config.log, LogLevel::Info);
    assert_eq!(
        config.limits,
        Limits { connections_max: 9000, handshakes_max: 1024, silent_max: 1024, rmb_bytes: None }
    );
    let poll = Poll {
        policy: IdlePolicy::Adaptive,
        spin: Duration::from_micros(50),
        cores: vec![],
        pin: true,
        boost: 10,
        realtime: true,
    };
    assert_eq!(config.poll, poll);
    let [listener] = &config.listeners[..] else { panic!("{:?}", config.listeners) };
    assert_eq!((listener.accept, listener.connect), (Protocol::Tcp, Protocol::Tcp));
    assert_eq!(listener.connect_timeout, Duration::from_secs(5));
    assert_eq!((listener.bounds.connections_max, listener.tcp_nodelay), (9000, true));
    // Peers that died must not keep their connections for ever.
    assert_eq!(listener.tcp_keepalive, keepalive(120, 15, 5));
    assert_eq!(config.smc.tcp_keepalive, keepalive(120, 15, 5));
    assert_eq!(listener.rmbe_size, None);
    assert_eq!(config.smc.option, OptionMode::Auto);
    assert_eq!((config.smc.rmbe_size, config.smc.rmb_elements), (262_144, 255));
    // As long as Linux peers wait: with less, what works would be taken for dead.
    let smc = &config.smc;
    let seconds = |time: Duration| time.as_secs();
    assert_eq!((seconds(smc.test_link_idle), seconds(smc.test_link_timeout)), (30, 2));
    assert_eq!((seconds(smc.idle_group_server), seconds(smc.idle_group_client)), (600, 610));
}

#[test]
fn every_key_arrives_where_it_belongs() {
    let text = r#"
        drain_timeout = "1m"
        log = "debug"
        [admin]
        listen = "none"
        [[rnic]]
        name = "r"
        device = "va"
        core = 1
        mtu = 4096
        [[pnet]]
        device = "vlan7"
        rnic = "r"
        [[listener]]
        name = "a"
        bind = "[::]:7"
        upstream = "x:8"
        connect_timeout = "250ms"
        connections_max = 10
        tcp_nodelay = false
        tcp_keepalive = { idle = "9s", interval = "1s", count = 127 }
        rmbe_size = 32768
        backlog = 16
        [poll]
        policy = "spin"
        spin_us = 0
        cores = [0, 1]
        pin = false
        boost = 0
        realtime = false
        [smc]
        option = "assume"
        assume_peers = ["10.8.0.0/24", "fd00::2"]
        rmbe_size = 524288
        rmb_elements = 1
        send_pool = 1048576
        handshake_timeout = "1s"
        test_link_idle = "2s"
        test_link_timeout = "3s"
        idle_group_server = "4s"
        idle_group_client = "5s"
        tcp_keepalive = { idle = "6s", interval = "7s", count = 8 }
        [limits]
        connections_max = 20
        handshakes_max = 30
        rmb_bytes = 1000000
    "#;
    let config = Config::parse(text, "gate.toml").unwrap();
    let seconds = Duration::from_secs;
    assert_eq!((config.drain_timeout, config.log), (seconds(60), LogLevel::Debug));
    assert_eq!(config.admin.listen, None);
    assert_eq!((config.rnics[0].core, config.rnics[0].mtu), (Some(1), Some(4096)));
    assert_eq!(config.pnet, [PnetEntry { device: "vlan7".into(), rnic: "r".into() }]);
    let listener = &config.listeners[0];
    assert_eq!((listener.connect_timeout, listener.backlog), (Duration::from_millis(250), 16));
    assert_eq!((listener.bounds.connections_max, listener.rmbe_size), (10, Some(32_768)));
    assert!(!listener.tcp_nodelay && !config.poll.pin && !config.poll.realtime);
    assert_eq!((config.poll.policy, config.poll.spin), (IdlePolicy::Spin, Duration::ZERO));
    assert_eq!((&config.poll.cores[..], config.poll.boost), (&[0, 1][..], 0));
    let smc = &config.smc;
    assert_eq!((smc.option, smc.assume_peers.len()), (OptionMode::Assume, 2));
    assert_eq!((smc.rmbe_size, smc.rmb_elements, smc.send_pool), (524_288, 1, 1 << 20));
    assert_eq!((smc.handshake_timeout, smc.test_link_idle), (seconds(1), seconds(2)));
    assert_eq!((smc.test_link_timeout, smc.tcp_keepalive), (seconds(3), keepalive(6, 7, 8)));
    assert_eq!(listener.tcp_keepalive, keepalive(9, 1, 127));
    assert_eq!((smc.idle_group_server, smc.idle_group_client), (seconds(4), seconds(5)));
    let Limits { connections_max, handshakes_max, rmb_bytes, .. } = config.limits;
    assert_eq!((connections_max, handshakes_max, rmb_bytes), (20, 30, Some(1_000_000)));
}

/// What one source may take from others.
#[test]
fn limits_of_sources_arrive_where_they_belong() {
    let limited = "max_per_source = 3\nidle_timeout = '5m'\n[limits]\nsilent_max = 40";
    let config = Config::parse(&format!("{GOOD}{limited}"), "gate.toml").unwrap();
    let bounds = &config.listeners[0].bounds;
    assert_eq!((bounds.max_per_source, bounds.idle_timeout.as_secs()), (3, 300));
    assert_eq!(config.limits.silent_max, 40);
    // Where a listener has fewer places, so has any source.
    let few = Config::parse(&format!("{GOOD}connections_max = 7"), "gate.toml").unwrap();
    assert_eq!(few.listeners[0].bounds.max_per_source, 7);
}

fn keepalive(idle_s: u64, interval_s: u64, count: u32) -> TcpKeepalive {
    let [idle, interval] = [idle_s, interval_s].map(Duration::from_secs);
    TcpKeepalive { idle, interval, count }
}

const GOOD: &str = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";

/// One line each, and it says where, what, why, and what to write instead.
#[test]
fn every_fault_is_one_line_that_names_line_and_key() {
    let table = [
        (
            "",
            ":1: listener: there is none, so nothing would be served; write at least one \
             [[listener]], or socket under [local]",
        ),
        (
            "[[listener]]\nname = 'a'\nbind = '127.0.0.1'\nupstream = 'x:1'",
            ":3: listener.a.bind: \"127.0.0.1\" is no address to bind; write one such as \
             \"127.0.0.1:7001\"",
        ),
        (
            "[[listener]]\nname = 'a'\nbind = '127.0.0.1:0'\nupstream = 'x:1'",
            ":3: listener.a.bind: \"127.0.0.1:0\" has port 0; write the port that is meant",
        ),
        (
            "[[listener]]\nbind = '127.0.0.1:1'",
            ":1: listener.name: is missing; every entry of this kind needs it",
        ),
        (
            "[[listener]]\nname = 'a'\nbind = '127.0.0.1:1'\nupstream = 'here'",
            ":4: listener.a.upstream: \"here\" is no address; write \"10.8.0.2:7002\" or \
             \"host.name:7002\"",
        ),
        (
            "[[listener]]\nname = 'a'\nbind = '127.0.0.1:1'\nupstream = '127.0.0.1:1'",
            ":4: listener.a.upstream: 127.0.0.1:1 is this listener itself, which would \
             connect to itself; write the address of the server",
        ),
        (
            "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:1'\naccept='smc'\n\
             connect='smc'",
            ":1: listener.a.connect: relaying SMC-R to SMC-R is not supported; make accept or \
             connect \"tcp\"",
        ),
        (
            "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:1'\naccept='smc-d'",
            ":5: listener.a.accept: \"smc-d\" is not known; write \"tcp\" or \"smc\"",
        ),
        (
            "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:1'\nupstraem='y:1'",
            ":5: listener.a.upstraem: is not a key; known here: name, bind, accept, connect, \
             upstream, balance, eject_after, eject_for, check, prefer, compare_every, intercept, \
             intercept_ports, intercept_networks, intercept_cgroups, source, proxy_from, \
             connect_timeout, connections_max, max_per_source, rate_max, rate_burst, \
             rate_per_source, rate_per_source_burst, over_limit, wait_timeout, idle_timeout, \
             half_closed_timeout, age_max, bandwidth_max, bandwidth_per_connection, tcp_nodelay, \
             tcp_keepalive, rmbe_size, backlog, peers, gids",
        ),
        (
            "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:1'\nrmbe_size=17000",
            ":5: listener.a.rmbe_size: 17000 is no power of two; write 16384 or 32768",
        ),
        (
            "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:1'\nconnect_timeout=5",
            ":5: listener.a.connect_timeout: 5 has no unit; write \"5s\" (or us, ms, m, h)",
        ),
        (
            "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:1'\nconnect_timeout='5'",
            ":5: listener.a.connect_timeout: \"5\" has no unit; write \"5s\" (or us, ms, m, h)",
        ),
        ("[listener]", ":1: listener: is of type table; write a list, written as [[listener]]"),
        ("drain_timeout = ", ":1: not TOML: string values must be quoted, expected literal string"),
    ];
    for (text, complaint) in table {
        assert_eq!(fault(text), format!("gate.toml{complaint}"), "{text}");
    }
}

#[test]
fn congestion_control_is_ours_or_the_hosts() {
    let of = |text: &str| {
        let config = Config::parse(&format!("{GOOD}[local]\n{text}"), "gate.toml");
        config.map(|config| config.local.congestion_control).map_err(|error| error.to_string())
    };
    assert_eq!(of(""), Ok(CongestionControl::Auto));
    assert_eq!(of("congestion_control = 'host'"), Ok(CongestionControl::Host));
    let error = of("congestion_control = 'reno'").unwrap_err();
    assert!(error.ends_with("\"reno\" is not known; write \"auto\" or \"host\""), "{error}");
}

/// Faults outside the listeners, with a good listener ahead of them (four lines).
#[test]
fn other_tables_are_checked_too() {
    let table = [
        (
            "[[listener]]\nname='a'\nbind='127.0.0.1:3'\nupstream='x:1'",
            ":6: listener.name: \"a\" is taken by another listener; change one of them",
        ),
        (
            "[[listener]]\nname='b'\nbind='127.0.0.1:1'\nupstream='x:1'",
            ":7: listener.b.bind: \"127.0.0.1:1\" is taken by another listener; change one of them",
        ),
        (
            "[[pnet]]\ndevice='va'\nrnic='soft1'",
            ":7: pnet.va.rnic: there is no [[rnic]] named \"soft1\"; add it or correct this",
        ),
        (
            "[[rnic]]\nname='r'\ndevice='va'\nkind='none'",
            ":8: rnic.r.kind: \"none\" is not known; write \"roce-udp\" or \"roce-packet\" or \
             \"dpdk\" or \"shm\" or \"verbs\"",
        ),
        (
            "[[rnic]]\nname='r'\ndevice='/run/x'\nkind='shm'\nmtu=1024",
            ":5: rnic.r.mtu: there are no packets in shared memory; remove this",
        ),
        (
            "[[rnic]]\nname='r'\ndevice='/run/x'\naddress='::1'\nkind='shm'",
            ":5: rnic.r.address: there are no packets in shared memory; remove this",
        ),
        (
            "[[rnic]]\nname='r'\ndevice='va'\nmtu=1500",
            ":8: rnic.r.mtu: 1500 is no RoCE MTU; write 256, 512, 1024, 2048 or 4096",
        ),
        (
            "[[rnic]]\nname='r'\ndevice='va'\naddress='va'",
            ":8: rnic.r.address: \"va\" is no address; write one such as \"fd00::1\"",
        ),
        (
            "[[rnic]]\nname='r'\ndevice='va'\npollers=0",
            ":8: rnic.r.pollers: 0 is out of range; write 1 to 64",
        ),
        ("[[rnic]]\nname=''", ":6: rnic.name: is empty"),
        (
            "[poll]\ncores=[0,'1']",
            ":6: poll.cores: is of type string; write a whole number without quotes",
        ),
        ("[poll]\nboost=21", ":6: poll.boost: 21 is out of range; write 0 to 20"),
        ("[poll]\npin='yes'", ":6: poll.pin: is of type string; write true or false"),
        (
            "[poll]\nspin_us=2000000",
            ":6: poll.spin_us: 2000000 is out of range; write 0 to 1000000",
        ),
        (
            "[polling]",
            ":5: polling: is not a key; known here: limits, admin, rnic, pnet, local, \
             listener, poll, smc, dns, access_log, confine, drain_timeout, log",
        ),
        (
            "[admin]\nlisten='9180'",
            ":6: admin.listen: \"9180\" is no address to bind; write one such as \
             \"127.0.0.1:7001\"",
        ),
        (
            "[limits]\nconnections_max=0",
            ":6: limits.connections_max: 0 is out of range; write 1 to 16384",
        ),
    ];
    are_refused(&table);
}

/// What else has names and addresses must keep them.
#[test]
fn names_and_addresses_of_others_are_taken() {
    are_refused(&[
        (
            "[[listener]]\nname='b'\nbind='127.0.0.1:9180'\nupstream='x:1'",
            ":7: listener.b.bind: \"127.0.0.1:9180\" is taken by admin.listen; \
             change one of them",
        ),
        (
            "[local]\nsocket='/run/x'\n\
             [[listener]]\nname='local-accept'\nbind='127.0.0.1:3'\nupstream='x:1'",
            ":8: listener.name: \"local-accept\" is taken by the programs that come by \
             local.socket; change one of them",
        ),
    ]);
}

/// Zero means "never" in some places. Where it would mean "at once", it is a mistake.
#[test]
fn times_are_long_enough_to_be_meant() {
    are_refused(&[
        (
            "[smc]\nhandshake_timeout='0s'",
            ":6: smc.handshake_timeout: less than 100ms would end rendezvous that go well; \
             write \"10s\"",
        ),
        (
            "connect_timeout='0s'",
            ":5: listener.a.connect_timeout: less than 1ms would reset every connection; \
             write \"5s\"",
        ),
        (
            "check={timeout='0s'}",
            ":5: listener.a.check.timeout: less than 1ms would find every server down; \
             write \"1s\"",
        ),
        (
            "[smc]\ntest_link_timeout='0s'",
            ":6: smc.test_link_timeout: less than 10ms would give up links that are well; \
             write \"2s\"",
        ),
        (
            "[smc]\ntest_link_idle='9ms'",
            ":6: smc.test_link_idle: less than 10ms would do little but ask; write \"30s\"",
        ),
    ]);
}

/// The protocol's own numbers, wrong in each way that would only show with a peer.
// RFC 7609 A.2.3 #9: element size up to 512 KiB
#[test]
fn the_protocol_is_checked_too() {
    are_refused(&[
        (
            "[smc]\ntcp_keepalive={idle='1500ms'}",
            ":6: smc.tcp_keepalive.idle: \
             TCP counts whole seconds, up to 32767 of them; write \"5s\"",
        ),
        (
            "tcp_keepalive={interval='0s'}",
            ":5: listener.a.tcp_keepalive.interval: \
             TCP counts whole seconds, up to 32767 of them; write \"5s\"",
        ),
        (
            "tcp_keepalive={count=0}",
            ":5: listener.a.tcp_keepalive.count: 0 is out of range; write 1 to 127",
        ),
        (
            "[smc]\nrmbe_size=70000",
            ":6: smc.rmbe_size: 70000 is no power of two; write 65536 or 131072",
        ),
        (
            "[smc]\nrmbe_size=32768\nrmbe_size_min=65536",
            ":5: smc.rmbe_size_min: 65536 is more than rmbe_size, which is 32768; \
             write 32768 or less",
        ),
        ("[smc]\nrmbe_size=8192", ":6: smc.rmbe_size: 8192 is out of range; write 16384 to 524288"),
        ("[smc]\nrmbe_size=-1", ":6: smc.rmbe_size: -1 is out of range; write 16384 to 524288"),
        (
            "[smc]\nassume_peers=['10.0.0.0/8',\n'peer']",
            ":7: smc.assume_peers: \"peer\" is no address; write one such as \"10.8.0.2\" or \
             \"10.8.0.0/24\"",
        ),
        ("[smc]\neids=['']", ":6: smc.eids: an EID is empty; write a name such as \"FLEET-1\""),
        ("[smc]\neids=['-a']", ":6: smc.eids: \"-a\" begins with neither a letter nor a digit"),
        (
            "[smc]\neids=['a_b']",
            ":6: smc.eids: \"a_b\" may have letters, digits, \".\" and \"-\" only",
        ),
        (
            "[smc]\neids=['ok',\n'abcdefghabcdefghabcdefghabcdefghi']",
            ":7: smc.eids: \"abcdefghabcdefghabcdefghabcdefghi\" has more than 32 characters",
        ),
        ("[smc]\neids=['a','A']", ":6: smc.eids: \"A\" is listed twice"),
        ("[smc]\neids=['a','b','c','d','e']", ":6: smc.eids: \"e\" is one too many; at most 4 fit"),
        (
            "[smc]\ndefault_eid=false",
            ":5: smc.default_eid: SMC-Rv2 needs a community: list one in smc.eids, or write \
             versions = [1]",
        ),
        ("[smc]\nversions=[3]", ":6: smc.versions: 3 is out of range; write 1 to 2"),
        ("[smc]\nversions=[2,2]", ":6: smc.versions: 2 is listed twice"),
        (
            "[smc]\noption='assume'",
            ":5: smc.option: \"assume\" needs peers to assume; list them in smc.assume_peers",
        ),
    ]);
}

/// Linux takes an offer of version 1 over RoCEv2, and finds out seconds later that it cannot.
#[test]
fn version_1_is_spoken_where_it_fits_or_an_operator_says_so() {
    let parse = |smc: &str| Config::parse(&format!("{GOOD}[smc]\n{smc}"), "gate.toml").unwrap().smc;
    let spoken = |smc: &str| {
        let versions = parse(smc).versions;
        (versions.speaks_v1(&UDP), versions.speaks_v2())
    };
    assert_eq!(spoken(""), (false, true));
    assert_eq!(spoken("versions = [1]"), (true, false));
    assert_eq!(spoken("versions = [2]"), (false, true));
    assert_eq!(spoken("versions = [1, 2]"), (true, true));
    let named = parse("eids = ['fleet-1', 'SMCGATE', 'x.y']").eids;
    let named: Vec<_> = named.as_slice().iter().map(ToString::to_string).collect();
    assert_eq!(named, ["FLEET-1", "SMCGATE", "X.Y"], "as Linux has them");
    let private = parse("eids = ['fleet-1']\ndefault_eid = false").eids;
    let private: Vec<_> = private.as_slice().iter().map(ToString::to_string).collect();
    assert_eq!(private, ["FLEET-1"], "nobody else speaks with us");
    assert!(parse("versions = [1]\ndefault_eid = false").eids.as_slice().is_empty());
    let eids = |smc: &str| parse(smc).eids.as_slice().len();
    assert_eq!((eids(""), eids("eids = ['a', 'b', 'c', 'd']")), (1, 5), "ours is among them");
}

/// SMC-Rv2 has no way to name a port of RoCE v1. Whoever has only such ports need not say so; else
/// the other ports would lose SMC-Rv2 without a word.
#[test]
fn rnics_of_roce_v1_speak_smc_r_v1_only() {
    let rnic = |name: &str, keys: &str| format!("[[rnic]]\nname='{name}'\ndevice='{name}'\n{keys}");
    let v1 = rnic("p", "kind='roce-packet'\nversion=1\n");
    let parse = |more: &str| Config::parse(&format!("{GOOD}{v1}{more}"), "gate.toml");
    let alone = parse("").unwrap();
    assert!(alone.smc.versions.speaks_v1(&alone.rnics[0].kind));
    let beside = rnic("va", "");
    assert!(parse(&format!("{beside}[smc]\nversions=[1]")).is_ok());
    for more in [&beside[..], "[smc]\nversions=[2]", "[smc]\nversions=[1, 2]"] {
        let refused = parse(more).unwrap_err().to_string();
        assert!(refused.contains("rnic: version of p is 1, but RoCE v1 carries"), "{refused}");
    }
}

/// Each text, behind the good listener, is answered by its complaint.
fn are_refused(table: &[(&str, &str)]) {
    for (text, complaint) in table {
        assert_eq!(fault(&format!("{GOOD}{text}")), format!("gate.toml{complaint}"), "{text}");
    }
}

/// What the front page shows is what people copy.
#[test]
fn the_examples_of_the_readme_are_valid() {
    let readme = include_str!("../../../README.md");
    let examples: Vec<&str> =
        readme.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(examples.len() >= 4, "{}", examples.len());
    for example in examples {
        let alone = example.contains("[[listener]]");
        let text = if alone { example.to_owned() } else { format!("{example}{LISTENER}") };
        Config::parse(&text, "README.md").unwrap_or_else(|error| panic!("{error}\n{example}"));
    }
    // The list of defaults is one: writing it down changes nothing.
    let defaults = readme.split("### Every other key").nth(1).unwrap();
    let written = defaults.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let written = Config::parse(written, "README.md").unwrap();
    let listener = "[[listener]]\nname='web'\nbind='127.0.0.1:8080'\nupstream='web.example:80'";
    assert_eq!(written, Config::parse(listener, "README.md").unwrap());
}

const LISTENER: &str = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Config::load(Path::new("/nowhere/gate.toml")).unwrap_err();
    assert_eq!(error.line(), None);
    assert!(error.to_string().starts_with("/nowhere/gate.toml: cannot be read: No such file"));
    assert!(error.to_string().ends_with("; give its path with -c"));
    // A folder is there, and no path with -c would help.
    let error = Config::load(Path::new("/")).unwrap_err().to_string();
    assert!(error.contains("cannot be read: ") && !error.contains("-c"), "{error}");
}

/// A value of several lines, in quotes that were not closed where they should have been, made a
/// complaint of several lines: in a log they looked like lines of their own.
#[test]
fn a_complaint_is_one_line_whatever_the_file_contains() {
    let several_lines = "[admin]\nlisten = \"\"\"here\n2026 ERROR forged \\u001b[2J\"\"\"";
    let complaint = Config::parse(several_lines, "a\nb.toml").unwrap_err().to_string();
    assert!(complaint.starts_with("a\\nb.toml:2: admin.listen: \"here\\n2026"), "{complaint}");
    assert!(complaint.contains("forged \\u{1b}[2J\""), "{complaint}");
    let name = "[[listener]]\nname = \"a\u{2028}b\\u0085c\"";
    let complaint = Config::parse(name, "gate.toml").unwrap_err().to_string();
    assert!(complaint.contains(": listener.a\\u{2028}b\\u{85}c.bind: "), "{complaint}");
    let complaint = fault(&format!("log = \"grün\"\n{LISTENER}"));
    assert!(complaint.contains("\"grün\" is not known"), "letters stay readable: {complaint}");
}

fn fault(text: &str) -> String {
    let complaint = Config::parse(text, "gate.toml").expect_err(text).to_string();
    assert!(!complaint.contains('\n'), "{complaint}");
    complaint
}

/// On a device with many addresses only the operator knows which of them peers can reach.
#[test]
fn an_rnic_has_the_address_and_the_pollers_that_the_operator_chose() {
    let listener = "[[listener]]\nname='a'\nbind='[::]:7'\nupstream='[fd00::2]:8'\n";
    let parse = |keys: &str| {
        let text = format!("{listener}[[rnic]]\nname='r'\ndevice='va'\n{keys}");
        Config::parse(&text, "gate.toml").unwrap().rnics.remove(0)
    };
    let chosen = parse("address = 'fd00::7'\npollers = 2");
    let address = "fd00::7".parse().ok();
    assert_eq!((chosen.kind, chosen.pollers), (RnicKind::RoceUdp { address }, 2));
    let default = parse("");
    assert_eq!((default.kind, default.pollers), (UDP, 1));
}
