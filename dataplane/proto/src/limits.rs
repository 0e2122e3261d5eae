//! Bounds and waiting times that both peers must agree on without saying so.
//!
//! Bounds are the RFC's. Waiting times are those of deployed Linux peers: waiting longer than the
//! peer does is useless, waiting shorter declines what would have worked.

use core::time::Duration;

use crate::vocabulary::RmbeSize;
use crate::wire::clc::proposal::PREFIXES_MAX;

/// The most links in a link group (RFC A.3.5).
// RFC 7609 A.3.5 #12: at most eight links per group
pub const LINKS_PER_GROUP_MAX: u8 = 8;

/// The most elements in an RMB: the index is a byte and begins at 1 (RFC A.2.3).
pub const ELEMENTS_PER_RMB_MAX: u8 = 255;

/// The most connections a Linux peer puts on one link group before it opens another.
pub const CONNECTIONS_PER_GROUP_MAX: u16 = 255;

/// The fewest connections that a peer of SMC-Rv2 may allow in a link group.
pub const CONNECTIONS_PER_GROUP_MIN: u8 = 16;

/// How many of our RMBs a Linux peer can store for one link group.
// RFC 7609 2.1 #2: at most 255 RMBs per peer
pub const RMBS_PER_GROUP_MAX: u16 = 255;

/// The most RMBs that we have in a link group. Each costs a hundred bytes for each peer, and a few
/// large ones hold as many elements as there are connections.
pub const OUR_RMBS_MAX: u8 = 64;

/// The smallest RMB element in bytes (RFC A.2.3).
pub const RMBE_BYTES_MIN: u32 = RmbeSize::from_notation(0).bytes();

/// The largest RMB element in bytes that the RFC allows (A.2.3). Newer peers may offer more.
pub const RMBE_BYTES_MAX: u32 = RmbeSize::from_notation(5).bytes();

/// The sequence number of the first CDC message of a connection (RFC A.4).
pub const CDC_SEQUENCE_FIRST: u16 = 1;

/// More CDC messages of one connection than any peer has under way, on a link and on the one that
/// it came from: a send queue holds 16 in Linux, or 2,048 if an operator wants so, as ours do.
pub const CDC_UNDER_WAY_MAX: u16 = 4_096;

/// How long either side waits for a CLC message.
pub const CLC_WAIT: Duration = Duration::from_secs(6);

/// How long the server waits for the answer to the CONFIRM LINK of a first contact. A Linux client
/// that has answered looks for a Decline until [`CLIENT_GOES_ON`], and no longer.
pub const CONFIRM_LINK_REPLY_WAIT: Duration = Duration::from_millis(1_700);

/// How long after CONFIRM LINK a server may still decline. A Linux client that has answered waits
/// for ADD LINK, then for a Decline, and then goes on with SMC-R: three seconds later, but two if
/// CONFIRM LINK is repeated meanwhile.
pub const CLIENT_GOES_ON: Duration = Duration::from_secs(2);

/// How long the client waits for the CONFIRM LINK of a first contact, counted from its Confirm. A
/// Linux server declines two seconds after its own, if its link goes down, and hands every Decline
/// that comes later to its application. A gateway declines after [`CONFIRM_LINK_REPLY_WAIT`], or
/// when its RNIC gives up, which is a little later than this, so that the two rarely cross.
pub const CONFIRM_LINK_WAIT: Duration = Duration::from_millis(1_300);

/// How long either side waits for CONFIRM LINK or its answer on a link that was added later.
pub const CONFIRM_ADDED_LINK_WAIT: Duration = Duration::from_secs(5);

/// How long the client waits for ADD LINK after first contact, and the server for the answer.
pub const ADD_LINK_WAIT: Duration = Duration::from_secs(2);

/// How long an answer about links may take once the group is at work. Nobody waits for it but the
/// exchange, and a peer that is gone is found out sooner by its links. A Linux peer frees a queue
/// pair before it answers anything else, and one that repeats to an RNIC which has gone is free
/// only when TEST LINK has failed on it.
pub const LINK_EXCHANGE_WAIT: Duration = Duration::from_secs(40);

/// How long either side waits for the answer to CONFIRM RKEY or DELETE RKEY, if another link can
/// take over. The only link has [`LINK_EXCHANGE_WAIT`].
pub const RKEY_REPLY_WAIT: Duration = Duration::from_secs(2);

/// How long after a failure a further link is tried again (RFC C.8).
pub const RETRY_LINK: Duration = Duration::from_secs(30);

/// How long a link may be silent before TEST LINK asks whether it lives.
pub const TEST_LINK_IDLE: Duration = Duration::from_secs(30);

/// How long the answer to TEST LINK may take. Traffic of any kind counts as the answer.
pub const TEST_LINK_REPLY_WAIT: Duration = Duration::from_secs(2);

/// How long the server keeps a link group without connections.
pub const IDLE_GROUP_SERVER: Duration = Duration::from_secs(600);

/// How long the client keeps a link group without connections: a little longer than the server,
/// so that the server, who owns the procedure, ends it.
pub const IDLE_GROUP_CLIENT: Duration = Duration::from_secs(610);

const _: () = assert!(RMBE_BYTES_MIN == 16 << 10 && RMBE_BYTES_MAX == 512 << 10);
const _: () = assert!(PREFIXES_MAX == 8, "RFC A.2.2");
const _: () = assert!(IDLE_GROUP_SERVER.as_secs() < IDLE_GROUP_CLIENT.as_secs());
const _: () = assert!(CONFIRM_LINK_WAIT.as_millis() < CONFIRM_LINK_REPLY_WAIT.as_millis());
const _: () = assert!(CONFIRM_LINK_REPLY_WAIT.as_millis() < CLIENT_GOES_ON.as_millis());
const _: () = assert!(CLIENT_GOES_ON.as_secs() < CLC_WAIT.as_secs());
const _: () = assert!(
    LINK_EXCHANGE_WAIT.as_secs() > TEST_LINK_IDLE.as_secs() + TEST_LINK_REPLY_WAIT.as_secs()
);
