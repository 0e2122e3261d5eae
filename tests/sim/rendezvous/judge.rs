//! Judges connections that are over: how they ended, and how long they took to come up.

use smcr_engine::handoff::Ending;

use super::call::{Carried, Way};
use super::swarm::Swarm;
use super::{CLIENT, SERVER};
use crate::application::{Application, judge_streams};
use crate::gateways::reach::Met;

impl Swarm {
    /// Judges an honest connection; `calm` is one that was made when all trouble was over.
    pub(super) fn judge(&mut self, number: usize, calm: bool) {
        let endings = [0, 1].map(|side| self.world.ending(number, side));
        let call = &self.world.calls[number];
        let sides = &call.sides;
        let ways = [0, 1].map(|side: usize| sides[side].carried);
        let [client, server] = call.applications().expect("it is honest");
        let given_up = [0, 1].map(|side: usize| sides[side].why);
        let told = |one: &Application| (one.sent(), one.received(), one.heard());
        let story = format!(
            "connection {number}: {ways:?} {given_up:?} {endings:?} {:?}",
            [client, server].map(told)
        );
        for side in [CLIENT, SERVER] {
            let over = sides[side].connection.is_none() || endings[side].is_some();
            assert!(over && !matches!(sides[side].way, Way::Talking), "{story}: it did not end");
        }
        let misbehaved = endings.contains(&Some(Ending::PeerMisbehaved));
        assert!(!misbehaved, "{story}: both gateways are honest");
        let well = judge_streams([client, server], &story);
        let blame = &self.world.blame;
        if !well && (calm || !blame.explains(number, call, endings)) {
            let (born, broke, last) = (call.born, call.broke, call.last);
            let near = blame.near(number, call);
            panic!("{story}: why? From {born:?}, broke {broke:?}, to {last:?}; near: {near:?}");
        }
        if let [Some(one), Some(other)] = ways {
            assert!(one == other || !well, "{story}: each side has it elsewhere");
        }
        let mut delayed = false;
        for opened in sides.iter().filter_map(|side| side.opened) {
            let wait = opened.since(call.born);
            let delay = blame.delay(number, call, opened);
            delayed |= !delay.is_zero();
            let patient = self.world.patience();
            let excused = wait <= patient || !delay.is_zero() && !calm;
            assert!(excused, "{story}: it waited for {wait:?}");
            let most = patient + delay;
            assert!(
                wait <= most,
                "{story}: it waited for {wait:?}, and trouble is felt for {most:?}"
            );
        }
        self.met.note(ALL);
        self.met.note(match (blame.may_end(number, call), call.was_left()) {
            (false, false) => STRICTLY,
            (false, true) => UNTIL_LEFT,
            (true, _) => "a connection was in reach of trouble",
        });
        self.met.note_times(IN_TIME, (!delayed).into());
        let survived = well && blame.spared(call);
        self.met.note_times("a connection survived that a link failed", survived.into());
        let urgent = client.urgent_received().len() + server.urgent_received().len();
        self.met.note_times("an urgent byte came as such", urgent as u64);
        self.met.note(match ways {
            [Some(Carried::Smc), Some(Carried::Smc)] => "a connection is SMC-R",
            [Some(Carried::Tcp), Some(Carried::Tcp)] => "a connection is TCP",
            [_, _] => "a connection is refused",
        });
        let lost = endings.iter().flatten().any(|ending| *ending == Ending::LinkLost);
        self.met.note_times("a connection was lost with its link", u64::from(lost));
    }
}

/// How many of a hundred connections were judged strictly: for how they ended, and for how long
/// they took to come up.
pub(super) fn strict_percent(met: &Met) -> [u64; 2] {
    let of_all = |times: u64| times * 100 / met.times(ALL).max(1);
    [of_all(met.times(STRICTLY) + met.times(UNTIL_LEFT)), of_all(met.times(IN_TIME))]
}

/// Of connections of which it was counted how strictly they were judged.
const ALL: &str = "a connection was judged";
/// Nothing would have explained it if it had not ended well.
const STRICTLY: &str = "a connection was judged strictly";
/// The same, until one of its applications reset it.
const UNTIL_LEFT: &str = "a connection was judged strictly until an application reset it";
/// Nothing would have explained it if its rendezvous had taken longer.
const IN_TIME: &str = "a connection was judged strictly for how long it took";
