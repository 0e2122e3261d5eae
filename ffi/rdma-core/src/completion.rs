//! Completion queues, and the channel that wakes who sleeps on them.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_core_sys::*;

use crate::check;
use crate::context::{Context, last_error, set_nonblocking};

/// A channel. It becomes readable when an armed completion queue gets an entry.
#[derive(Debug)]
pub struct Channel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    channel: Arc<Channel>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should.
    Success,
    /// The queue pair was in error already.
    Flushed,
    /// The peer's NIC refused it.
    Refused,
    /// The peer's NIC does not answer, or never has a buffer for a message.
    Unanswered,
    /// Our NIC refused it. For a receive: what the peer sent. The number is that of the headers.
    Local(i32),
}

/// An entry of a completion queue. Only [`CompletionQueue::poll`] makes one, and it cannot be
/// copied: it is the proof that a request has ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    token: u32,
    is_receive: bool,
    index: u32,
    outcome: Outcome,
    len: u32,
}

/// The queue cannot be polled: it overran, or the device is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dead;

impl Entry {
    /// Whose it is: [`QueuePair::token`](crate::QueuePair::token).
    pub fn token(&self) -> u32 {
        self.token
    }

    /// Whether a message came; otherwise a request of ours ended.
    pub fn is_receive(&self) -> bool {
        self.is_receive
    }

    /// Which request of the send queue, or which slot of the receive queue.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// How it ended.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Bytes that came, if a message did.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no bytes came.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

// SAFETY: THREADS.
unsafe impl Send for Channel {}
// SAFETY: THREADS.
unsafe impl Sync for Channel {}
// SAFETY: THREADS.
unsafe impl Send for CompletionQueue {}
// SAFETY: THREADS.
unsafe impl Sync for CompletionQueue {}

impl Channel {
    /// Makes a channel.
    ///
    /// # Errors
    ///
    /// When the process has no descriptors left.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: `ibv_create_comp_channel` asks for an open device: LIVE.
        let raw = unsafe { (context.library().ibv_create_comp_channel)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        let channel = Self { raw, context: Arc::clone(context) };
        set_nonblocking(channel.descriptor())?;
        Ok(Arc::new(channel))
    }

    /// Readable when an armed queue got an entry, until [`drain`](Self::drain) is called.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: reading asks for a channel that exists: LIVE.
        let descriptor = unsafe { (*self.raw.as_ptr()).fd };
        // SAFETY: `borrow_raw` asks for a descriptor that stays open: the channel's, which lives as
        // long as `self`.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }

    /// Takes all events. Returns how many there were.
    pub fn drain(&self) -> u32 {
        let library = self.context.library();
        let mut count = 0;
        loop {
            let (mut queue, mut user) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: `ibv_get_cq_event` asks for a channel that exists (LIVE) and for two places
            // to store: live locals. Its descriptor does not block.
            let errno = unsafe {
                (library.ibv_get_cq_event)(self.raw.as_ptr(), &raw mut queue, &raw mut user)
            };
            if errno != 0 {
                return count;
            }
            // SAFETY: `ibv_ack_cq_events` asks for the queue of as many events as were taken: one.
            unsafe { (library.ibv_ack_cq_events)(queue, 1) };
            count += 1;
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: `ibv_destroy_comp_channel` asks for a channel without queues: LIVE. If it fails,
        // the channel stays until the process ends.
        unsafe { (self.context.library().ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

impl CompletionQueue {
    /// Makes a queue of at least `entries`.
    ///
    /// # Errors
    ///
    /// When device or driver have no resources.
    pub fn new(channel: &Arc<Channel>, entries: u32) -> io::Result<Arc<Self>> {
        let entries = i32::try_from(entries).map_err(|_| io::ErrorKind::InvalidInput)?;
        let context = &channel.context;
        // SAFETY: `ibv_create_cq` asks for an open device and for a channel of it: LIVE.
        let raw = unsafe {
            (context.library().ibv_create_cq)(
                context.raw(),
                entries,
                ptr::null_mut(),
                channel.raw.as_ptr(),
                0,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        Ok(Arc::new(Self { raw, channel: Arc::clone(channel) }))
    }

    /// Appends at most 64 entries to `out`. Returns how many. No system call.
    ///
    /// # Errors
    ///
    /// [`Dead`]. Nothing was appended, and no entry will come.
    pub fn poll(&self, out: &mut Vec<Entry>) -> Result<usize, Dead> {
        let mut entries = [EMPTY; BATCH];
        let most = i32::try_from(BATCH).expect("small");
        let poll_cq = self.channel.context.poll_cq();
        // SAFETY: `ibv_poll_cq` asks for a queue that exists (LIVE) and room for as many entries as
        // we say.
        let count = unsafe { poll_cq(self.raw.as_ptr(), most, entries.as_mut_ptr()) };
        // A driver says so with a negative number, of which there are many in use.
        let count = usize::try_from(count).map_err(|_| Dead)?;
        out.extend(entries[..count].iter().map(Entry::from));
        Ok(count)
    }

    /// Lets the next entry make the channel readable.
    ///
    /// # Errors
    ///
    /// When the device is dead.
    pub fn arm(&self) -> io::Result<()> {
        let req_notify_cq = self.channel.context.req_notify_cq();
        // SAFETY: `ibv_req_notify_cq` asks for a queue that exists: LIVE.
        check(unsafe { req_notify_cq(self.raw.as_ptr(), 0) })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.channel.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let library = self.channel.context.library();
        // SAFETY: `ibv_destroy_cq` asks for a queue without queue pairs, all of whose events were
        // acknowledged: LIVE, and `Channel::drain` acknowledges what it takes. If it fails, the
        // kernel ends the queue when the device is closed.
        unsafe { (library.ibv_destroy_cq)(self.raw()) };
    }
}

/// The most entries of one poll.
const BATCH: usize = 64;

const EMPTY: ibv_wc = ibv_wc {
    wr_id: 0,
    status: 0,
    opcode: 0,
    vendor_err: 0,
    byte_len: 0,
    imm_data: 0,
    qp_num: 0,
    src_qp: 0,
    wc_flags: 0,
    pkey_index: 0,
    slid: 0,
    sl: 0,
    dlid_path_bits: 0,
};

impl From<&ibv_wc> for Entry {
    fn from(entry: &ibv_wc) -> Self {
        let outcome = match entry.status {
            IBV_WC_SUCCESS => Outcome::Success,
            IBV_WC_WR_FLUSH_ERR => Outcome::Flushed,
            IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR => Outcome::Refused,
            IBV_WC_RETRY_EXC_ERR | IBV_WC_RNR_RETRY_EXC_ERR => Outcome::Unanswered,
            other => Outcome::Local(other),
        };
        let [token, index] = halves(entry.wr_id);
        Self {
            token,
            is_receive: index & RECEIVE != 0,
            index: index & INDEX_MASK,
            outcome,
            len: entry.byte_len,
        }
    }
}

/// The identifier of a request: whose, and which.
pub(crate) fn identifier(token: u32, index: u32) -> u64 {
    u64::from(token) << 32 | u64::from(index)
}

fn halves(identifier: u64) -> [u32; 2] {
    [identifier >> 32, identifier & u64::from(u32::MAX)]
        .map(|half| u32::try_from(half).expect("32 bits"))
}

/// Set in the identifiers of receives.
pub(crate) const RECEIVE: u32 = 1 << 31;
/// The rest.
pub(crate) const INDEX_MASK: u32 = RECEIVE - 1;
