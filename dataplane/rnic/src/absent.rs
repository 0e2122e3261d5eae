//! An optional NIC.
//!
//! A poller without an RNIC still relays TCP. Its fabric is `None`, which adopts no queue pair; so
//! the calls that need one panic.

use std::os::fd::BorrowedFd;

use smcr_memory::Rmbe;
use smcr_proto::Instant;

use crate::{Completion, Fabric, QpId, Signs, Work};

impl<F: Fabric> Fabric for Option<F> {
    type Qp = F::Qp;

    fn adopt(&mut self, now: Instant, qp: Self::Qp) -> QpId {
        present(self).adopt(now, qp)
    }

    fn room(&self, qp: QpId) -> usize {
        self.as_ref().map_or(0, |fabric| fabric.room(qp))
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        present(self).post(qp, work);
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        if let Some(fabric) = self {
            fabric.poll(now, out);
        }
    }

    fn note_signs(&mut self, signs: Signs) {
        if let Some(fabric) = self {
            fabric.note_signs(signs);
        }
    }

    fn has_completions(&self) -> bool {
        self.as_ref().is_some_and(Fabric::has_completions)
    }

    fn transmit(&mut self, now: Instant) {
        if let Some(fabric) = self {
            fabric.transmit(now);
        }
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        self.as_mut().and_then(|fabric| fabric.prepare_sleep(now))
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.as_ref().and_then(Fabric::event_descriptor)
    }

    fn fail(&mut self, now: Instant, qp: QpId) {
        present(self).fail(now, qp);
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        present(self).release(now, qp);
    }

    fn relinquish(&mut self, element: &mut Rmbe, announced: u32) -> usize {
        self.as_mut().map_or(0, |fabric| fabric.relinquish(element, announced))
    }
}

fn present<F>(fabric: &mut Option<F>) -> &mut F {
    fabric.as_mut().expect("only an RNIC creates queue pairs, and this poller has none")
}
