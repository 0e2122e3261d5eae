//! Linux at the other end: what two kernels said to each other, with us in the place of either.

use std::vec::Vec;

use super::*;
use crate::wire::llc::v2::LEN_MAX;

/// Link 3 of the capture.
const THIRD_LINK: LinkNumber = LinkNumber(3);

/// A queue pair of the capture, and what the RMBs are called there.
struct End {
    number: LinkNumber,
    ours: QpAddress,
    keys: [(RmbIndex, Rkey, u64); 2],
}

/// One side of a capture, played by our machine.
struct Actor {
    group: LinkGroup,
    now: Instant,
    /// Of further links.
    ends: Vec<End>,
    told: Vec<Action>,
}

impl Actor {
    fn new(group: LinkGroup) -> Self {
        Self { group, now: T0, ends: Vec::new(), told: Vec::new() }
    }

    fn hears(&mut self, on: LinkNumber, hex: &str) {
        self.group.handle_bytes(self.now, on, &bytes(hex)).unwrap();
    }

    /// What comes next on the wire; the caller's part is done as a kernel would do it.
    fn next(&mut self) -> (LinkNumber, Vec<u8>) {
        loop {
            let action = self.group.poll_action().expect("it says something");
            if let Action::Send(on, message) = action {
                return (on, self.group.encode(on, &message, &mut [0; LEN_MAX]).to_vec());
            } else if let Action::OpenLink { number, .. } = action {
                let end = self.ends.iter().find(|end| end.number == number);
                let End { ours, keys, .. } = end.expect("the capture has it");
                let user_id = LinkUserId(0x100 + u32::from(number.0));
                self.group.link_opened(self.now, number, *ours, user_id, keys);
            } else if let Action::ConnectLink { number, .. } = action {
                self.group.link_connected(self.now, number);
            } else {
                self.told.push(action);
            }
        }
    }

    fn says(&mut self, on: LinkNumber, hex: &str) {
        let (number, said) = self.next();
        assert_eq!(said, bytes(hex), "instead of {hex}");
        assert_eq!(number, on);
    }

    /// Nothing more is said.
    fn is_silent(&mut self) {
        let rest = drain(&mut self.group);
        assert!(!rest.iter().any(|action| matches!(action, Action::Send(..))), "{rest:?}");
        self.told.extend(rest);
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |digit: u8| u8::try_from(char::from(digit).to_digit(16).unwrap()).unwrap();
    let mut bytes: Vec<u8> =
        hex.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect();
    // Most messages are zero to the end.
    bytes.resize(bytes.len().max(44), 0);
    bytes
}

/// A port of the capture: 10.9.0.1 and 10.9.0.101 are the server's, 2 and 102 the client's.
fn end(host: u8, qpn: u32, psn: u32) -> QpAddress {
    let (gid, mtu) = (Gid::from_ipv4([10, 9, 0, host]), Mtu::B1024);
    let mac = MacAddress([0x52, 0x54, 0, 0, 0, host % 100 + 9 + host / 100 * 16]);
    QpAddress { gid, mac, qpn: Qpn(qpn), psn: Psn(psn), mtu }
}

fn linux_setup(ours: QpAddress, theirs: QpAddress) -> Setup {
    let version = Version::V2 { max_connections: 255, direct: true };
    Setup { version, ours, theirs, user_id: LinkUserId(0x101), max_links: 2, ..setup(1, 2) }
}

// linux-6.12-v2-failover.pcap
const CONFIRM_1: &str = "\
    212c000352540000000a00000000000000000000ffff0a090001000011010000010102ff";
const CONFIRM_1_REPLY: &str = "\
    212c008352540000000b00000000000000000000ffff0a090002000011010000010102ff";
const ADD_2: &str = "\
    2258000052540000001a000000000000000000000000ffff0a0900650000110203c74d6900000000\
    00000000800000000000000000000000ffff0a0900650000000000000000010000000390000003b9\
    ff1a8f6503f20000";
const ADD_2_REPLY: &str = "\
    2258008052540000001b000000000000000000000000ffff0a0900660000110203b40f9600000000\
    00000000800000000000000000000000ffff0a09006600000000000000000100000003a8000003b0\
    ff2e58dd43f00000";
const CONFIRM_2: &str = "\
    212c000352540000001a00000000000000000000ffff0a090065000011020000010202ff";
const CONFIRM_2_REPLY: &str = "\
    212c008352540000001b00000000000000000000ffff0a090066000011020000010202ff";
const KEYS_OF_SERVER: &str = "262c000001000004a9ff1a8f6504720000010000042dff1a8f6504720000";
const KEYS_OF_SERVER_REPLY: &str = "262c008001000004a9ff1a8f6504720000010000042dff1a8f6504720000";
const KEYS_OF_CLIENT: &str = "262c00000100000430ff2e58dd44de000001000004a1ff2e58dd44de0000";
const KEYS_OF_CLIENT_REPLY: &str = "262c00800100000430ff2e58dd44de000001000004a1ff2e58dd44de0000";
/// The DELETE LINK that both sides send: the client asks for the deletion by it.
const DELETE_1: &str = "242c0020010001";
/// Linux has forgotten the link by then, and says so, which nobody minds.
const DELETE_1_REPLY: &str = "242c00a0010010";
const ADD_3: &str = "\
    2268000052540000000a000000000000000000000000ffff0a090001000012030331773500000000\
    00000000800000000000000000000000ffff0a09000100000000000000000200000004a900000672\
    ff1a8f6504720000000003b9000007ebff1a8f6503f20000";
const ADD_3_REPLY: &str = "\
    2268008052540000001b000000000000000000000000ffff0a0900660000120303212df300000000\
    00000000800000000000000000000000ffff0a090066000000000000000002000000043000000630\
    ff2e58dd44de0000000003b0000007ebff2e58dd43f00000";
const CONFIRM_3: &str = "\
    212c000352540000000a00000000000000000000ffff0a090001000012030000010302ff";
const CONFIRM_3_REPLY: &str = "\
    212c008352540000001b00000000000000000000ffff0a090066000012030000010302ff";

/// The RMB of the first contact comes second in ADD LINK, as the newer one is told of first.
const FIRST_RMB: RmbIndex = RmbIndex(1);
const SECOND_RMB: RmbIndex = RmbIndex(0);

/// The machine announces another RMB, the peer takes it, and says nothing else.
fn announce(actor: &mut Actor, keys: [(LinkNumber, Rkey, u64); 2]) {
    actor.group.announce_rmb(actor.now, SECOND_RMB, &keys);
    let (on, mut message) = actor.next();
    assert_eq!((message[0], message[3]), (0x26, 0));
    message[3] = 0x80;
    actor.group.handle_bytes(actor.now, on, &message).unwrap();
    actor.is_silent();
    assert!(actor.told.contains(&Action::RmbConfirmed(SECOND_RMB)));
}

/// A server with two RNICs, like its client, and two RMBs.
fn two_links() -> Actor {
    let setup = linux_setup(end(1, 0x11, 0), end(2, 0x11, 0));
    let mut server = Actor::new(LinkGroup::new_server(T0, setup, LINK));
    let (first, second) = (0xff1a_8f65_03f2_0000, 0xff1a_8f65_0472_0000);
    let keys_on = |one, other| [(FIRST_RMB, Rkey(one), first), (SECOND_RMB, Rkey(other), second)];
    server.ends.push(End {
        number: SECOND_LINK,
        ours: end(101, 0x11, 0x00c7_4d69),
        keys: keys_on(0x3b9, 0x4a9),
    });
    server.ends.push(End {
        number: THIRD_LINK,
        ours: end(1, 0x12, 0x0031_7735),
        keys: keys_on(0x7eb, 0x672),
    });
    server.group.own_rmb(FIRST_RMB, &[(LINK, Rkey(0x390), first)]);
    server.group.learn_rkey(LINK, Rkey(0x3a8), 0xff2e_58dd_43f0_0000).unwrap();
    server.group.link_connected(T0, LINK);
    server.says(LINK, CONFIRM_1);
    server.hears(LINK, CONFIRM_1_REPLY);
    server.says(LINK, ADD_2);
    server.hears(LINK, ADD_2_REPLY);
    server.says(SECOND_LINK, CONFIRM_2);
    server.hears(SECOND_LINK, CONFIRM_2_REPLY);
    server.is_silent();
    assert_eq!(server.group.symmetry(), Symmetry::Symmetric);
    announce(&mut server, [(LINK, Rkey(0x42d), second), (SECOND_LINK, Rkey(0x4a9), second)]);
    server
}

/// Two RNICs on each side; the client loses the first of its own under traffic, and the RNIC that
/// is left serves two links. A Linux client takes any other message for none of this exchange,
/// drops it, and waits for seconds in which nobody else can connect.
#[test]
fn a_server_does_with_a_lost_rnic_what_linux_does() {
    let mut server = two_links();
    server.hears(SECOND_LINK, KEYS_OF_CLIENT);
    server.says(SECOND_LINK, KEYS_OF_CLIENT_REPLY);

    server.now = T0 + SECOND * 2;
    server.told.clear();
    server.hears(SECOND_LINK, DELETE_1);
    server.says(SECOND_LINK, DELETE_1);
    assert_eq!(server.told, [Action::LinkFailed(LINK, Cause::DeletedByPeer)], "at once");
    server.hears(SECOND_LINK, DELETE_1_REPLY);
    server.says(SECOND_LINK, ADD_3);
    server.hears(SECOND_LINK, ADD_3_REPLY);
    server.says(THIRD_LINK, CONFIRM_3);
    server.hears(THIRD_LINK, CONFIRM_3_REPLY);
    server.is_silent();
    assert_eq!(server.group.symmetry(), Symmetry::AsymmetricPeer);
    let third = Some((Rkey(0x630), 0xff2e_58dd_44de_0000));
    assert_eq!(server.group.peer_rmb(SECOND_LINK, Rkey(0x430), THIRD_LINK), third);
}

/// The same with us in the place of the client that lost its RNIC.
#[test]
fn a_client_does_with_a_lost_rnic_what_linux_does() {
    let setup = linux_setup(end(2, 0x11, 0), end(1, 0x11, 0));
    let mut client = Actor::new(LinkGroup::new_client(T0, setup));
    let (first, second) = (0xff2e_58dd_43f0_0000, 0xff2e_58dd_44de_0000);
    let keys_on = |one, other| [(FIRST_RMB, Rkey(one), first), (SECOND_RMB, Rkey(other), second)];
    client.ends.push(End {
        number: SECOND_LINK,
        ours: end(102, 0x11, 0x00b4_0f96),
        keys: keys_on(0x3b0, 0x430),
    });
    client.ends.push(End {
        number: THIRD_LINK,
        ours: end(102, 0x12, 0x0021_2df3),
        keys: keys_on(0x7eb, 0x630),
    });
    client.group.own_rmb(FIRST_RMB, &[(UNNUMBERED, Rkey(0x3a8), first)]);
    client.group.learn_rkey(UNNUMBERED, Rkey(0x390), 0xff1a_8f65_03f2_0000).unwrap();
    client.hears(UNNUMBERED, CONFIRM_1);
    client.says(LINK, CONFIRM_1_REPLY);
    client.hears(LINK, ADD_2);
    client.says(LINK, ADD_2_REPLY);
    client.hears(SECOND_LINK, CONFIRM_2);
    client.says(SECOND_LINK, CONFIRM_2_REPLY);
    client.is_silent();
    announce(&mut client, [(LINK, Rkey(0x4a1), second), (SECOND_LINK, Rkey(0x430), second)]);
    client.hears(SECOND_LINK, KEYS_OF_SERVER);
    client.says(SECOND_LINK, KEYS_OF_SERVER_REPLY);

    client.now = T0 + SECOND * 2;
    client.group.link_broke(client.now, LINK);
    let (on, asks) = client.next();
    assert_eq!((on, asks[4]), (SECOND_LINK, 1));
    assert_eq!(asks[5..9], [0, 1, 0, 0], "a lost path");
    client.hears(SECOND_LINK, DELETE_1);
    let (on, answers) = client.next();
    assert_eq!((on, &answers[..5]), (SECOND_LINK, &bytes(DELETE_1_REPLY)[..5]));
    client.hears(SECOND_LINK, ADD_3);
    client.says(SECOND_LINK, ADD_3_REPLY);
    client.hears(THIRD_LINK, CONFIRM_3);
    client.says(THIRD_LINK, CONFIRM_3_REPLY);
    client.is_silent();
    assert_eq!(client.group.symmetry(), Symmetry::AsymmetricLocal);
    let third = Some((Rkey(0x672), 0xff1a_8f65_0472_0000));
    assert_eq!(client.group.peer_rmb(SECOND_LINK, Rkey(0x4a9), THIRD_LINK), third);
}

/// A Linux client may need half a minute to delete a link that it has lost, and begins connections
/// meanwhile. If its CONFIRM RKEY is refused, it does not ask again, and the connection stays TCP.
/// A Linux server accepts it during DELETE LINK, and so do we. During ADD LINK it is refused,
/// because the client cannot know the rkeys for the new link yet.
#[test]
fn keys_are_confirmed_while_a_link_is_deleted() {
    let mut server = two_links();
    server.hears(SECOND_LINK, DELETE_1);
    server.says(SECOND_LINK, DELETE_1);
    server.hears(SECOND_LINK, "262c000000000004e7ff2d6affc407");
    server.says(SECOND_LINK, "262c008000000004e7ff2d6affc407");
    let told = Some((Rkey(0x4e7), 0xff2d_6aff_c407_0000));
    assert_eq!(server.group.peer_rmb(SECOND_LINK, Rkey(0x4e7), SECOND_LINK), told);
    server.hears(SECOND_LINK, DELETE_1_REPLY);
    server.says(SECOND_LINK, ADD_3);
    server.hears(SECOND_LINK, "262c000000000004e8ff2d6affc407");
    server.says(SECOND_LINK, "262c00b000000004e8ff2d6affc407");
}

/// Five connections, one after the other, as `linux-6.12-v2-scenarios.pcap` has them: with each of
/// them each kernel confirms a key, and deletes it at its end, though the key is the same again and
/// again. An answer that is late or negative costs the next connection its SMC-R.
#[test]
fn keys_come_and_go_with_the_connections_of_linux() {
    const DELETED: &str = "292c008001";
    let server = [
        ("292c0000010000000000035f", DELETED),
        ("262c0000000000035fff3aaaf7c4af", "262c0080000000035fff3aaaf7c4af"),
        ("292c0000010000000000035f", DELETED),
        ("262c0000000000035fff3aaaf7c4af", "262c0080000000035fff3aaaf7c4af"),
        ("262c00000000000685ff3aaaf7c4b1", "262c00800000000685ff3aaaf7c4b1"),
        ("292c0000010000000000035f", DELETED),
        ("292c00000100000000000685", DELETED),
        ("262c00000000000685ff3aaaf7c4b1", "262c00800000000685ff3aaaf7c4b1"),
        ("292c00000100000000000685", DELETED),
    ];
    let client = [
        ("292c000001000000000003cb", DELETED),
        ("262c000000000003cbff3401d204af", "262c008000000003cbff3401d204af"),
        ("292c000001000000000003cb", DELETED),
    ];
    for (role, asked, first) in
        [(Role::Client, &server[..], Rkey(0x35f)), (Role::Server, &client[..], Rkey(0x3cb))]
    {
        let mut actor = first_contact(role);
        actor.group.learn_rkey(LINK, first, 0).unwrap();
        for (request, reply) in asked {
            actor.hears(LINK, request);
            actor.says(LINK, reply);
            actor.is_silent();
        }
        assert_eq!(actor.group.peer_rmb(LINK, first, LINK), None, "nothing is left of them");
    }
}

/// The end of the same capture: the operator of the server stops it. Whoever uses the group hears
/// of it now, and not when a timer of TCP runs out.
#[test]
fn a_server_that_stops_is_answered_in_kind() {
    let mut client = first_contact(Role::Client);
    client.hears(LINK, "242c004000000200");
    let (on, said) = client.next();
    assert_eq!((on, said[0], said[3] & 0xc0), (LINK, 0x24, 0x40), "DELETE LINK, all");
    assert_eq!(said[5..9], [0, 3, 0, 0], "by a program");
    client.is_silent();
    assert!(client.told.contains(&Action::Terminate(Cause::DeletedByPeer)));
}

/// z/OS sends messages that Linux does not know, of types that may be ignored; and a message that
/// was repeated is answered twice. Neither may cost a link.
#[test]
fn what_linux_drops_is_dropped() {
    for message in ["8a2c00", "af2c00", "272c0080", "292c008001", "252c0080", "222c00c0"] {
        for role in [Role::Server, Role::Client] {
            let mut actor = first_contact(role);
            let before = actor.group.dropped();
            actor.hears(LINK, message);
            actor.is_silent();
            assert_eq!(actor.group.dropped(), before + 1, "{message}");
            assert!(actor.group.is_established(), "{message}");
        }
    }
}

/// A group of version 2 with one RNIC on either side, established.
fn first_contact(role: Role) -> Actor {
    let (server, client) = (end(1, 0x11, 0), end(2, 0x11, 0));
    let mut actor = match role {
        Role::Server => {
            let group = LinkGroup::new_server(T0, linux_setup(server, client), LINK);
            let mut actor = Actor::new(group);
            actor.ends.push(End {
                number: SECOND_LINK,
                ours: end(1, 0x12, 0x0005_33b1),
                keys: [(FIRST_RMB, Rkey(0), 0); 2],
            });
            actor.group.link_connected(T0, LINK);
            actor.says(LINK, CONFIRM_1);
            actor.hears(LINK, CONFIRM_1_REPLY);
            let (_, mut offer) = actor.next();
            assert_eq!((offer[0], offer[31], offer[32]), (0x22, 2, 3), "a real one");
            (offer[1], offer[3]) = (44, 0xc0);
            actor.group.handle_bytes(T0, LINK, &offer[..44]).unwrap();
            actor
        }
        Role::Client => {
            let mut actor = Actor::new(LinkGroup::new_client(T0, linux_setup(client, server)));
            actor.hears(UNNUMBERED, CONFIRM_1);
            actor.says(LINK, CONFIRM_1_REPLY);
            actor.hears(LINK, ADD_BY_ONE_RNIC);
            let opens = actor.group.poll_action();
            assert!(matches!(opens, Some(Action::OpenLink { number: SECOND_LINK, .. })));
            actor.group.link_refused(T0, SECOND_LINK, NoQueuePair::NoAlternatePath);
            actor.says(LINK, ADD_BY_ONE_RNIC_REJECTED);
            actor
        }
    };
    actor.is_silent();
    assert!(actor.group.is_established());
    actor
}

// linux-6.12-v2-scenarios.pcap
const ADD_BY_ONE_RNIC: &str = "\
    2258000052540000000a000000000000000000000000ffff0a09000100001202030533b100000000\
    00000000800000000000000000000000ffff0a090001000000000000000001000000035f0000059b\
    ff3aaaf7c4af0000";
const ADD_BY_ONE_RNIC_REJECTED: &str = "\
    222c00c052540000000a000000000000000000000000ffff0a09000100001202030533b1";
