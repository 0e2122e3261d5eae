//! The links of one poller: queue pairs, and what is about to be posted on them.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use smcr_memory::{Lease, SendPool};
use smcr_proto::Instant;
use smcr_rnic::{QpId, Tag, Work};

use crate::limits::{LINKS_PER_POLLER_MAX, WORK_PER_FLUSH};
use crate::names::{Activity, GroupId, LinkId, LlcBytes, Unheard};
use crate::waiting::Waiting;

/// One link.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) group: GroupId,
    pub(crate) qp: QpId,
    pub(crate) activity: Arc<Activity>,
    /// The queue pair broke, or is to be given up: its connections post nothing any more.
    pub(crate) broken: bool,
    /// The queue pair has reported that it broke, so everything that it received is taken in.
    pub(crate) emptied: bool,
    /// The link is to be retired: as soon as its last LLC messages are delivered, and at this time
    /// at the latest.
    pub(crate) retire_by: Option<Instant>,
    /// Its connections are lost, and so is one that comes to it late.
    pub(crate) failed: bool,
    /// Counts the LLC messages that the control thread has not come to yet.
    pub(crate) unheard: Unheard,
    /// LLC messages that wait for room in the send queue.
    pub(crate) llc: VecDeque<LlcBytes>,
    /// LLC messages that wait or are on their way.
    pub(crate) llc_outstanding: u32,
    /// RDMA writes of this turn, of all connections.
    pub(crate) writes: Vec<Work>,
    /// Messages of this turn. They follow all writes, so that equal small packets stand together
    /// and travel in one system call.
    pub(crate) sends: Vec<Work>,
    /// Work requests that the queue pair still takes this turn.
    pub(crate) budget: usize,
    /// New data in work requests that have not completed.
    lent: Lent,
    /// Who waits until the link takes more new data.
    waiting: Waiting,
    /// Work requests that the queue pair takes while none is under way.
    depth: usize,
    /// It stands in the list of busy links.
    busy: bool,
}

/// All links of a poller. There may be thousands, of which few are busy; a turn looks at those
/// alone.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// A link keeps its place as long as it lives; then another link may get the place.
    slots: Vec<Option<Link>>,
    free: Vec<usize>,
    by_id: Index<LinkId>,
    by_qp: Index<QpId>,
    /// The places of links that were looked up since the last flush or have unfinished work, each
    /// once.
    busy: Vec<usize>,
    /// How many wait, for any link.
    waiting: usize,
    /// Which of the busy links is the first whose waiting connections go on in this turn.
    first: usize,
}

/// Finds places by names. Peers do not choose these names, so collisions need no protection.
type Index<T> = HashMap<T, usize, BuildHasherDefault<Spread>>;

impl Links {
    pub(crate) fn add(
        &mut self,
        (id, group): (LinkId, GroupId),
        qp: QpId,
        activity: Arc<Activity>,
        budget: usize,
    ) {
        assert!(self.by_id.len() < LINKS_PER_POLLER_MAX, "the control thread opens no more");
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let before = self.by_id.insert(id, at);
        assert!(before.is_none(), "link ids are never reused");
        let before = self.by_qp.insert(qp, at);
        assert!(before.is_none(), "a queue pair is adopted once");
        self.slots[at] = Some(Link {
            id,
            group,
            qp,
            activity,
            broken: false,
            emptied: false,
            retire_by: None,
            failed: false,
            unheard: Unheard::default(),
            llc: VecDeque::new(),
            llc_outstanding: 0,
            // These get memory when the link is used: most of a thousand links are idle.
            writes: Vec::new(),
            sends: Vec::new(),
            budget,
            lent: Lent::default(),
            waiting: Waiting::default(),
            depth: budget,
            busy: false,
        });
    }

    /// The link with that name. It counts as busy from now on.
    pub(crate) fn by_id(&mut self, id: LinkId) -> Option<&mut Link> {
        let at = *self.by_id.get(&id)?;
        let link = self.slots[at].as_mut().expect("the index names what is there");
        if !std::mem::replace(&mut link.busy, true) {
            self.busy.push(at);
        }
        Some(link)
    }

    /// The link of that queue pair.
    pub(crate) fn by_qp(&mut self, qp: QpId) -> Option<&mut Link> {
        let at = *self.by_qp.get(&qp)?;
        self.slots[at].as_mut()
    }

    pub(crate) fn remove(&mut self, id: LinkId) -> Option<Link> {
        let at = self.by_id.remove(&id)?;
        let link = self.slots[at].take().expect("the index names what is there");
        self.by_qp.remove(&link.qp);
        self.busy.retain(|busy| *busy != at);
        self.waiting -= link.waiting.len();
        self.free.push(at);
        Some(link)
    }

    /// Has a connection wait until the link takes more.
    ///
    /// # Panics
    ///
    /// If there is no such link.
    pub(crate) fn wait_for(&mut self, id: LinkId, slot: u16) {
        let link = self.by_id(id).expect("who waits has found it");
        let is_new = link.waiting.push(slot);
        self.waiting += usize::from(is_new);
    }

    /// The connection that has waited longest for a link that takes more, and the link. `passed`
    /// counts the busy links that have nothing more in this turn. Each turn begins with another
    /// one, so that the same link does not always have what little the pool has.
    pub(crate) fn next_waiting(
        &mut self,
        passed: &mut usize,
        pool: &SendPool,
    ) -> Option<(LinkId, u16)> {
        while self.waiting > 0 && *passed < self.busy.len() {
            let at = self.busy[self.first.wrapping_add(*passed) % self.busy.len()];
            let link = self.slots[at].as_mut().expect("what is busy is there");
            if link.obstacle(pool).is_none()
                && let Some(slot) = link.waiting.pop()
            {
                self.waiting -= 1;
                return Some((link.id, slot));
            }
            *passed += 1;
        }
        None
    }

    /// Whether somebody waits for a link that takes more.
    pub(crate) fn may_go_on(&self, pool: &SendPool) -> bool {
        let mut links = self.busy.iter().filter_map(|at| self.slots[*at].as_ref());
        self.waiting > 0
            && links.any(|link| !link.waiting.is_empty() && link.obstacle(pool).is_none())
    }

    /// Moves LLC messages to what is posted next, as far as there is room. Returns whether some
    /// must wait.
    pub(crate) fn send_llc(&mut self, tag: Tag) -> bool {
        let mut waits = false;
        for link in self.busy() {
            while link.budget > 0
                && let Some(message) = link.llc.pop_front()
            {
                link.budget -= 1;
                link.sends.push(match message {
                    LlcBytes::Short(message) => Work::Send { message, tag },
                    LlcBytes::Long(message) => Work::SendLong { message, tag },
                });
            }
            waits |= !link.llc.is_empty();
        }
        waits
    }

    /// Links that are to be retired.
    pub(crate) fn retiring(&self) -> impl Iterator<Item = LinkId> {
        let busy = self.busy.iter().filter_map(|at| self.slots[*at].as_ref());
        busy.filter(|link| link.retire_by.is_some()).map(|link| link.id)
    }

    /// The busy links, and perhaps some others.
    pub(crate) fn busy(&mut self) -> impl Iterator<Item = &mut Link> {
        let Self { busy, slots, .. } = self;
        let mut slots: &mut [Option<Link>] = slots;
        let mut base = 0;
        // In the order of their places, so that each can be lent beside the others.
        busy.sort_unstable();
        busy.iter().map(move |at| {
            let (before, rest) = std::mem::take(&mut slots).split_at_mut(at - base + 1);
            (slots, base) = (rest, at + 1);
            let link = before.last_mut().expect("it has at least one");
            link.as_mut().expect("what is busy is there")
        })
    }

    /// Takes links without unfinished work off the list of busy ones, at the end of a turn.
    pub(crate) fn rest(&mut self) {
        self.first = self.first.wrapping_add(1);
        let slots = &mut self.slots;
        self.busy.retain(|at| {
            let link = slots[*at].as_mut().expect("what is busy is there");
            link.busy = !link.is_done();
            link.busy
        });
    }
}

impl Link {
    /// Whether a turn need not look at it.
    fn is_done(&self) -> bool {
        let idle = self.llc.is_empty() && self.writes.is_empty() && self.sends.is_empty();
        let served = self.budget == self.depth && self.waiting.is_empty();
        idle && served && self.retire_by.is_none()
    }

    /// A work request with new data is posted.
    pub(crate) fn lend(&mut self, lease: &Lease) {
        self.lent.add(lease.chunk(), lease.len());
    }

    /// One that was posted has completed.
    pub(crate) fn came_home(&mut self, lease: &Lease) {
        self.lent.remove(lease.chunk(), lease.len());
    }

    /// What keeps new data off the link for now, if anything does. Of the `pool`, it has a share.
    pub(crate) fn obstacle(&self, pool: &SendPool) -> Option<Obstacle> {
        if self.budget < WORK_PER_FLUSH {
            Some(Obstacle::Queue)
        } else if !pool.is_fair(self.lent.bytes, self.lent.chunks.len()) {
            Some(Obstacle::Share)
        } else if !pool.has_room() {
            Some(Obstacle::Pool)
        } else {
            None
        }
    }
}

/// What a link has borrowed from the send pool. A few bytes keep the whole chunk in which they are,
/// so chunks count as well.
#[derive(Debug, Default)]
struct Lent {
    bytes: u64,
    /// The chunks in which bytes are, and how many leases are in each, in the order in which they
    /// were lent. They come home in that order, too, and the pool fills one chunk after another, so
    /// each stands here once.
    chunks: VecDeque<(u32, u32)>,
}

impl Lent {
    fn add(&mut self, chunk: u32, bytes: u32) {
        self.bytes += u64::from(bytes);
        match self.chunks.back_mut() {
            Some((last, leases)) if *last == chunk => *leases += 1,
            Some(_) | None => self.chunks.push_back((chunk, 1)),
        }
    }

    fn remove(&mut self, chunk: u32, bytes: u32) {
        self.bytes -= u64::from(bytes);
        // Whatever the order, it is the first in nearly all cases.
        let at = self.chunks.iter().position(|(one, _)| *one == chunk).expect("it was lent");
        let leases = &mut self.chunks[at].1;
        *leases -= 1;
        if *leases == 0 {
            self.chunks.remove(at);
        }
    }
}

/// What keeps new data off a link for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The send queue has no room.
    Queue,
    /// The link has its share of the send pool.
    Share,
    /// The send pool has no room.
    Pool,
}

/// Spreads the 32 bits of a name over a table by a multiplication.
#[derive(Clone, Copy, Debug, Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

#[cfg(test)]
mod tests {
    use smcr_memory::Region;

    use super::*;

    const DEPTH: usize = 8;

    fn links(count: u32) -> Links {
        let mut links = Links::default();
        for number in 0..count {
            let names = (LinkId(1_000 + number), GroupId(number + 1));
            links.add(names, QpId(number), Arc::default(), DEPTH);
        }
        links
    }

    /// With a thousand peers, of which one talks, a turn costs what it costs with one.
    #[test]
    fn a_turn_looks_at_busy_links_only() {
        let mut links = links(1_000);
        assert_eq!(links.busy().count(), 0);
        for number in [999, 7, 500, 7] {
            links.by_id(LinkId(1_000 + number)).unwrap().budget -= 1;
        }
        let busy: Vec<_> = links.busy().map(|link| link.id.0).collect();
        assert_eq!(busy, [1_007, 1_500, 1_999], "each once");
        links.rest();
        assert_eq!(links.busy().count(), 3, "requests are under way");
        links.busy().for_each(|link| link.budget = DEPTH);
        links.by_id(LinkId(1_500)).unwrap().retire_by = Some(Instant(1));
        links.rest();
        assert_eq!(links.retiring().collect::<Vec<_>>(), [LinkId(1_500)]);
        assert_eq!(links.busy().count(), 1, "it is to go");
    }

    /// Of all that wait, only those are looked at for whom there is room, in the order in which
    /// they came to their link. A link for which somebody waits is not forgotten.
    #[test]
    fn those_who_wait_go_on_as_far_as_there_is_room() {
        let mut pool = SendPool::new(Region::new(65_536).unwrap(), 4_096);
        let mut links = links(3);
        for (link, slot) in [(1_002, 7), (1_000, 8), (1_002, 9)] {
            links.wait_for(LinkId(link), slot);
            links.by_id(LinkId(link)).unwrap().budget = 0;
        }
        links
            .busy()
            .for_each(|link| link.budget = if link.id == LinkId(1_002) { DEPTH } else { 2 });
        links.rest();
        assert!(links.may_go_on(&pool));
        let mut from = 0;
        let gone: Vec<_> = std::iter::from_fn(|| links.next_waiting(&mut from, &pool)).collect();
        assert_eq!(gone, [(LinkId(1_002), 7), (LinkId(1_002), 9)]);
        assert!(!links.may_go_on(&pool));
        links.rest();
        assert_eq!(links.busy().map(|link| link.id).collect::<Vec<_>>(), [LinkId(1_000)]);
        links.busy().for_each(|link| link.budget = DEPTH);
        let leases: Vec<_> =
            (0..16).map(|_| pool.fill(4_096, |room| Ok::<_, ()>(room.len())).unwrap()).collect();
        let obstacle = |links: &mut Links, lent, pool: &SendPool| {
            let link = links.by_id(LinkId(1_000)).unwrap();
            link.lent.bytes = lent;
            link.obstacle(pool)
        };
        assert_eq!(obstacle(&mut links, 1, &pool), Some(Obstacle::Share));
        assert_eq!(obstacle(&mut links, 0, &pool), Some(Obstacle::Pool));
        assert!(!links.may_go_on(&pool) && links.next_waiting(&mut 0, &pool).is_none());
        leases.into_iter().for_each(|lease| pool.take_back(lease.unwrap().unwrap()));
        assert_eq!(links.next_waiting(&mut 0, &pool), Some((LinkId(1_000), 8)));
        links.wait_for(LinkId(1_000), 8);
        links.remove(LinkId(1_000)).unwrap();
        assert!(!links.may_go_on(&pool) && links.next_waiting(&mut 0, &pool).is_none());
    }

    /// A link that takes in nothing, beside one that carries much: each of its small writes stands
    /// in another chunk, and keeps the whole of it. It had all chunks, and nobody sent anything.
    #[test]
    fn small_writes_that_do_not_come_home_leave_chunks_for_others() {
        let mut pool = SendPool::new(Region::new(65_536).unwrap(), 4_096);
        let mut links = links(2);
        let mut kept = Vec::new();
        let lend = |links: &mut Links, pool: &mut SendPool, id, len: u32| {
            let link = links.by_id(LinkId(id)).unwrap();
            let obstacle = link.obstacle(pool);
            if obstacle.is_some() {
                return Err(obstacle);
            }
            let lease = pool.fill(len, |room| Ok::<_, ()>(room.len())).unwrap();
            let lease = lease.unwrap().unwrap();
            link.lend(&lease);
            Ok(lease)
        };
        let (mut blocked, mut carried) = (None, 0);
        for _ in 0..100 {
            match lend(&mut links, &mut pool, 1_000, 64) {
                Ok(lease) => kept.push(lease),
                Err(obstacle) => blocked = obstacle,
            }
            let lease = lend(&mut links, &mut pool, 1_001, 4_096).expect("it keeps nothing");
            let link = links.by_id(LinkId(1_001)).unwrap();
            link.came_home(&lease);
            pool.take_back(lease);
            carried += 1;
        }
        assert_eq!((blocked, carried), (Some(Obstacle::Share), 100));
        assert!((7..=9).contains(&kept.len()), "{} chunks", kept.len());
        let link = links.by_id(LinkId(1_000)).unwrap();
        for lease in kept {
            link.came_home(&lease);
            pool.take_back(lease);
        }
        assert_eq!(link.obstacle(&pool), None);
    }

    /// Where the pool has little, the same link does not always come first.
    #[test]
    fn links_take_turns_in_whose_connections_go_on_first() {
        let pool = SendPool::new(Region::new(65_536).unwrap(), 4_096);
        let mut links = links(2);
        for slot in 0..4 {
            links.wait_for(LinkId(1_000), slot);
            links.wait_for(LinkId(1_001), slot);
        }
        let mut next_turn = || {
            let (link, _) = links.next_waiting(&mut 0, &pool).unwrap();
            links.rest();
            link.0
        };
        assert_eq!([(); 4].map(|()| next_turn()), [1_000, 1_001, 1_000, 1_001]);
    }

    /// A place that is used again must not be taken for the link that had it before.
    #[test]
    fn a_link_that_is_gone_is_not_found() {
        let mut links = links(3);
        links.by_id(LinkId(1_001)).unwrap();
        assert_eq!(links.remove(LinkId(1_001)).map(|link| link.qp), Some(QpId(1)));
        assert!(links.by_id(LinkId(1_001)).is_none() && links.by_qp(QpId(1)).is_none());
        assert!(links.remove(LinkId(1_001)).is_none());
        assert_eq!(links.busy().count(), 0);
        links.add((LinkId(2_000), GroupId(9)), QpId(77), Arc::default(), DEPTH);
        assert_eq!(links.by_qp(QpId(77)).map(|link| link.id), Some(LinkId(2_000)));
        assert_eq!(links.by_qp(QpId(2)).map(|link| link.id), Some(LinkId(1_002)));
    }
}
