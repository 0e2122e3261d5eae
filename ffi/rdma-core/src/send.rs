//! The send queue of a queue pair: requests are gathered, posted with one doorbell, and come back.

use std::collections::VecDeque;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys::*;
use smcr_os::Lent;

use crate::completion::{Entry, INDEX_MASK, identifier};
use crate::queue_pair::{MESSAGE_LEN, QueuePair};

/// The send queue of one queue pair.
///
/// Requests are numbered from zero. Those before `first` came back, those before `posted` are the
/// NIC's, and the rest waits for [`ring`](Self::ring).
pub struct SendQueue<L: Lent> {
    /// `None` after [`close`](Self::close).
    pair: Option<Arc<QueuePair>>,
    alive: Arc<AtomicBool>,
    token: u32,
    inline: u32,
    /// What the NIC may still read, oldest first: LENT.
    held: VecDeque<Ended<L>>,
    first: u64,
    posted: u64,
    /// Requests before this one have ended.
    ended: u64,
    /// The requests as the driver wants them, by their number modulo the length.
    requests: Box<[ibv_send_wr]>,
    pieces: Box<[ibv_sge]>,
    messages: Box<[[u8; MESSAGE_LEN]]>,
}

/// What a request does.
#[derive(Debug)]
pub enum Body<L> {
    /// Writes the bytes of the lease to the peer's memory.
    Write {
        /// The bytes.
        lease: L,
        /// The key of the registration that they are part of.
        lkey: u32,
        /// The key of the peer's memory.
        rkey: u32,
        /// Where in the peer's memory.
        address: u64,
    },
    /// Sends a message.
    Message([u8; MESSAGE_LEN]),
    /// Sends a message that lies in the queue pair's own memory.
    Own {
        /// Where it begins there.
        at: u32,
        /// Its length in bytes.
        len: u32,
    },
}

/// What a request held, and now gives back.
#[derive(Debug)]
pub struct Ended<L> {
    /// What was lent, if it was a write.
    pub lease: Option<L>,
    /// Where in the queue pair's own memory the message was, if it was there.
    pub own: Option<u32>,
    /// What the caller named it.
    pub tag: u64,
}

/// The driver refuses requests: the queue pair is not in a state for them, or the device is dead.
/// Those that it has refused stay in the queue and are not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

// SAFETY: the pointers in `requests` point into boxes of the same value, and are set anew before
// each use; the queue pair is `Send`.
unsafe impl<L: Lent + Send> Send for SendQueue<L> {}

impl<L: Lent> SendQueue<L> {
    /// The send queue of `pair`.
    ///
    /// # Panics
    ///
    /// If `pair` has one already.
    pub fn new(pair: Arc<QueuePair>) -> Self {
        assert!(pair.take_sends(), "a queue pair has one send queue");
        let (token, inline) = (pair.token(), pair.inline());
        let depth = pair.plan().sends as usize;
        Self {
            alive: pair.life(),
            pair: Some(pair),
            token,
            inline,
            held: VecDeque::with_capacity(depth),
            first: 0,
            posted: 0,
            ended: 0,
            requests: vec![NO_REQUEST; depth].into(),
            pieces: vec![ibv_sge { addr: 0, length: 0, lkey: 0 }; depth].into(),
            messages: vec![[0; MESSAGE_LEN]; depth].into(),
        }
    }

    /// How many more requests fit.
    pub fn room(&self) -> usize {
        self.requests.len() - self.held.len()
    }

    /// The queue pair, unless the queue was closed.
    pub fn pair(&self) -> Option<&Arc<QueuePair>> {
        self.pair.as_ref()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether there are requests that the NIC has not learnt of.
    pub fn has_unposted(&self) -> bool {
        self.posted < self.first + self.held.len() as u64
    }

    /// Appends a request. The NIC learns of it by [`ring`](Self::ring).
    ///
    /// # Panics
    ///
    /// If there is no room, memory of its own that the queue pair does not have, or a message that
    /// is longer than what requests may carry themselves.
    pub fn push(&mut self, body: Body<L>, tag: u64) {
        assert!(self.room() > 0, "the caller keeps within the room");
        let number = self.first + self.held.len() as u64;
        let at = place(number, self.requests.len());
        let mut request = NO_REQUEST;
        request.num_sge = 1;
        request.opcode = IBV_WR_SEND;
        request.send_flags = IBV_SEND_SOLICITED;
        let mut held = Ended { lease: None, own: None, tag };
        let piece = match body {
            Body::Write { lease, lkey, rkey, address } => {
                let extent = lease.extent();
                request.opcode = IBV_WR_RDMA_WRITE;
                request.send_flags = 0;
                (request.remote_addr, request.rkey) = (address, rkey);
                held.lease = Some(lease);
                let length = u32::try_from(extent.len).expect("leases are short");
                ibv_sge { addr: extent.address, length, lkey }
            }
            Body::Message(message) => {
                assert!(MESSAGE_BYTES <= self.inline, "the caller looks at what was granted");
                self.messages[at] = message;
                let addr = (&raw const self.messages[at]) as u64;
                // The driver copies it when it is posted: INLINE.
                request.send_flags |= IBV_SEND_INLINE;
                ibv_sge { addr, length: MESSAGE_BYTES, lkey: 0 }
            }
            Body::Own { at, len } => {
                held.own = Some(at);
                self.own_piece(at, len)
            }
        };
        if piece.length <= self.inline {
            request.send_flags |= IBV_SEND_INLINE;
        }
        let index = u32::try_from(number & u64::from(INDEX_MASK)).expect("masked");
        request.wr_id = identifier(self.token, index);
        if number.is_multiple_of(SIGNAL_EVERY) {
            request.send_flags |= IBV_SEND_SIGNALED;
        }
        (self.requests[at], self.pieces[at]) = (request, piece);
        self.held.push_back(held);
    }

    /// The piece of the queue pair's own memory. Without queue pair nothing is ever posted.
    fn own_piece(&self, at: u32, length: u32) -> ibv_sge {
        let Some(pair) = &self.pair else { return ibv_sge { addr: 0, length, lkey: 0 } };
        let extent = pair.own().extent();
        assert!(at as usize + length as usize <= extent.len);
        ibv_sge { addr: extent.address + u64::from(at), length, lkey: pair.own().lkey() }
    }

    /// Posts what was appended, with one doorbell.
    ///
    /// # Errors
    ///
    /// [`Refused`].
    pub fn ring(&mut self) -> Result<(), Refused> {
        let end = self.first + self.held.len() as u64;
        let Some(pair) = self.pair.as_ref().filter(|_| self.posted < end) else { return Ok(()) };
        let depth = self.requests.len();
        // From here to the call both boxes are reached by these pointers only: an access by the box
        // itself would end what the pointers in the list may do.
        let (requests, pieces) = (self.requests.as_mut_ptr(), self.pieces.as_mut_ptr());
        for number in self.posted..end {
            let (at, next) = (place(number, depth), place(number + 1, depth));
            let is_last = number + 1 == end;
            // SAFETY: the reference asks for an element that exists and that nobody else uses: `at`
            // is below the length, and the loop has no other reference.
            let request = unsafe { &mut *requests.wrapping_add(at) };
            request.sg_list = pieces.wrapping_add(at);
            request.next = if is_last { ptr::null_mut() } else { requests.wrapping_add(next) };
            if is_last {
                request.send_flags |= IBV_SEND_SIGNALED;
            }
        }
        let head = requests.wrapping_add(place(self.posted, depth));
        let mut rejected: *mut ibv_send_wr = ptr::null_mut();
        let post_send = pair.post_send();
        // SAFETY: `ibv_post_send` asks for
        // - a queue pair that exists: LIVE;
        // - a list of requests that ends with null, valid until it returns: the loop above has
        //   linked those of our boxes, and has made the last one point to nothing;
        // - bytes that stay mapped and unchanged until their request has ended: the contract of
        //   `Lent`, and LENT, as `held` keeps them; or that the driver copies now (inline); or that
        //   are part of the queue pair's own memory, by the assertion in `own_piece`.
        // - a place to store the first rejected request: a live local.
        let errno = unsafe { post_send(pair.raw(), head, &raw mut rejected) };
        if errno == 0 {
            self.posted = end;
            return Ok(());
        }
        // Those before the rejected one are posted. If the driver names none of ours, any of them
        // may be with the NIC: LENT.
        let is_rejected = |number: &u64| requests.wrapping_add(place(*number, depth)) == rejected;
        self.posted = (self.posted..end).find(is_rejected).unwrap_or(end);
        Err(Refused)
    }

    /// The NIC says that a request has ended, and therefore all before it.
    ///
    /// # Panics
    ///
    /// If the entry is of another queue pair or of a receive, or if it names no request that was
    /// posted.
    pub fn end(&mut self, entry: Entry) {
        let number = self.number_of(&entry);
        self.ended = self.ended.max(number + 1);
    }

    /// The NIC says of a request that it has ended. Those before it have ended, too.
    ///
    /// # Panics
    ///
    /// As [`end`](Self::end).
    pub fn end_before(&mut self, entry: &Entry) {
        let number = self.number_of(entry);
        self.ended = self.ended.max(number);
    }

    fn number_of(&self, entry: &Entry) -> u64 {
        assert!(entry.token() == self.token && !entry.is_receive(), "an entry of this queue");
        let first = u32::try_from(self.first & u64::from(INDEX_MASK)).expect("masked");
        let number = self.first + u64::from(entry.index().wrapping_sub(first) & INDEX_MASK);
        assert!(number < self.posted, "the NIC ends what was posted, once");
        number
    }

    /// Takes back the oldest request, if it has ended.
    pub fn take_ended(&mut self) -> Option<Ended<L>> {
        if self.first == self.ended {
            return None;
        }
        self.take_first()
    }

    /// Takes back the oldest request, if the NIC has not learnt of it.
    pub fn take_unposted(&mut self) -> Option<Ended<L>> {
        if self.first < self.posted {
            return None;
        }
        self.posted += u64::from(!self.held.is_empty());
        self.take_first()
    }

    /// Gives the queue pair away. Nothing is posted any more.
    pub fn close(&mut self) -> Option<Arc<QueuePair>> {
        self.pair.take()
    }

    /// Whether the queue pair was destroyed.
    pub fn is_destroyed(&self) -> bool {
        !self.alive.load(Ordering::Acquire)
    }

    /// Takes back the oldest request after the queue pair was destroyed.
    pub fn take_orphan(&mut self) -> Option<Ended<L>> {
        if self.alive.load(Ordering::Acquire) {
            return None;
        }
        self.posted = self.posted.max(self.first + u64::from(!self.held.is_empty()));
        self.take_first()
    }

    fn take_first(&mut self) -> Option<Ended<L>> {
        let oldest = self.held.pop_front()?;
        self.first += 1;
        self.ended = self.ended.max(self.first);
        assert!(self.first <= self.posted);
        Some(oldest)
    }
}

impl<L: Lent> Drop for SendQueue<L> {
    fn drop(&mut self) {
        drop(self.pair.take());
        if self.alive.load(Ordering::Acquire) {
            // Somebody else keeps the queue pair, so the NIC may still read these: LENT.
            self.held.drain(..).for_each(std::mem::forget);
        }
    }
}

impl<L: Lent> fmt::Debug for SendQueue<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = (self.first, self.ended, self.posted, self.held.len());
        f.debug_tuple("SendQueue").field(&numbers).finish()
    }
}

/// Where a request lies in a queue that holds `depth` of them.
fn place(number: u64, depth: usize) -> usize {
    usize::try_from(number % depth as u64).expect("an index")
}

const NO_REQUEST: ibv_send_wr = ibv_send_wr {
    wr_id: 0,
    next: ptr::null_mut(),
    sg_list: ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    remote_addr: 0,
    rkey: 0,
    rest: [0; 19],
};

/// Every so many requests make an entry, and so does the last of each list.
const SIGNAL_EVERY: u64 = 64;
/// The length of a message, as requests carry it.
const MESSAGE_BYTES: u32 = 44;
const _: () = assert!(MESSAGE_BYTES as usize == MESSAGE_LEN);
