//! Reliable-connected queue pairs: from their creation to their end, and their receive queues.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::{fmt, io, mem, ptr};

use std::ptr::NonNull;

use rdma_core_sys::*;

use crate::completion::{CompletionQueue, RECEIVE, identifier};
use crate::context::last_error;
use crate::memory::{MemoryRegion, ProtectionDomain};
use crate::{check, has_ended};

/// Length in bytes of the messages that are sent without memory of their own.
pub const MESSAGE_LEN: usize = 44;

/// The sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The most requests in its send queue.
    pub sends: u32,
    /// The most messages that it has buffers for.
    pub receives: u32,
    /// Length in bytes of the longest message that it accepts.
    pub receive_len: u32,
    /// Distance in bytes of two receive buffers. The first begins where its memory begins.
    pub stride: u32,
    /// The most bytes that a request may carry itself: the first of these that the device grants.
    pub inline: &'static [u32],
}

/// Whom a queue pair is connected to, and how.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The peer's GID.
    pub gid: [u8; 16],
    /// The peer's queue pair number.
    pub number: u32,
    /// The first PSN that the peer sends.
    pub their_psn: u32,
    /// The first PSN that we send.
    pub our_psn: u32,
    /// The code of the path MTU.
    pub mtu: u8,
    /// Our port.
    pub port: u8,
    /// The index of our GID, which must be of the peer's kind.
    pub gid_index: u8,
    /// How many routers a packet may pass, and one.
    pub hop_limit: u8,
}

/// A reliable-connected queue pair. The last [`Arc`] of it destroys it.
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    number: u32,
    /// Of all queue pairs that this process has ever made: UNIQUE.
    token: u32,
    /// It has its send queue, of which there is one.
    has_sends: AtomicBool,
    plan: Plan,
    inline: u32,
    /// True until the NIC has forgotten the queue pair. Outlives it.
    alive: Arc<AtomicBool>,
    /// Its receive buffers, and memory that its requests may name.
    own: MemoryRegion,
    completions: Arc<CompletionQueue>,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: THREADS.
unsafe impl Send for QueuePair {}
// SAFETY: THREADS.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Makes a queue pair in state INIT: it takes receive buffers, and peers may write memory of
    /// its domain once it is connected. Its completions go to `completions`.
    ///
    /// # Errors
    ///
    /// When device or driver have no resources, or requests cannot carry so many bytes.
    ///
    /// # Panics
    ///
    /// If the receive buffers do not fit into `own`, `own` is of another domain, or `completions`
    /// is of another device.
    pub fn new(
        completions: &Arc<CompletionQueue>,
        domain: &Arc<ProtectionDomain>,
        own: MemoryRegion,
        port: u8,
        plan: Plan,
    ) -> io::Result<Arc<Self>> {
        assert!(Arc::ptr_eq(completions.context(), domain.context()), "objects of two devices");
        assert!(Arc::ptr_eq(own.domain(), domain), "memory of another domain");
        assert!(plan.receive_len <= plan.stride);
        assert!(plan.receives as usize * plan.stride as usize <= own.extent().len);
        let mut wanted = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.raw(),
            recv_cq: completions.raw(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: plan.sends,
                max_recv_wr: plan.receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let library = domain.context().library();
        let mut raw = Err(io::ErrorKind::InvalidInput.into());
        for inline in plan.inline {
            wanted.cap.max_inline_data = *inline;
            // SAFETY: `ibv_create_qp` asks for a domain and completion queues of one device that
            // exist (LIVE, and the assertion), and for attributes that it may change: a live local.
            let made = unsafe { (library.ibv_create_qp)(domain.raw(), &raw mut wanted) };
            raw = NonNull::new(made).ok_or_else(last_error);
            if raw.is_ok() {
                break;
            }
        }
        let raw = raw?;
        // SAFETY: reading asks for a queue pair that exists: it was just made.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let pair = Self {
            raw,
            number,
            token: next_token(),
            has_sends: AtomicBool::new(false),
            plan,
            inline: wanted.cap.max_inline_data,
            alive: Arc::new(AtomicBool::new(true)),
            own,
            completions: Arc::clone(completions),
            domain: Arc::clone(domain),
        };
        pair.initialize(port)?;
        Ok(Arc::new(pair))
    }

    /// What its entries carry: no other queue pair of this process ever has it.
    pub fn token(&self) -> u32 {
        self.token
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its sizes.
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// The most bytes that a request may carry itself, as the device has granted.
    pub fn inline(&self) -> u32 {
        self.inline
    }

    /// The queue that its completions go to.
    pub fn completions(&self) -> &Arc<CompletionQueue> {
        &self.completions
    }

    fn initialize(&self, port: u8) -> io::Result<()> {
        let mut wanted = unchanged();
        wanted.qp_state = IBV_QPS_INIT;
        wanted.port_num = port;
        wanted.qp_access_flags = IBV_ACCESS_REMOTE_WRITE.cast_unsigned();
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(wanted, mask)
    }

    /// Brings it from INIT to RTS. The kernel may look for the peer's Ethernet address for seconds.
    ///
    /// # Errors
    ///
    /// When the peer cannot be reached, or the queue pair is in error already.
    pub fn connect(&self, peer: &Peer) -> io::Result<()> {
        let mut wanted = unchanged();
        wanted.qp_state = IBV_QPS_RTR;
        wanted.path_mtu = i32::from(peer.mtu);
        wanted.dest_qp_num = peer.number;
        wanted.rq_psn = peer.their_psn;
        wanted.max_dest_rd_atomic = 1;
        wanted.min_rnr_timer = RNR_TIMER;
        wanted.ah_attr.is_global = 1;
        wanted.ah_attr.port_num = peer.port;
        wanted.ah_attr.grh.dgid = ibv_gid { raw: peer.gid };
        wanted.ah_attr.grh.sgid_index = peer.gid_index;
        wanted.ah_attr.grh.hop_limit = peer.hop_limit;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(wanted, mask)?;
        let mut wanted = unchanged();
        wanted.qp_state = IBV_QPS_RTS;
        wanted.timeout = ACK_TIMEOUT;
        wanted.retry_cnt = RETRIES;
        wanted.rnr_retry = RNR_RETRIES;
        wanted.sq_psn = peer.our_psn;
        wanted.max_rd_atomic = 1;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(wanted, mask)
    }

    /// Brings it to the state ERR: every request and receive buffer ends with an entry.
    ///
    /// # Errors
    ///
    /// When the device is dead.
    pub fn fail(&self) -> io::Result<()> {
        let mut wanted = unchanged();
        wanted.qp_state = IBV_QPS_ERR;
        self.modify(wanted, IBV_QP_STATE)
    }

    fn modify(&self, mut wanted: ibv_qp_attr, mask: i32) -> io::Result<()> {
        let library = self.domain.context().library();
        // SAFETY: `ibv_modify_qp` asks for a queue pair that exists (LIVE), and for attributes: a
        // live local, of which it reads what the mask says.
        check(unsafe { (library.ibv_modify_qp)(self.raw(), &raw mut wanted, mask) })
    }

    /// Gives the NIC receive buffers, at most 64, by their numbers.
    ///
    /// # Errors
    ///
    /// When the device is dead.
    ///
    /// # Panics
    ///
    /// If there is no such buffer.
    pub fn post_receives(&self, slots: &[u32]) -> io::Result<()> {
        let Some(last) = slots.len().checked_sub(1) else { return Ok(()) };
        assert!(last < RECEIVES_AT_ONCE && slots.iter().all(|slot| *slot < self.plan.receives));
        let base = self.own.extent().address;
        let lkey = self.own.lkey();
        let mut buffers = [ibv_sge { addr: 0, length: 0, lkey: 0 }; RECEIVES_AT_ONCE];
        let mut requests = [NO_RECEIVE; RECEIVES_AT_ONCE];
        // The list has pointers to its elements. They stay valid while elements are written, as
        // only cells allow.
        let buffers = Cell::from_mut(&mut buffers[..]).as_slice_of_cells();
        let requests = Cell::from_mut(&mut requests[..]).as_slice_of_cells();
        for (at, slot) in slots.iter().enumerate() {
            let addr = base + u64::from(*slot) * u64::from(self.plan.stride);
            buffers[at].set(ibv_sge { addr, length: self.plan.receive_len, lkey });
            let next = if at == last { ptr::null_mut() } else { requests[at + 1].as_ptr() };
            requests[at].set(ibv_recv_wr {
                wr_id: identifier(self.token, slot | RECEIVE),
                next,
                sg_list: buffers[at].as_ptr(),
                num_sge: 1,
            });
        }
        let mut rejected = ptr::null_mut();
        let post_recv = self.domain.context().post_recv();
        // SAFETY: `ibv_post_recv` asks for
        // - a queue pair that exists: LIVE;
        // - a list of requests that ends with null, valid until it returns: live locals;
        // - buffers that the NIC may write until the entry: they are part of `own`, which the
        //   assertion in `new` checked, and which is deregistered after the queue pair has ended.
        check(unsafe { post_recv(self.raw(), requests[0].as_ptr(), &raw mut rejected) })
    }

    pub(crate) fn raw(&self) -> *mut ibv_qp {
        self.raw.as_ptr()
    }

    pub(crate) fn post_send(&self) -> PostSend {
        self.domain.context().post_send()
    }

    pub(crate) fn own(&self) -> &MemoryRegion {
        &self.own
    }

    /// Takes its only send queue. Returns false if somebody has it.
    pub(crate) fn take_sends(&self) -> bool {
        !self.has_sends.swap(true, Ordering::AcqRel)
    }

    /// What tells, even after the queue pair has ended, whether it has.
    pub(crate) fn life(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.alive)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let library = self.domain.context().library();
        // SAFETY: `ibv_destroy_qp` asks for a queue pair that nobody uses any more: LIVE.
        let errno = unsafe { (library.ibv_destroy_qp)(self.raw()) };
        if has_ended(errno) {
            self.alive.store(false, Ordering::Release);
        } else {
            // The NIC may still have it. What it was made from, and what was lent to it, stays.
            mem::forget((Arc::clone(&self.domain), Arc::clone(&self.completions)));
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("number", &self.number).finish_non_exhaustive()
    }
}

/// A token that no queue pair had before.
fn next_token() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| next.checked_add(1));
    next.expect("no process makes so many queue pairs: one each millisecond for seven weeks")
}

/// Attributes that change nothing, whatever the mask.
fn unchanged() -> ibv_qp_attr {
    // SAFETY: `zeroed` asks for a type that may be all zero: integers.
    unsafe { mem::zeroed() }
}

const NO_RECEIVE: ibv_recv_wr =
    ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };

/// The most receive buffers that are given to the NIC at once.
const RECEIVES_AT_ONCE: usize = 64;
/// How soon a sender that found no buffer tries again: 10 µs, the shortest.
const RNR_TIMER: u8 = 1;
/// How long the NIC waits for an acknowledgement: 134 ms, as Linux SMC does.
const ACK_TIMEOUT: u8 = 15;
/// How often it sends again. Not 7: the soft RNIC of Linux takes that for ever.
const RETRIES: u8 = 6;
/// How often it sends again when the peer has no buffer: for ever.
const RNR_RETRIES: u8 = 7;
