//! The links of one poller: queue pairs, and what is about to be posted on them.

use std::collections::VecDeque;
use std::sync::Arc;

use smcr_proto::Instant;
use smcr_rnic::{QpId, Tag, Work};

use crate::handoff::{Activity, GroupId, LinkId, LlcBytes, Unheard};

/// One link.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) group: GroupId,
    pub(crate) qp: QpId,
    pub(crate) activity: Arc<Activity>,
    /// The queue pair is gone: nothing is posted any more.
    pub(crate) broken: bool,
    /// It has said so itself: everything it had received is taken in.
    pub(crate) emptied: bool,
    /// The queue pair is given up as soon as what the control thread said last is delivered, and
    /// then at the latest.
    pub(crate) retire_by: Option<Instant>,
    /// Its connections were given up; so is whoever comes late.
    pub(crate) failed: bool,
    /// Counts the LLC messages that the control thread has not come to yet.
    pub(crate) unheard: Unheard,
    /// LLC messages that wait for room in the send queue.
    pub(crate) llc: VecDeque<LlcBytes>,
    /// LLC messages waiting or on their way.
    pub(crate) llc_outstanding: u32,
    /// RDMA writes of this turn, of all connections.
    pub(crate) writes: Vec<Work>,
    /// Messages of this turn. They follow all writes, so that equal small packets stand together
    /// and travel in one system call.
    pub(crate) sends: Vec<Work>,
    /// Requests the queue pair still takes this turn.
    pub(crate) budget: usize,
}

/// All links of a poller. Few, so looking is walking.
#[derive(Debug, Default)]
pub(crate) struct Links {
    entries: Vec<Link>,
}

impl Links {
    pub(crate) fn add(
        &mut self,
        (id, group): (LinkId, GroupId),
        qp: QpId,
        activity: Arc<Activity>,
        budget: usize,
    ) {
        assert!(self.by_id(id).is_none(), "link ids are never reused");
        self.entries.push(Link {
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
            writes: Vec::with_capacity(budget),
            sends: Vec::with_capacity(budget),
            budget,
        });
    }

    pub(crate) fn by_id(&mut self, id: LinkId) -> Option<&mut Link> {
        self.entries.iter_mut().find(|link| link.id == id)
    }

    pub(crate) fn by_qp(&mut self, qp: QpId) -> Option<&mut Link> {
        self.entries.iter_mut().find(|link| link.qp == qp)
    }

    pub(crate) fn remove(&mut self, id: LinkId) -> Option<Link> {
        let index = self.entries.iter().position(|link| link.id == id)?;
        Some(self.entries.swap_remove(index))
    }

    /// Moves LLC messages to what is posted next, as far as there is room. Returns whether some
    /// must wait.
    pub(crate) fn send_llc(&mut self, tag: Tag) -> bool {
        let mut waits = false;
        for link in &mut self.entries {
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

    /// Those that are to be retired.
    pub(crate) fn retiring(&self) -> impl Iterator<Item = LinkId> {
        self.entries.iter().filter(|link| link.retire_by.is_some()).map(|link| link.id)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.entries.iter_mut()
    }
}
