//! A tap on a NIC that shows no packets, and what comes out of taps.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use smcr_memory::Rmbe;
use smcr_proto::{Instant, MacAddress};

use crate::roce::{self, Speller, Tap, UDP_PORT};
pub use crate::roce::{Record, Selection, Tracer};
use crate::{Completion, ConnectError, Fabric, Opening, QpAddress, QpId, Signs, Work};

/// A connected queue pair with the addresses of both its ends.
#[derive(Debug)]
pub struct Introduced<Q> {
    qp: Q,
    ours: QpAddress,
    peer: QpAddress,
}

impl<Q> Introduced<Q> {
    /// Connects `opening` to `peer`.
    ///
    /// # Errors
    ///
    /// As [`Opening::connect`].
    pub fn connect<O: Opening<Qp = Q>>(opening: O, peer: QpAddress) -> Result<Self, ConnectError> {
        let ours = opening.address();
        opening.connect(peer).map(|qp| Self { qp, ours, peer })
    }
}

/// Wraps a fabric and shows what it is told to send, and the messages that it has received.
#[derive(Debug)]
pub struct Traced<F> {
    inner: F,
    tap: Tap,
    pairs: BTreeMap<QpId, Pair>,
}

/// Both directions of a queue pair.
#[derive(Debug)]
struct Pair {
    /// Our address, and the peer's.
    ends: (SocketAddr, SocketAddr),
    sent: Speller,
    received: Speller,
}

impl<F> Traced<F> {
    /// Wraps `inner`. Nothing can be captured before [`tracer`](Self::tracer) is called.
    pub fn new(inner: F) -> Self {
        Self { inner, tap: Tap::default(), pairs: BTreeMap::new() }
    }

    /// The other end of its tap. `mac` is the port's Ethernet address. Call it once.
    pub fn tracer(&mut self, mac: MacAddress) -> Tracer {
        let (tap, tracer) = roce::tap(mac);
        self.tap = tap;
        tracer
    }

    /// What is wrapped.
    pub fn inner(&self) -> &F {
        &self.inner
    }
}

impl<F: Fabric> Fabric for Traced<F> {
    type Qp = Introduced<F::Qp>;

    fn adopt(&mut self, now: Instant, qp: Introduced<F::Qp>) -> QpId {
        let Introduced { qp, ours, peer } = qp;
        let id = self.inner.adopt(now, qp);
        let [here, there] = [ours, peer].map(|end| SocketAddr::new(end.gid.to_ip(), UDP_PORT));
        if here.is_ipv4() == there.is_ipv4() {
            let sent = Speller::new((here, there), peer.qpn, ours.psn);
            let received = Speller::new((there, here), ours.qpn, peer.psn);
            self.pairs.insert(id, Pair { ends: (here, there), sent, received });
        }
        id
    }

    fn room(&self, qp: QpId) -> usize {
        self.inner.room(qp)
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        if self.tap.is_on()
            && let Some(Pair { ends, sent, .. }) = self.pairs.get_mut(&qp)
        {
            let (tap, ends) = (&self.tap, *ends);
            // Posting knows no time.
            let now = tap.now();
            let mut show = |packet: &[u8]| tap.sent(now, ends, 0, packet);
            for work in &*work {
                match work {
                    Work::Write { lease, rkey, address, .. } => {
                        let bytes = |at, out: &mut [u8]| lease.copy_out(at, out);
                        sent.write((*rkey, *address), lease.len(), &bytes, &mut show);
                    }
                    Work::Send { message, .. } => sent.send(message, &mut show),
                    Work::SendLong { message, .. } => sent.send(message, &mut show),
                }
            }
        }
        self.inner.post(qp, work);
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        self.tap.obey(now);
        let before = out.len();
        self.inner.poll(now, out);
        if !self.tap.is_on() {
            return;
        }
        for completion in &out[before..] {
            let (qp, message): (_, &[u8]) = match completion {
                Completion::Received { qp, message } => (qp, message),
                Completion::ReceivedLong { qp, message } => (qp, message),
                Completion::Wrote { .. } | Completion::Sent { .. } | Completion::Broke { .. } => {
                    continue;
                }
            };
            if let Some(Pair { ends, received, .. }) = self.pairs.get_mut(qp) {
                let (tap, ends) = (&self.tap, *ends);
                received.send(message, &mut |packet| tap.received(now, ends, 0, packet));
            }
        }
    }

    fn has_completions(&self) -> bool {
        self.inner.has_completions()
    }

    fn note_signs(&mut self, signs: Signs) {
        self.inner.note_signs(signs);
    }

    fn transmit(&mut self, now: Instant) {
        self.inner.transmit(now);
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        self.inner.prepare_sleep(now)
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.event_descriptor()
    }

    fn fail(&mut self, now: Instant, qp: QpId) {
        self.inner.fail(now, qp);
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        self.pairs.remove(&qp);
        self.inner.release(now, qp);
    }

    fn relinquish(&mut self, element: &mut Rmbe, announced: u32) -> usize {
        self.inner.relinquish(element, announced)
    }
}

#[cfg(test)]
mod tests;
