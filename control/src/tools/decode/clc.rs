//! Describes CLC messages of both versions in words.

use smcr_proto::wire::clc::v2::{FirstContact, ProposalExtension};
use smcr_proto::wire::clc::{
    Decline, DeclineV2, Frame, Framer, Offer, OfferV2, Proposal, ProposalV2,
};

use super::messages::{list, malformed_words};
use super::words::Words;

/// Describes one complete CLC message.
pub(super) fn clc_words(message: &[u8]) -> Words {
    let (kind, version) = (message[4], message[7] >> 4);
    let name = match kind {
        1 => "CLC PROPOSAL",
        2 => "CLC ACCEPT",
        3 => "CLC CONFIRM",
        4 => "CLC DECLINE",
        _ => "CLC",
    };
    let head = Words::new(name).number("version", version);
    let length = message.len() as u64;
    let mut framer = Framer::new();
    if framer.feed(message) < message.len() {
        return head.text("malformed", "too long").bytes("hex", message);
    }
    match framer.next_frame() {
        Ok(Some(Frame::Proposal(proposal))) => {
            head.with(proposal_words(&ProposalV2 { v1: proposal, v2: None }, length))
        }
        Ok(Some(Frame::ProposalV2(proposal))) => head.with(proposal_words(&proposal, length)),
        Ok(Some(Frame::Accept(offer) | Frame::Confirm(offer))) => head.with(offer_words(&offer)),
        Ok(Some(Frame::AcceptV2(offer) | Frame::ConfirmV2(offer))) => {
            head.with(offer_v2_words(&offer)).number("length", length)
        }
        Ok(Some(Frame::Decline(decline))) => head.with(decline_words(&decline)),
        Ok(Some(Frame::DeclineV2(DeclineV2 { decline, os, information }))) => head
            .with(decline_words(&decline))
            .text("os", os)
            .text("information", list(information.iter().map(|word| format!("{word:#010x}")))),
        Ok(None) => head.text("malformed", "length").bytes("hex", message),
        Err(malformed) => malformed_words(name.to_owned(), malformed, message),
    }
}

fn proposal_words(ProposalV2 { v1, v2 }: &ProposalV2, length: u64) -> Words {
    let words = Words::new("")
        .flags(&[(v1.offers_smc_r_v1, "SMC-Rv1"), (v2.is_some(), "SMC-Rv2")])
        .text("peer", v1.peer_id)
        .number("length", length);
    let words = if v1.offers_smc_r_v1 { words.with(v1_words(v1)) } else { words };
    match v2 {
        Some(extension) => words.with(extension_words(extension)),
        None => words,
    }
}

fn v1_words(proposal: &Proposal) -> Words {
    let [a, b, c, d] = proposal.subnet.network;
    Words::new("")
        .text("gid", proposal.gid)
        .text("mac", proposal.mac)
        .text("subnet", format_args!("{a}.{b}.{c}.{d}/{}", proposal.subnet.prefix_bits))
        .number("ipv6-prefixes", proposal.prefix_count)
}

fn extension_words(extension: &ProposalExtension) -> Words {
    Words::new("")
        .text("v2-gid", extension.gid)
        .number("release", extension.release)
        .number("max-conns", extension.max_connections)
        .number("max-links", extension.max_links)
        .text("eids", list(extension.eids.as_slice().iter().map(ToString::to_string)))
}

fn offer_words(offer: &Offer) -> Words {
    Words::new("")
        .flags(&[(offer.first_contact, "first-contact")])
        .text("peer", offer.peer_id)
        .text("gid", offer.gid)
        .text("mac", offer.mac)
        .hex("qp", offer.qpn.0, 6)
        .hex("rkey", offer.rkey.0, 8)
        .number("rmbe", offer.rmbe_index)
        .number("rmbe-bytes", offer.rmbe_size.bytes())
        .hex("token", offer.alert_token.0, 8)
        .hex("rmb", offer.rmb_address, 16)
        .number("mtu", offer.mtu.bytes().unwrap_or(0))
        .number("psn", offer.psn.0)
}

fn offer_v2_words(message: &OfferV2) -> Words {
    let words = offer_words(&message.offer).text("eid", or_dash(message.eid.to_string()));
    let Some(first_contact) = &message.first_contact else { return words };
    let words = words.with(first_contact_words(first_contact));
    let gids = message.gids.as_slice();
    // Only a Confirm lists the ports.
    if gids.is_empty() {
        return words;
    }
    words.text("gids", list(gids.iter().map(ToString::to_string)))
}

fn first_contact_words(peer: &FirstContact) -> Words {
    let words = Words::new("")
        .text("path", if peer.direct { "direct" } else { "gateway" })
        .text("os", peer.os)
        .number("release", peer.release)
        .text("host", or_dash(peer.host_name.to_string()));
    match &peer.capabilities {
        Some(it) => words.number("max-conns", it.max_connections).number("max-links", it.max_links),
        None => words,
    }
}

fn decline_words(decline: &Decline) -> Words {
    Words::new("")
        .flags(&[(decline.out_of_sync, "out-of-sync")])
        .text("peer", decline.peer_id)
        .hex("code", decline.diagnosis.0, 8)
        .text("reason", format_args!("{:?}", decline.diagnosis))
}

/// Replaces an empty name by `-`, so that each line has the same number of fields.
fn or_dash(name: String) -> String {
    if name.is_empty() { "-".to_owned() } else { name }
}
