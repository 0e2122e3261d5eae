//! The links that connections have been told to leave (RFC 4.6).
//!
//! ```text
//!   MoveConnections ─► leave ─► nothing outstanding ─► depart ─┬─► settle on the link
//!                  posts nothing                       Adopt ──┘   F, replay, CDC
//! ```
//!
//! On departure, bytes that the peer may not have are copied out of the send pool. So the memory of
//! a broken link is free at once, and the poller that writes the bytes again takes memory from its
//! own pool: two pollers that give each other connections never wait for each other's memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::names::LinkId;
use crate::relay::route::Route;

/// The links that were vacated: whoever comes to one later follows the others.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    vacated: BTreeMap<LinkId, Vacated>,
}

#[derive(Debug)]
struct Vacated {
    route: Arc<Route>,
    /// How many have been told to leave by this route and have not left yet: connections, and
    /// whoever is telling them.
    staying: u32,
    reported: bool,
}

impl Moves {
    /// Where the connections of a link have gone, if it was vacated.
    pub(crate) fn route_from(&self, link: LinkId) -> Option<Arc<Route>> {
        self.vacated.get(&link).map(|vacated| Arc::clone(&vacated.route))
    }

    /// Notes that a link is being vacated, in place of what was said of it before.
    pub(crate) fn note(&mut self, route: Arc<Route>) {
        let from = route.from;
        self.vacated.insert(from, Vacated { route, staying: 0, reported: false });
        if self.vacated.len() > VACATED_MAX {
            // Names of links grow. Nobody is sent to the one that is gone for longest.
            let mut links = self.vacated.iter();
            let oldest = links.find(|(link, vacated)| **link != from && vacated.staying == 0);
            if let Some(oldest) = oldest.map(|(link, _)| *link) {
                self.vacated.remove(&oldest);
            }
        }
    }

    /// Counts one who has been told to leave by this route.
    pub(crate) fn stays(&mut self, route: &Arc<Route>) {
        if let Some(vacated) = self.vacated_by(route) {
            vacated.staying += 1;
        }
    }

    /// One who had been told to leave by this route has left, or ended, or will go by another.
    pub(crate) fn left(&mut self, route: &Arc<Route>) {
        if let Some(vacated) = self.vacated_by(route) {
            vacated.staying -= 1;
        }
    }

    /// What is counted of this route; nothing if it was for some connections alone, or if another
    /// has taken its place.
    fn vacated_by(&mut self, route: &Arc<Route>) -> Option<&mut Vacated> {
        self.vacated.get_mut(&route.from).filter(|vacated| Arc::ptr_eq(&vacated.route, route))
    }

    /// Whether everybody has left this link, which is said once.
    pub(crate) fn is_news_that_all_left(&mut self, link: LinkId) -> bool {
        self.vacated.get_mut(&link).is_some_and(|vacated| {
            vacated.staying == 0 && !std::mem::replace(&mut vacated.reported, true)
        })
    }
}

/// Vacated links that are remembered: those of a thousand peers whose RNIC has failed. Nobody is
/// sent to a link that is gone for long.
const VACATED_MAX: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    fn route(from: u32) -> Arc<Route> {
        Arc::new(Route::new(LinkId(from), LinkId(from + 1), 0, Vec::new()))
    }

    /// A queue pair that is given up too early takes what its last connections had to say with it;
    /// one that is never given up is never replaced.
    #[test]
    fn a_link_is_vacated_when_the_last_has_left_and_once() {
        let (mut moves, first) = (Moves::default(), route(1));
        moves.note(Arc::clone(&first));
        for _ in 0..2 {
            moves.stays(&first);
        }
        assert!(!moves.is_news_that_all_left(LinkId(1)));
        // A move of a single connection does not count towards vacating the link.
        let alone = route(1);
        moves.stays(&alone);
        moves.left(&alone);
        moves.left(&first);
        assert!(!moves.is_news_that_all_left(LinkId(1)));
        moves.left(&first);
        assert!(moves.is_news_that_all_left(LinkId(1)));
        assert!(!moves.is_news_that_all_left(LinkId(1)) && !moves.is_news_that_all_left(LinkId(2)));
        assert_eq!(moves.route_from(LinkId(1)).map(|route| route.to), Some(LinkId(2)));
        assert!(moves.route_from(LinkId(2)).is_none());
    }

    #[test]
    fn only_so_many_are_remembered() {
        let mut moves = Moves::default();
        let many = u32::try_from(VACATED_MAX).unwrap() + 5;
        (0..many).for_each(|link| moves.note(route(link)));
        let remembered = (0..many).filter(|link| moves.route_from(LinkId(*link)).is_some());
        assert_eq!(remembered.count(), VACATED_MAX);
        assert!(moves.route_from(LinkId(many - 1)).is_some());
    }
}
