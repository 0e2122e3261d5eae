//! Which port serves a further link: none is parallel to another, and at most one is asymmetric
//! (RFC 2.2.1).

use super::LinkGroup;
use crate::vocabulary::{Gid, LinkNumber, MacAddress};

impl LinkGroup {
    /// Chooses one of our ports for the link that [`OpenLink`](super::Action::OpenLink) demands, by
    /// its place in `ports`: one that no link uses, else one whose link is about to be deleted,
    /// else one that makes the link asymmetric, where that is allowed. `None`: refuse the link.
    ///
    /// # Specification
    ///
    /// RFC 7609, 2.2.1 and 3.5.1.6.
    pub fn choose_port(
        &self,
        ports: impl Iterator<Item = (Gid, MacAddress)>,
        peer: Option<(Gid, MacAddress)>,
    ) -> Option<usize> {
        let symmetric = self.group_links().filter(|one| one.is_of_use() && !one.asymmetric).count();
        let has_asymmetric = self.group_links().any(|group_link| group_link.asymmetric);
        // A link that shares an RNIC is for groups that have no other spare link.
        let may_share = !has_asymmetric && symmetric < 2;
        let rank = |port| {
            let mut links =
                self.group_links().filter(|group_link| group_link.is_from(port)).peekable();
            let unused = links.peek().is_none();
            let stays = links.any(|group_link| !group_link.asymmetric && group_link.is_of_use());
            let shares = stays || peer.is_some_and(|peer| self.is_asymmetric(port, peer));
            let parallel = peer.is_some_and(|peer| self.is_parallel(port, peer));
            // RFC 7609 2.2.1 #2: no parallel links between same RNICs
            // RFC 7609 2.2.1 #4: become symmetric with two RNICs each
            // RFC 7609 3.5.1.6 #2: offer link over second RNIC
            // RFC 7609 3.5.1.6 #3: offer second link over single RNIC
            // RFC 7609 3.5.5.1.1 #2: never add second asymmetric link
            // RFC 7609 3.5.1.6.1 #2: reject ADD LINK for parallel link
            // RFC 7609 3.5.1.6.1 #3: accept same RNIC as asymmetric link
            // RFC 7609 3.5.1.6.1 #4: accept ADD LINK over another RNIC
            // RFC 7609 3.5.1.6.1 #5: answer second RNIC with second RNIC
            // RFC 7609 3.5.1.6.1 #6: single RNIC accepts an asymmetric link
            let allowed = !parallel && (may_share || !shares);
            allowed.then_some((shares, !unused))
        };
        let ranked = ports.enumerate().filter_map(|(place, port)| Some((rank(port)?, place)));
        ranked.min().map(|(_, place)| place)
    }

    pub(super) fn is_parallel(&self, ours: (Gid, MacAddress), theirs: (Gid, MacAddress)) -> bool {
        self.is_parallel_but(LinkNumber(0), ours, theirs)
    }

    pub(super) fn is_parallel_but(
        &self,
        except: LinkNumber,
        ours: (Gid, MacAddress),
        theirs: (Gid, MacAddress),
    ) -> bool {
        let others = self.group_links().filter(|group_link| group_link.number != except);
        // RFC 7609 2.2.1 #2: no parallel links between same RNICs
        { others }.any(|group_link| group_link.is_from(ours) && group_link.is_to(theirs))
    }

    pub(super) fn is_asymmetric(&self, ours: (Gid, MacAddress), theirs: (Gid, MacAddress)) -> bool {
        self.is_asymmetric_but(LinkNumber(0), ours, theirs)
    }

    /// Whether such a link would share an RNIC with a link that is not about to be deleted.
    pub(super) fn is_asymmetric_but(
        &self,
        except: LinkNumber,
        ours: (Gid, MacAddress),
        theirs: (Gid, MacAddress),
    ) -> bool {
        let others = self.group_links().filter(|group_link| {
            group_link.number != except && !group_link.asymmetric && group_link.is_of_use()
        });
        // RFC 7609 2.2.1 #3: support asymmetric links
        { others }.any(|group_link| group_link.is_from(ours) || group_link.is_to(theirs))
    }
}
