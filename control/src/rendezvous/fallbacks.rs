//! Why connections stayed TCP.

use std::collections::BTreeMap;

use smcr_proto::wire::clc::Diagnosis;

/// How many connections stayed TCP, by reason.
#[derive(Debug, Default)]
pub struct Fallbacks(BTreeMap<Diagnosis, u64>);

impl Fallbacks {
    /// Counts a connection that stayed TCP. Peers may invent codes, so only a limited number of
    /// codes without a name are counted separately.
    pub(super) fn count(&mut self, reason: Diagnosis) {
        let unnamed = || self.0.keys().filter(|code| code.name().is_none()).count();
        let told_apart = reason.name().is_some()
            || self.0.contains_key(&reason)
            || unnamed() < UNNAMED_REASONS_MAX;
        let reason = if told_apart { reason } else { Diagnosis::PEER_DECLINED };
        *self.0.entry(reason).or_default() += 1;
    }

    /// How many connections stayed TCP for each reason.
    pub(super) fn all(&self) -> &BTreeMap<Diagnosis, u64> {
        &self.0
    }
}

/// How many codes without a name are counted separately: more than any honest peer uses.
pub(crate) const UNNAMED_REASONS_MAX: usize = 32;
