//! `[smc]`: the protocol.

use std::time::Duration;

use smcr_proto::wire::clc::v2::Eids;

use super::error::ConfigError;
use super::section::{Section, Source};
use super::versions::{self, Versions};
use super::{Cidr, Peers, TcpKeepalive};

/// The protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Smc {
    /// How peers tell each other that they have SMC-R.
    pub option: OptionMode,
    /// Peers taken to have SMC-R where the option cannot be seen.
    pub assume_peers: Vec<Cidr>,
    /// Who may be a peer, where a listener does not say.
    pub peers: Peers,
    /// The communities we belong to, in which SMC-Rv2 is spoken: at most four, the preferred one
    /// first. [`Eid::SMCGATE`](smcr_proto::wire::clc::v2::Eid::SMCGATE) is among them unless
    /// `default_eid` says no.
    pub eids: Eids,
    /// Which versions of SMC-R are spoken.
    pub versions: Versions,
    /// Size of an RMBE in bytes: a power of two, 16 KiB to 512 KiB.
    pub rmbe_size: u32,
    /// The size in bytes that it shrinks to for newcomers while there are many connections.
    pub rmbe_size_min: u32,
    /// RMBEs per RMB, 1 to 255.
    pub rmb_elements: u32,
    /// Registered memory for sending, in bytes, per poller.
    pub send_pool: u64,
    /// How long a rendezvous may take, once both sockets are connected, before the connection
    /// stays TCP or is closed. The peer may take 6 s for each CLC message, at most.
    pub handshake_timeout: Duration,
    /// Silence on a link before TEST LINK asks whether the peer is there (RFC 4.5.3).
    pub test_link_idle: Duration,
    /// How long its answer may take before the link is down.
    pub test_link_timeout: Duration,
    /// How long a link group without connections stays where we are the server.
    pub idle_group_server: Duration,
    /// The same where we are the client; longer, so that the server's side goes first.
    pub idle_group_client: Duration,
    /// How many connections over SMC-R that are over are kept, so that the next ones to the same
    /// address need no rendezvous; zero: none.
    pub kept_max: usize,
    /// How long one is kept at most without being needed.
    pub kept_for: Duration,
    /// Whether RNICs in software may send several requests in one packet, and packets of other
    /// sizes than InfiniBand has, to those of other gateways.
    pub dense_packets: bool,
    /// Keepalive of the TCP connections that stand idle beside SMC-R, and of those that fell back.
    pub tcp_keepalive: TcpKeepalive,
}

/// How peers tell each other that they have SMC-R.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionMode {
    /// The TCP option where the host allows it, else the list of assumed peers, else plain TCP.
    Auto,
    /// The TCP option, or plain TCP.
    Ebpf,
    /// The list of assumed peers alone.
    Assume,
}

/// The table `[smc]`.
pub(super) fn read(source: Source<'_>, mut table: Section<'_>) -> Result<Smc, ConfigError> {
    let option = table.word("option", &OPTION_MODES, OptionMode::Auto)?;
    let mut assume_peers = Vec::new();
    for text in table.texts("assume_peers")? {
        assume_peers.push(text.value.parse().map_err(|why: String| text.error(source, why))?);
    }
    if option == OptionMode::Assume && assume_peers.is_empty() {
        let why = "\"assume\" needs peers to assume; list them in smc.assume_peers";
        return Err(table.error("option", why));
    }
    let peers = Peers::read(source, &mut table)?;
    let (eids, versions) = versions::read(source, &mut table)?;
    let most = rmbe_size("rmbe_size", source, &mut table)?.unwrap_or(RMBE_SIZE);
    let least = rmbe_size("rmbe_size_min", source, &mut table)?;
    if let Some(least) = least.filter(|least| *least > most) {
        let why = format!("{least} is more than rmbe_size, which is {most}; write {most} or less");
        return Err(table.error("rmbe_size_min", why));
    }
    let smc = Smc {
        option,
        assume_peers,
        peers,
        eids,
        versions,
        rmbe_size: most,
        rmbe_size_min: least.unwrap_or(RMBE_SIZE_LEAST),
        rmb_elements: table.count("rmb_elements", 1..256, 255)?,
        send_pool: table.number("send_pool", (1 << 20)..(1 << 40), 32 << 20)?.value,
        handshake_timeout: table.duration_from(
            "handshake_timeout",
            (Duration::from_millis(100), "end rendezvous that go well"),
            Duration::from_secs(10),
        )?,
        test_link_idle: table.duration_from(
            "test_link_idle",
            (Duration::from_millis(10), "do little but ask"),
            Duration::from_secs(30),
        )?,
        test_link_timeout: table.duration_from(
            "test_link_timeout",
            (Duration::from_millis(10), "give up links that are well"),
            Duration::from_secs(2),
        )?,
        idle_group_server: table.duration("idle_group_server", Duration::from_secs(600))?,
        idle_group_client: table.duration("idle_group_client", Duration::from_secs(610))?,
        kept_max: table.count("kept_max", 0..KEPT_MOST, 256)? as usize,
        kept_for: table.duration("kept_for", Duration::from_secs(2))?,
        dense_packets: table.boolean("dense_packets", true)?,
        tcp_keepalive: TcpKeepalive::read(&mut table)?,
    };
    table.finish()?;
    Ok(smc)
}

/// A size of RMB elements, if the table sets one.
pub(super) fn rmbe_size(
    key: &'static str,
    source: Source<'_>,
    table: &mut Section<'_>,
) -> Result<Option<u32>, ConfigError> {
    // RFC 7609 A.2.3 #9: element size up to 512 KiB
    let size = table.number(key, u64::from(RMBE_SIZE_LEAST)..RMBE_SIZE_MAX + 1, 0)?;
    if size.value > 0 && !size.value.is_power_of_two() {
        let below = 1_u64 << size.value.ilog2();
        let why = format!("{} is no power of two; write {below} or {}", size.value, 2 * below);
        return Err(size.error(source, why));
    }
    let bytes = u32::try_from(size.value).expect("RMBE_SIZE_MAX fits in 32 bits");
    Ok(Some(bytes).filter(|bytes| *bytes > 0))
}

/// Default size of an RMBE. A stream stalls for a round trip per element, so it moves half again as
/// fast as through 64 KiB; an element costs memory only as far as its connection ever filled it.
const RMBE_SIZE: u32 = 262_144;
/// Not all that there can be, or there would be no room for others.
const KEPT_MOST: u32 = 4_097;
/// RFC 7609 allows 16 KiB to 512 KiB in its notation (A.2.3).
const RMBE_SIZE_LEAST: u32 = 16_384;
const RMBE_SIZE_MAX: u64 = 524_288;
pub(super) const OPTION_MODES: [(&str, OptionMode); 3] =
    [("auto", OptionMode::Auto), ("ebpf", OptionMode::Ebpf), ("assume", OptionMode::Assume)];

#[cfg(test)]
mod tests {
    use crate::config::Config;

    /// Whoever wants a rendezvous for each connection says so with a zero.
    #[test]
    fn as_many_connections_are_kept_as_the_operator_wants() {
        for (text, expected) in [
            ("", Ok((256, 2))),
            ("kept_max = 0", Ok((0, 2))),
            ("kept_max = 4096\nkept_for = '9s'", Ok((4_096, 9))),
            ("kept_max = 4097", Err("kept_max")),
        ] {
            let listener = "[[listener]]\nname = 'a'\nbind = '[::]:7'\nupstream = 'x:8'\n";
            let config = Config::parse(&format!("{listener}[smc]\n{text}\n"), "gate.toml");
            let found = config.map(|it| (it.smc.kept_max, it.smc.kept_for.as_secs()));
            match expected {
                Ok(expected) => assert_eq!(found.unwrap(), expected),
                Err(key) => assert!(found.unwrap_err().to_string().contains(key)),
            }
        }
    }
}
