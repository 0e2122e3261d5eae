//! Describes LLC and CDC messages in words.
//!
//! SMC-Rv2 has its version in the high half of the LLC type. Its CDC messages are those of version
//! 1.

use smcr_proto::wire::Malformed;
use smcr_proto::wire::cdc::{self, Cdc, Cursor};
use smcr_proto::wire::llc::v2::{AddLinkV2, DeleteRkeyV2};
use smcr_proto::wire::llc::{self, Llc, LlcV2, RkeyOnLink, RkeyPair};

use super::words::Words;

/// The high half of an LLC type of SMC-Rv2.
const VERSION_2: u8 = 0x20;

/// The length in the message's header, if it looks like an SMC-R message.
pub(super) fn announced_bytes(message: &[u8]) -> Option<usize> {
    let &[kind, length, ..] = message else { return None };
    if !is_ours(kind) {
        return None;
    }
    if llc::v2::is_v2(message) {
        return llc::v2::announced_len(message).ok();
    }
    let length = usize::from(length);
    (length >= llc::LEN).then_some(length)
}

/// Describes the message of a SEND; `None` if it is not an SMC-R message.
pub(super) fn words(message: &[u8]) -> Option<Words> {
    let length = announced_bytes(message)?;
    if message.len() < length {
        return None;
    }
    let kind = *message.first()?;
    let bytes: [u8; llc::LEN] = *message.first_chunk()?;
    if kind == cdc::TYPE {
        return Some(match Cdc::decode(&bytes) {
            Ok(message) => cdc_words(&message),
            Err(malformed) => malformed_words("CDC".to_owned(), malformed, message),
        });
    }
    let name = format!("LLC {}", kind_name(kind));
    if llc::v2::is_v2(message) {
        return Some(match LlcV2::decode(&message[..length]) {
            Ok(message) => Words::new(name).with(llc_v2_words(&message)),
            // No message of version 2 has such a type.
            Err(Malformed::UnknownType(_)) => Words::new(name).bytes("hex", message),
            Err(malformed) => malformed_words(name, malformed, message),
        });
    }
    Some(match Llc::decode(&bytes) {
        Ok(message) => Words::new(name).with(llc_words(&message)),
        Err(malformed) => malformed_words(name, malformed, message),
    })
}

/// Whether this is a known message type, so that the length can be trusted.
fn is_ours(kind: u8) -> bool {
    kind == cdc::TYPE || matches!(kind & 0x0f, 1..=9) && matches!(kind >> 4, 0 | 2)
}

fn kind_name(kind: u8) -> String {
    let name = match kind & 0x0f {
        1 => "CONFIRM LINK",
        2 => "ADD LINK",
        3 => "ADD LINK CONTINUATION",
        4 => "DELETE LINK",
        5 => "REQUEST ADD LINK",
        6 => "CONFIRM RKEY",
        7 => "TEST LINK",
        8 => "CONFIRM RKEY CONTINUATION",
        9 => "DELETE RKEY",
        _ => return format!("type {kind:#04x}"),
    };
    let version = if kind & 0xf0 == VERSION_2 { " v2" } else { "" };
    format!("{name}{version}")
}

/// Describes a malformed message: the error and all its bytes.
pub(super) fn malformed_words(name: String, malformed: Malformed, bytes: &[u8]) -> Words {
    Words::new(name).text("malformed", format_args!("{malformed:?}")).bytes("hex", bytes)
}

fn cdc_words(message: &Cdc) -> Words {
    let cursor = |cursor: Cursor| format!("{}:{}", cursor.wrap, cursor.count);
    Words::new("CDC")
        .number("seq", message.sequence)
        .hex("token", message.token.0, 8)
        .text("producer", cursor(message.producer))
        .text("consumer", cursor(message.consumer))
        .flags(&[
            (message.writer_blocked, "B"),
            (message.urgent_pending, "P"),
            (message.urgent_present, "U"),
            (message.update_requested, "R"),
            (message.failover_validation, "F"),
            (message.sending_done, "D"),
            (message.connection_closed, "C"),
            (message.abnormal_close, "A"),
            (message.odd_stream, "S"),
            (message.keeps, "K"),
        ])
}

fn llc_words(message: &Llc) -> Words {
    match message {
        Llc::ConfirmLink(it) => Words::new("")
            .flags(&[(it.reply, "reply"), (it.no_eyecatcher, "no-eyecatcher")])
            .number("link", it.link.0)
            .hex("their-qp", it.qpn.0, 6)
            .text("gid", it.gid)
            .text("mac", it.mac)
            .hex("user-id", it.user_id.0, 8)
            .number("max-links", it.max_links),
        Llc::AddLink(it) => Words::new("")
            .flags(&[(it.reply, "reply"), (it.rejected, "rejected")])
            .number("reason", it.reason)
            .number("link", it.link.0)
            .hex("their-qp", it.qpn.0, 6)
            .text("gid", it.gid)
            .text("mac", it.mac)
            .number("mtu", it.mtu.bytes().unwrap_or(0))
            .number("first-psn", it.psn.0),
        Llc::AddLinkContinuation(it) => Words::new("")
            .flags(&[(it.reply, "reply")])
            .number("link", it.link.0)
            .number("remaining", it.remaining)
            .text("rkeys", pairs(it.pairs.into_iter().take(usize::from(it.remaining)))),
        Llc::DeleteLink(it) => Words::new("")
            .flags(&[(it.reply, "reply"), (it.all, "all"), (it.orderly, "orderly")])
            .number("link", it.link.0)
            .text("reason", format_args!("{:?}", it.reason)),
        Llc::ConfirmRkey(it) => Words::new("")
            .flags(&[(it.reply, "reply"), (it.negative, "negative"), (it.retry, "retry")])
            .hex("rkey", it.rkey.0, 8)
            .hex("address", it.address, 16)
            .number("other-links", it.other_links)
            .text("others", on_links(&it.others, it.other_links)),
        Llc::ConfirmRkeyContinuation(it) => Words::new("")
            .flags(&[(it.reply, "reply"), (it.negative, "negative")])
            .number("remaining", it.remaining)
            .text("others", on_links(&it.others, it.remaining)),
        Llc::DeleteRkey(it) => {
            let rkeys = it.rkeys.iter().take(usize::from(it.count));
            Words::new("")
                .flags(&[(it.reply, "reply"), (it.negative, "negative")])
                .hex("error-mask", it.error_mask, 2)
                .text("rkeys", list(rkeys.map(|rkey| format!("{:#010x}", rkey.0))))
        }
        Llc::TestLink(it) => {
            Words::new("").flags(&[(it.reply, "reply")]).bytes("user-data", &it.user_data)
        }
    }
}

/// Describes an LLC message of version 2. Those that are as in version 1 have the same words.
fn llc_v2_words(message: &LlcV2<'_>) -> Words {
    match *message {
        LlcV2::ConfirmLink(it) => {
            llc_words(&Llc::ConfirmLink(it.link)).number("max-conns", it.max_connections)
        }
        LlcV2::AddLink(it) => add_link_v2_words(&it),
        LlcV2::RequestAddLink(it) => Words::new("")
            .flags(&[(it.reply, "reply")])
            .text("gids", list(it.gids.iter().map(|gid| gid.to_string()))),
        LlcV2::DeleteLink(it) => llc_words(&Llc::DeleteLink(it)),
        LlcV2::ConfirmRkey(it) => llc_words(&Llc::ConfirmRkey(it)),
        LlcV2::ConfirmRkeyContinuation(it) => llc_words(&Llc::ConfirmRkeyContinuation(it)),
        LlcV2::DeleteRkey(DeleteRkeyV2::Request(rkeys)) => Words::new("")
            .flags(&[])
            .text("rkeys", list(rkeys.iter().map(|rkey| format!("{:#010x}", rkey.0)))),
        LlcV2::DeleteRkey(DeleteRkeyV2::Reply { negative, count, invalid }) => Words::new("")
            .flags(&[(true, "reply"), (negative, "negative")])
            .number("count", count)
            .number("unknown", invalid),
        LlcV2::TestLink(it) => llc_words(&Llc::TestLink(it)),
    }
}

fn add_link_v2_words(message: &AddLinkV2<'_>) -> Words {
    let words = llc_words(&Llc::AddLink(message.link));
    let Some(extension) = &message.extension else { return words };
    words
        .text("path", if extension.direct { "direct" } else { "gateway" })
        // What Linux calls it. `target` alone is the receiver of the message.
        .text("client-target-gid", extension.target)
        .text("rkeys", pairs(extension.rkeys.iter()))
}

/// RMBs on a new link: rkey on this link = rkey on the new link @ address there.
fn pairs(pairs: impl Iterator<Item = RkeyPair>) -> String {
    list(pairs.map(|pair| {
        format!("{:#010x}={:#010x}@{:#018x}", pair.existing.0, pair.new.0, pair.address)
    }))
}

/// The RMB on other links: link = rkey @ address.
fn on_links(others: &[RkeyOnLink], count: u8) -> String {
    list(
        others.iter().take(usize::from(count)).map(|other| {
            format!("{}={:#010x}@{:#018x}", other.link.0, other.rkey.0, other.address)
        }),
    )
}

/// Joins items with commas; `-` if there are none, so that each line has the same number of fields.
pub(super) fn list(items: impl Iterator<Item = String>) -> String {
    let items = items.collect::<Vec<_>>();
    if items.is_empty() { "-".to_owned() } else { items.join(",") }
}
