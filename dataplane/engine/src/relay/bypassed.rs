//! Bytes that the programs at both ends pass without us, as far as we can count them.

use smcr_proto::Instant;

use super::Relay;
use crate::counters::Counters;
use crate::names::Tally;
use crate::streams::Streams;

impl<T> Relay<T> {
    /// Looks at what has passed us by. Programs say so themselves: one that lies has its own
    /// connection counted wrongly, and no faster than memory is.
    pub(crate) fn note_bypassed(
        &mut self,
        now: Instant,
        streams: &impl Streams<Stream = T>,
        counters: &Counters,
    ) {
        let Some(near) = &self.near else { return };
        let more = |seen: u64, said: u64| said.saturating_sub(seen).min(PASSED_MAX);
        let (said_in, said_out) = streams.bypassed(&near.stream);
        let (more_in, more_out) = (more(self.bypassed.0, said_in), more(self.bypassed.1, said_out));
        self.bypassed = (self.bypassed.0 + more_in, self.bypassed.1 + more_out);
        self.tally.note_first(now, more_in > 0, more_out > 0);
        counters.bytes_in.add(more_in);
        counters.bytes_out.add(more_out);
    }

    /// The same at the end of the connection: what it has carried, also past us.
    pub(crate) fn last_tally(
        &mut self,
        now: Instant,
        streams: &impl Streams<Stream = T>,
        counters: &Counters,
    ) -> Tally {
        self.note_bypassed(now, streams, counters);
        self.whole_tally()
    }

    /// What the connection has carried, also past us. Stages are found by what we have carried
    /// ourselves, so the two are kept apart.
    pub(crate) fn whole_tally(&self) -> Tally {
        let (passed_in, passed_out) = self.bypassed;
        let (bytes_in, bytes_out) =
            (self.tally.bytes_in + passed_in, self.tally.bytes_out + passed_out);
        Tally { bytes_in, bytes_out, ..self.tally }
    }
}

/// No program passes more bytes between two looks, of which there are four in a second.
const PASSED_MAX: u64 = 1 << 34;
