//! What applications do and what happens to ports in the swarms of gateways, at random.

use smcgate::groups::{Group, PortId};
use smcr_proto::Gid;
use smcr_proto::link_group::Symmetry;
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::Network;

use crate::KIB;
use crate::application::Application;

/// What an application does next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whim {
    roll: u64,
    len: usize,
    slowly: usize,
}

impl Whim {
    /// Any. It writes one of these lengths at most.
    pub(crate) fn any(dice: &mut Dice, longest: &[usize]) -> Self {
        let roll = dice.below(100);
        let len_max = longest[dice.index(longest.len())];
        let len = 1 + dice.index(len_max);
        Self { roll, len, slowly: 1 + dice.index(4 * KIB) }
    }

    /// Lets an application do it, unless that is gone.
    pub(crate) fn follow(self, application: &mut Application) {
        let Self { roll, len, slowly } = self;
        if application.is_gone() {
            return;
        }
        match roll {
            0..50 if !application.will_finish() => application.write(len),
            50..54 if !application.will_finish() => application.write_urgent(),
            0..60 if slowly > 100 => application.write_at_most(slowly),
            60..70 if slowly > 100 => application.read_at_most(slowly),
            70..78 => application.sleep(),
            78..88 => application.wake(),
            88..94 => application.finish(),
            94..95 => application.reset(),
            95..96 => application.close(),
            _ => {}
        }
    }
}

/// Ports that are down.
#[derive(Debug, Default)]
pub(crate) struct Down(Vec<Gid>);

impl Down {
    /// Any port of a gateway; one that is up, if there is one.
    pub(crate) fn any_up(&self, dice: &mut Dice, gids: &[Gid]) -> PortId {
        let up: Vec<_> = (0..gids.len()).filter(|index| !self.0.contains(&gids[*index])).collect();
        let any = dice.index(gids.len());
        PortId(if up.is_empty() { any } else { up[dice.index(up.len())] })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn has(&self, gid: Gid) -> bool {
        self.0.contains(&gid)
    }

    /// A port goes down, or comes back. Returns what its device says: whether it has carrier; some
    /// devices do not say that it has none.
    pub(crate) fn flap(&mut self, dice: &mut Dice, network: &Network, gid: Gid) -> Option<bool> {
        if let Some(index) = self.0.iter().position(|down| *down == gid) {
            self.0.remove(index);
            network.port_up(gid);
            return Some(true);
        }
        self.0.push(gid);
        network.port_down(gid);
        dice.roll(Chance::percent(70)).then_some(false)
    }

    /// The port that has been down for longest comes back, if there is one.
    pub(crate) fn mend_one(&mut self, network: &Network) -> Option<Gid> {
        let gid = (!self.0.is_empty()).then(|| self.0.remove(0))?;
        network.port_up(gid);
        Some(gid)
    }
}

/// How many links a group has, if all of them are up, and the machine knows that they do not fail
/// together.
pub(crate) fn redundant_links<O>(group: &Group<O>) -> Option<usize> {
    let machine = group.machine().filter(|machine| machine.is_established())?;
    let up = machine.links().filter(|link| machine.is_link_up(link.number)).count();
    let all = machine.links().count();
    (machine.symmetry() == Symmetry::Symmetric && up == all).then_some(up)
}
