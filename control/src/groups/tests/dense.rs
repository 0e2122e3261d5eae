//! Which RNICs a group may have links over that sends dense packets.

use smcr_proto::handshake::{Agreement, AgreementV2};
use smcr_proto::wire::clc::v2::{Eid, Gids, RELEASE};

use super::links::links;
use super::rig::Pair;

/// After a reload a gateway may have an RNIC that takes no dense packets, while the peers of older
/// groups send them. (None of the simulator takes any.)
#[test]
fn a_group_with_dense_packets_has_no_further_link_over_an_rnic_without() {
    for (dense_packets, expected) in [(false, 2), (true, 1)] {
        let agreement = Agreement::V2(AgreementV2 {
            eid: Eid::SMCGATE,
            release: RELEASE,
            max_connections: 255,
            max_links: 8,
            many_streams: false,
            dense_packets,
            peer: None,
            gids: Gids::new(),
        });
        let mut pair = Pair::new(2, 2);
        let (client, server) = pair.first_contact_with(agreement);
        assert_eq!(links(&pair.client, client.group), expected);
        assert_eq!(links(&pair.server, server.group), expected);
    }
}
