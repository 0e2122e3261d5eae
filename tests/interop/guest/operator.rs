//! What an operator sets and looks at, through SMC's two families of generic netlink.
//!
//! Numbers of commands and attributes are those of `linux/smc.h`.

use std::io;

use crate::netlink::{Attributes, Netlink, attribute, string};

const SMC: &str = "SMC_GEN_NETLINK";
const PNET: &str = "SMC_PNETID";

/// Commands of [`SMC`].
mod command {
    pub(super) const LINK_GROUPS: u8 = 2;
    pub(super) const LINKS: u8 = 3;
    pub(super) const STATISTICS: u8 = 7;
    pub(super) const FALLBACKS: u8 = 8;
    pub(super) const UEIDS: u8 = 9;
    pub(super) const ADD_UEID: u8 = 10;
    pub(super) const FLUSH_UEIDS: u8 = 12;
}

pub(crate) fn add_ueid(eid: &str) -> io::Result<()> {
    // The kernel wants all 32 bytes of an EID, blank padded.
    Netlink::generic(SMC)?.command(command::ADD_UEID, &string(1, &format!("{eid:32}")))
}

pub(crate) fn flush_ueids() -> io::Result<()> {
    Netlink::generic(SMC)?.command(command::FLUSH_UEIDS, &[])
}

pub(crate) fn ueids() -> io::Result<Vec<String>> {
    let items = Netlink::generic(SMC)?.list(command::UEIDS)?;
    Ok(items.iter().map(|item| Attributes(item).text(1)).collect())
}

pub(crate) fn add_pnet(pnet: &str, ethernet: &str, rdma: &str) -> io::Result<()> {
    const ADD: u8 = 2;
    const NAME: u16 = 1;
    const PORT: u8 = 1;
    let netlink = Netlink::generic(PNET)?;
    netlink.command(ADD, &[string(NAME, pnet), string(2, ethernet)].concat())?;
    netlink.command(ADD, &[string(NAME, pnet), string(3, rdma), attribute(4, &[PORT])].concat())
}

pub(crate) fn flush_pnet() -> io::Result<()> {
    const FLUSH: u8 = 4;
    Netlink::generic(PNET)?.command(FLUSH, &[])
}

/// The attribute with the state of a link, and the state of an empty place for a link.
const STATE: u16 = 10;
const UNUSED: u64 = 0;

/// Link groups, one line each, then links.
pub(crate) fn links() -> io::Result<Vec<String>> {
    const GROUP: u16 = 2;
    const LINK: u16 = 3;
    let netlink = Netlink::generic(SMC)?;
    let groups = netlink.list(command::LINK_GROUPS)?;
    let links = netlink.list(command::LINKS)?;
    let groups = groups.iter().map(|item| group_line(Attributes(item).inside(GROUP)));
    let links = links.iter().map(|item| Attributes(item).inside(LINK));
    // A group lists empty places for links, too.
    let links =
        links.filter(|link| link.number(STATE).is_some_and(|state| state != UNUSED)).map(link_line);
    Ok(groups.chain(links).collect())
}

fn group_line(group: Attributes<'_>) -> String {
    let number = |kind| group.number(kind).unwrap_or(0);
    let v2 = group.inside(7);
    let role = if number(2) == 0 { "client" } else { "server" };
    let kind = match number(3) {
        0 => "NONE",
        1 => "SINGLE",
        2 => "SYMMETRIC",
        3 => "ASYMMETRIC-PEER",
        4 => "ASYMMETRIC-LOCAL",
        _ => "UNKNOWN",
    };
    format!(
        "group {role} {kind} connections {} pnet '{}' version {} release {} eid '{}' peer '{}'",
        number(6),
        group.text(4),
        v2.number(0).unwrap_or(1),
        v2.number(1).unwrap_or(0),
        v2.text(3),
        v2.text(4),
    )
}

fn link_line(link: Attributes<'_>) -> String {
    let number = |kind| link.number(kind).unwrap_or(0);
    let state = match number(STATE) {
        1 => "INACTIVE",
        2 => "ACTIVATING",
        3 => "ACTIVE",
        _ => "UNKNOWN",
    };
    format!(
        "link {} {} {state} connections {} gid {} peer {}",
        number(1),
        link.text(2),
        number(6),
        link.text(4),
        link.text(5)
    )
}

/// How connections were set up: successes by side and version, failures, fallbacks by reason.
pub(crate) fn counts() -> io::Result<Vec<String>> {
    const STATISTICS: u16 = 7;
    const FALLBACKS: u16 = 8;
    let netlink = Netlink::generic(SMC)?;
    let mut lines = Vec::new();
    for item in netlink.list(command::STATISTICS)? {
        let all = Attributes(&item).inside(STATISTICS);
        let smcr = all.inside(2);
        let named = [("client-v1", 7), ("client-v2", 8), ("server-v1", 9), ("server-v2", 10)];
        let named = named.map(|(name, kind)| (name, smcr.number(kind)));
        let failed = [("client-errors", all.number(3)), ("server-errors", all.number(4))];
        for (name, count) in named.into_iter().chain(failed) {
            lines.push(format!("{name} {}", count.unwrap_or(0)));
        }
    }
    for item in netlink.list(command::FALLBACKS)? {
        let fallback = Attributes(&item).inside(FALLBACKS);
        let reason = fallback.number(4).unwrap_or(0);
        let count = fallback.number(5).unwrap_or(0);
        if reason != 0 && count != 0 {
            let side = if fallback.number(1) == Some(1) { "server" } else { "client" };
            lines.push(format!("fallback {side} 0x{reason:08x} {count}"));
        }
    }
    Ok(lines)
}
