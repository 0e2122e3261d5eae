//! LLC and CDC messages in words.
//!
//! SMC-Rv2 carries its version in the high half of the LLC type. Most of its messages are laid out
//! as their elders and read as such; those that are not are named and shown in hexadecimal.

use smcr_proto::wire::Malformed;
use smcr_proto::wire::cdc::{self, Cdc, Cursor};
use smcr_proto::wire::llc::{self, Llc, RkeyOnLink, RkeyPair};

use super::words::Words;

/// The high half of a type of SMC-Rv2.
const VERSION_2: u8 = 0x20;

/// The length that a message says it has, if it looks like one of ours at all.
///
/// In SMC-Rv2 the length has 16 bits in the sender's byte order, whatever that is: one of the two
/// bytes is zero in all messages there are.
pub(super) fn announced_bytes(message: &[u8]) -> Option<usize> {
    let &[kind, high, low, ..] = message else { return None };
    let length = match kind & 0xf0 {
        VERSION_2 if high == 0 || low == 0 => usize::from(high.max(low)),
        _ => usize::from(high),
    };
    (length >= llc::LEN && is_ours(kind)).then_some(length)
}

/// One message of a SEND in words; `None` if it is not of SMC-R.
pub(super) fn words(message: &[u8]) -> Option<Words> {
    let length = announced_bytes(message)?;
    if message.len() < length {
        return None;
    }
    let kind = *message.first()?;
    let mut bytes: [u8; llc::LEN] = *message.first_chunk()?;
    if kind == cdc::TYPE {
        return Some(match Cdc::decode(&bytes) {
            Ok(message) => cdc_words(&message),
            Err(malformed) => malformed_words("CDC".to_owned(), malformed, message),
        });
    }
    let name = format!("LLC {}", kind_name(kind));
    if kind & 0xf0 == VERSION_2 {
        // DELETE RKEY has room for more keys here, which moves nothing if it stays as short.
        let is_short = length == llc::LEN;
        let as_elder = matches!(kind & 0x0f, 1 | 2 | 4 | 6 | 7) || kind & 0x0f == 9 && is_short;
        if !as_elder {
            return Some(Words::new(name).bytes("hex", message));
        }
        if bytes[1] == 0 {
            bytes[2] = 0; // half of the length; else it holds the reason of a rejection
        }
        bytes[0] &= 0x0f;
        bytes[1] = 44;
    }
    Some(match Llc::decode(&bytes) {
        Ok(elder) if length > llc::LEN => {
            let extension = &message[llc::LEN..length];
            Words::new(name).with(llc_words(&elder)).bytes("extension", extension)
        }
        Ok(message) => Words::new(name).with(llc_words(&message)),
        Err(malformed) => malformed_words(name, malformed, message),
    })
}

/// Whether a message of this type is worth believing its length.
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

/// What is wrong with a message, and all of it.
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
            .text("rkeys", pairs(&it.pairs, it.remaining)),
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

/// The RMBs of an ADD LINK CONTINUATION: key here = key there @ address there.
fn pairs(pairs: &[RkeyPair], remaining: u8) -> String {
    list(pairs.iter().take(usize::from(remaining)).map(|pair| {
        format!("{:#010x}={:#010x}@{:#018x}", pair.existing.0, pair.new.0, pair.address)
    }))
}

/// What an RMB is called on other links: link = key @ address.
fn on_links(others: &[RkeyOnLink], count: u8) -> String {
    list(
        others.iter().take(usize::from(count)).map(|other| {
            format!("{}={:#010x}@{:#018x}", other.link.0, other.rkey.0, other.address)
        }),
    )
}

/// Items with commas between them; `-` if there are none, so that fields stay countable.
fn list(items: impl Iterator<Item = String>) -> String {
    let items = items.collect::<Vec<_>>();
    if items.is_empty() { "-".to_owned() } else { items.join(",") }
}
