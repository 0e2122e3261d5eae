//! The RMBs of a link group: registered with every RNIC of the group, taken and given back element
//! by element.

use std::ops::RangeInclusive;
use std::time::Duration;

use smcr_memory::{Backing, Region, Rmb, Rmbe};
use smcr_proto::limits::OUR_RMBS_MAX;
use smcr_proto::{Instant, Rkey, RmbeSize};
use smcr_rnic::{Domain, Exhausted, Registration, Rnic};

use super::ports::PortId;
use smcr_proto::link_group::RmbIndex;

/// How much memory elements may still take, over all link groups. What counts is elements that are
/// out: the others have addresses, but no memory. An RMB that an RNIC has pinned has memory for all
/// of its elements, and counts as a whole.
#[derive(Debug)]
pub struct Budget {
    bytes: u64,
    taken: u64,
}

impl Budget {
    /// A budget of `bytes`.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, taken: 0 }
    }

    /// From now on it is so large. If more is taken, all of that must come back before more can be
    /// had.
    pub fn change(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// Whether there is room for one more element.
    pub fn has_room_for(&self, size: RmbeSize) -> bool {
        self.left() >= size.bytes().into()
    }

    /// Takes so many bytes.
    fn take(&mut self, bytes: u64) -> Result<(), Exhausted> {
        if self.left() < bytes {
            return Err(Exhausted);
        }
        self.taken += bytes;
        Ok(())
    }

    /// So many bytes come back.
    fn give_back(&mut self, bytes: u64) {
        self.taken -= bytes;
    }

    fn left(&self) -> u64 {
        self.bytes.saturating_sub(self.taken)
    }
}

/// The stock of one link group. Each RMB has elements of one size. The first of a size has a few,
/// those that follow have more: most peers never have more than a few connections.
#[derive(Debug)]
pub struct Stock {
    /// The most elements of an RMB.
    elements: u8,
    /// What the RMBs are made of.
    backing: Backing,
    rmbs: Vec<Registered>,
}

#[derive(Debug)]
struct Registered {
    index: RmbIndex,
    rmb: Rmb,
    size: RmbeSize,
    /// With each RNIC of the group.
    keys: Vec<(PortId, Registration)>,
    /// An RNIC pins it, or did: its pages stay, and all of it has been taken from the budget.
    pinned: bool,
    standing: Standing,
    /// Since when no element has been out.
    idle_since: Option<Instant>,
}

/// What the peer knows of an RMB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is being told.
    Announced,
    /// Its elements can be offered.
    Known,
    /// It is being told that the RMB goes.
    Withdrawn,
}

impl Stock {
    /// An empty stock of RMBs with up to `elements` elements each.
    pub fn new(elements: u8) -> Self {
        Self { elements, backing: Backing::Private, rmbs: Vec::new() }
    }

    /// The same, for RNICs that want RMBs of such pages.
    pub fn backed_by(self, backing: Backing) -> Self {
        Self { backing, ..self }
    }

    /// Takes an element of this size from an RMB that the peer knows, if one is home.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when the budget has no room for it.
    fn take(&mut self, size: RmbeSize, budget: &mut Budget) -> Result<Option<Rmbe>, Exhausted> {
        let known = |one: &&mut Registered| one.standing == Standing::Known && one.size == size;
        // RFC 7609 4.1 #3: RMBs of several element sizes
        let known = self.rmbs.iter_mut().filter(known);
        // The oldest first, so that the younger can fall idle.
        for one in known {
            if one.rmb.in_use() == one.rmb.elements() {
                continue;
            }
            if !one.pinned && budget.take(size.bytes().into()).is_err() {
                continue;
            }
            one.idle_since = None;
            return Ok(one.rmb.take());
        }
        // Another RMB would not help.
        if budget.left() < size.bytes().into() { Err(Exhausted) } else { Ok(None) }
    }

    /// Takes the smallest element that is home and has one of these sizes.
    pub fn take_up(
        &mut self,
        sizes: RangeInclusive<RmbeSize>,
        budget: &mut Budget,
    ) -> Option<Rmbe> {
        notations(&sizes).find_map(|size| self.take(size, budget).ok().flatten())
    }

    /// Takes the largest element that is home and has one of these sizes.
    pub fn take_down(
        &mut self,
        sizes: RangeInclusive<RmbeSize>,
        budget: &mut Budget,
    ) -> Option<Rmbe> {
        notations(&sizes).rev().find_map(|size| self.take(size, budget).ok().flatten())
    }

    /// Takes an element back.
    ///
    /// # Panics
    ///
    /// If it is of another stock.
    pub fn give_back(&mut self, now: Instant, rmbe: Rmbe, budget: &mut Budget) {
        let capacity = u64::from(rmbe.capacity());
        let address = rmbe.rmb_address();
        let home = self.rmbs.iter_mut().find(|one| one.rmb.region().address() == address);
        let home = home.expect("an element goes back where it came from");
        home.rmb.give_back(rmbe);
        if !home.pinned {
            budget.give_back(capacity);
        }
        home.idle_since = (home.rmb.in_use() == 0).then_some(now);
    }

    /// Whether few elements of these sizes are left to offer, and no RMB with such is being
    /// announced.
    pub fn runs_low(&self, sizes: &RangeInclusive<RmbeSize>) -> bool {
        let all = self.known(sizes).map(|one| u32::from(one.rmb.elements())).sum::<u32>();
        self.free(sizes) < (all / LOW_SHARE).max(1) && !self.is_growing(sizes)
    }

    /// How many elements of these sizes are home, in RMBs that the peer knows.
    pub fn free(&self, sizes: &RangeInclusive<RmbeSize>) -> u32 {
        self.known(sizes).map(|one| u32::from(one.rmb.elements() - one.rmb.in_use())).sum()
    }

    fn known(&self, sizes: &RangeInclusive<RmbeSize>) -> impl Iterator<Item = &Registered> {
        let is_known = |one: &&Registered| one.standing == Standing::Known;
        self.rmbs.iter().filter(is_known).filter(|one| sizes.contains(&one.size))
    }

    /// Whether an RMB with elements of one of these sizes is being announced.
    pub fn is_growing(&self, sizes: &RangeInclusive<RmbeSize>) -> bool {
        let is_announced = |one: &&Registered| one.standing == Standing::Announced;
        self.rmbs.iter().filter(is_announced).any(|one| sizes.contains(&one.size))
    }

    /// An RMB that has been idle for so long that it can be withdrawn: the youngest, and never the
    /// last that the peer knows, nor the first of the largest elements.
    // RFC 7609 3.5.5.2.2 #1: delete only unused RMBs
    // RFC 7609 3.5.5.2.2 #2: keep unused RMB for a while
    pub fn long_idle(&self, now: Instant) -> Option<RmbIndex> {
        let idle = |one: &&Registered| one.idle_since.is_some_and(|since| now.since(since) >= IDLE);
        self.dispensable().filter(idle).map(|one| one.index).last()
    }

    /// When [`long_idle`](Self::long_idle) may have something to say, at the latest.
    pub fn idle_deadline(&self) -> Option<Instant> {
        self.dispensable().filter_map(|one| one.idle_since).min().map(|since| since + IDLE)
    }

    /// All RMBs that the peer knows, but for one of the largest elements: who comes to an idle
    /// group next must not get a small one.
    fn dispensable(&self) -> impl Iterator<Item = &Registered> {
        let known = || self.rmbs.iter().filter(|one| one.standing == Standing::Known);
        let kept = known().rev().max_by_key(|one| one.size).map(|one| one.index);
        known().filter(move |one| Some(one.index) != kept)
    }

    /// Notes what the peer knows of an RMB now.
    pub fn set_standing(&mut self, index: RmbIndex, standing: Standing) {
        if let Some(one) = self.rmbs.iter_mut().find(|one| one.index == index) {
            one.standing = standing;
        }
    }

    /// Keys and addresses of all RMBs with one RNIC.
    pub fn keys_on(&self, port: PortId) -> Vec<(RmbIndex, Rkey, u64)> {
        let keys = self.rmbs.iter().flat_map(|one| one.keys.iter().map(move |key| (one, key)));
        let here = keys.filter(|(_, (other, _))| *other == port);
        here.map(|(one, (_, key))| (one.index, key.rkey, key.address)).collect()
    }

    /// The oldest RMB.
    pub fn first(&self) -> Option<RmbIndex> {
        self.rmbs.first().map(|one| one.index)
    }

    /// Keys and addresses of one RMB, with every RNIC that knows it.
    pub fn keys_of(&self, index: RmbIndex) -> Vec<(PortId, Rkey, u64)> {
        let keys = self.rmbs.iter().filter(|one| one.index == index).flat_map(|one| &one.keys);
        keys.map(|(port, key)| (*port, key.rkey, key.address)).collect()
    }

    /// What the peer must be told to reach the RMB of this element through a link on `port`: key
    /// and address.
    pub fn key(&self, rmbe: &Rmbe, port: PortId) -> Option<(Rkey, u64)> {
        let address = rmbe.rmb_address();
        let home = self.rmbs.iter().find(|one| one.rmb.region().address() == address)?;
        let (_, registration) = home.keys.iter().find(|(other, _)| *other == port)?;
        Some((registration.rkey, registration.address))
    }

    /// The most connections for which there can be elements.
    pub fn connections_max(&self) -> usize {
        usize::from(OUR_RMBS_MAX) * usize::from(self.elements)
    }

    /// How many RMBs there are.
    pub fn rmbs(&self) -> u32 {
        u32::try_from(self.rmbs.len()).expect("few RMBs")
    }

    /// How many elements there are, and how many of them are in use.
    pub fn elements(&self) -> (u64, u64) {
        let sum =
            |count: fn(&Rmb) -> u8| self.rmbs.iter().map(|one| u64::from(count(&one.rmb))).sum();
        (sum(Rmb::elements), sum(Rmb::in_use))
    }

    /// Bytes registered.
    pub fn bytes(&self) -> u64 {
        self.rmbs.iter().map(Registered::bytes).sum()
    }

    /// Adds an RMB with elements of this size that no RNIC knows yet.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when there are no addresses or no index left.
    pub fn grow(
        &mut self,
        now: Instant,
        standing: Standing,
        size: RmbeSize,
    ) -> Result<RmbIndex, Exhausted> {
        // RFC 7609 2.1 #2: at most 255 RMBs per peer
        // RFC 7609 2.1 #12: overflow to TCP or parallel group
        let unused = |index: &u8| self.rmbs.iter().all(|one| one.index != RmbIndex(*index));
        let index = RmbIndex((0..OUR_RMBS_MAX).find(unused).ok_or(Exhausted)?);
        let before = self.rmbs.iter().filter(|one| one.size == size);
        let most = before.map(|one| u32::from(one.rmb.elements())).max();
        let elements = most.map_or(FIRST_ELEMENTS, |most| most * GROWTH).min(self.elements.into());
        let len = size.bytes() as usize * elements as usize;
        let region = Region::backed_by(self.backing, len).map_err(|_| Exhausted)?;
        let rmb = Rmb::carve(region, size);
        let idle_since = Some(now);
        let (keys, pinned) = (Vec::new(), false);
        self.rmbs.push(Registered { index, rmb, size, keys, pinned, standing, idle_since });
        Ok(index)
    }

    /// Registers with an RNIC what it does not know yet.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when there is no key left, or when the RNIC pins memory and the budget has no
    /// room for it. What was registered stays so.
    pub fn register(
        &mut self,
        port: PortId,
        domain: Domain,
        rnic: &mut impl Rnic,
        budget: &mut Budget,
    ) -> Result<(), Exhausted> {
        for one in &mut self.rmbs {
            if one.keys.iter().all(|(other, _)| *other != port) {
                if rnic.pins() && !one.pinned {
                    budget.take(one.bytes() - one.bytes_out())?;
                    one.pinned = true;
                }
                one.keys.push((port, rnic.register(domain, one.rmb.region())?));
            }
        }
        Ok(())
    }

    /// Gives up an RMB that the peer does not know any more, or never came to know. The caller
    /// deregisters it.
    ///
    /// # Panics
    ///
    /// If an element is out, or if it was given up before.
    pub fn discard(&mut self, index: RmbIndex, budget: &mut Budget) -> Vec<(PortId, Registration)> {
        let place = self.rmbs.iter().position(|one| one.index == index);
        // The machine says once that the peer refuses an RMB, or has let it go.
        let place = place.expect("an RMB is discarded once");
        let one = self.rmbs.remove(place);
        assert_eq!(one.rmb.in_use(), 0);
        one.refund(budget);
        one.keys
    }

    /// Withdraws everything from an RNIC.
    pub fn withdraw(&mut self, port: PortId, rnic: &mut impl Rnic) {
        for one in &mut self.rmbs {
            let place = one.keys.iter().position(|(other, _)| *other == port);
            if let Some(place) = place {
                rnic.deregister(one.keys.swap_remove(place).1);
            }
        }
    }

    /// Ends what is left of the stock.
    ///
    /// # Panics
    ///
    /// If an element is still out, or an RNIC still knows of it.
    pub fn close(self, budget: &mut Budget) {
        for one in self.rmbs {
            assert_eq!(one.rmb.in_use(), 0);
            one.refund(budget);
            assert!(one.keys.is_empty(), "what is registered may be written");
        }
    }
}

impl Registered {
    fn bytes(&self) -> u64 {
        self.rmb.region().len() as u64
    }

    /// Bytes of the elements that are out.
    fn bytes_out(&self) -> u64 {
        u64::from(self.rmb.in_use()) * u64::from(self.size.bytes())
    }

    /// Gives back what the RMB has taken as a whole. No element may be out.
    fn refund(&self, budget: &mut Budget) {
        if self.pinned {
            budget.give_back(self.bytes());
        }
    }
}

/// The size of the element that a newcomer gets, of at most `most`: the more connections there are,
/// the smaller, down to `least`.
pub fn size_for_one_more(connections: usize, most: RmbeSize, least: RmbeSize) -> RmbeSize {
    let (mut size, mut connections) = (most, connections);
    while size > least && connections >= FEW {
        (size, connections) = (size.half(), connections / 2);
    }
    size
}

fn notations(sizes: &RangeInclusive<RmbeSize>) -> impl DoubleEndedIterator<Item = RmbeSize> {
    (sizes.start().notation()..=sizes.end().notation()).map(RmbeSize::from_notation)
}

/// Elements of the first RMB of a size. Those that nobody has used cost addresses only, but a
/// thousand peers are ordinary.
const FIRST_ELEMENTS: u32 = 8;
/// How much larger each further RMB is: from 8 to 255 elements in three rounds.
const GROWTH: u32 = 4;
/// Another RMB is announced when fewer than this share of all elements is left, or none.
const LOW_SHARE: u32 = 8;
/// Connections that get elements of full size. In a crowd each of them seldom has much under way,
/// and memory that all of them fill is more than a host can spare.
const FEW: usize = 512;
/// How long an RMB stays without connections.
const IDLE: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use smcr_proto::{Gid, MacAddress, Mtu};
    use smcr_rnic::Port;
    use smcr_rnic::dice::Chance;
    use smcr_rnic::sim::{Network, Odds};

    use super::*;

    /// Nine thousand connections that all fill their elements take what a host can spare, and a
    /// few of them have elements that carry a stream well.
    #[test]
    fn the_more_connections_there_are_the_smaller_are_new_elements() {
        let size = |kib: u32| RmbeSize::from_bytes(kib << 10).unwrap();
        let (most, least) = (size(256), size(16));
        for (connections, kib) in
            [(0, 256), (511, 256), (512, 128), (1024, 64), (2048, 32), (4096, 16), (60_000, 16)]
        {
            assert_eq!(size_for_one_more(connections, most, least), size(kib), "{connections}");
        }
        let all: u32 = (0..9000).map(|it| size_for_one_more(it, most, least).bytes()).sum();
        assert!(all < 9000 * 50_000, "{all}");
        for wish in [(most, most), (size(16), size(16)), (size(512), size(512))] {
            assert_eq!(size_for_one_more(9000, wish.0, wish.1), wish.0, "an operator's");
        }
    }

    /// An element that is there serves a newcomer at once, and what no RMB can be made for is no
    /// reason to stay TCP.
    #[test]
    fn elements_of_other_sizes_serve_as_well() {
        let size = |kib: u32| RmbeSize::from_bytes(kib << 10).unwrap();
        let (mut stock, mut budget) = (Stock::new(1), Budget::new(1 << 20));
        for kib in [128, 16, 64] {
            stock.grow(NOW, Standing::Known, size(kib)).unwrap();
        }
        let mut take = |from: u32, to: u32| {
            let taken = stock.take_up(size(from)..=size(to), &mut budget);
            taken.map(|rmbe| rmbe.capacity() >> 10)
        };
        assert_eq!(take(32, 256), Some(64), "the smallest that suffices");
        assert_eq!(take(32, 64), None, "no listener gets more than its own size");
        assert_eq!(take(32, 256), Some(128));
        let smaller = stock.take_down(size(16)..=size(64), &mut budget);
        assert_eq!(smaller.map(|rmbe| rmbe.capacity()), Some(16_384));
        assert!(stock.take_down(size(16)..=size(64), &mut budget).is_none());
    }

    const NOW: Instant = Instant(1);

    /// The last connections that fit get an element; the next one stays TCP; and what a finished
    /// group held serves others. What nobody uses does not count.
    #[test]
    fn a_budget_is_used_up_and_comes_back() {
        let mut budget = Budget::new(5 * 16_384 + 100);
        let size = RmbeSize::from_bytes(16_384).unwrap();
        let mut stocks: Vec<_> = (0..10).map(|_| Stock::new(3)).collect();
        for stock in &mut stocks {
            stock.grow(NOW, Standing::Known, size).unwrap();
        }
        let mut taken = Vec::new();
        for stock in &mut stocks[..5] {
            taken.push(stock.take(size, &mut budget).unwrap().unwrap());
        }
        for stock in &mut stocks {
            assert_eq!(stock.take(size, &mut budget).err(), Some(Exhausted));
        }
        for (stock, rmbe) in stocks.iter_mut().zip(taken) {
            stock.give_back(NOW, rmbe, &mut budget);
        }
        let last = stocks.last_mut().unwrap();
        let taken: Vec<_> = (0..3).map(|_| last.take(size, &mut budget).unwrap()).collect();
        assert!(taken.iter().all(Option::is_some));
        assert!(last.take(size, &mut budget).unwrap().is_none(), "three elements");
        taken.into_iter().flatten().for_each(|rmbe| last.give_back(NOW, rmbe, &mut budget));
        stocks.into_iter().for_each(|stock| stock.close(&mut budget));
        assert_eq!(budget.left(), 5 * 16_384 + 100);
    }

    /// Ninety peers with one connection each must not reserve what ninety with 255 each need; and a
    /// peer with many gets there in a few rounds.
    #[test]
    fn rmbs_grow_with_use() {
        let mut budget = Budget::new(1 << 30);
        let size = RmbeSize::from_bytes(16_384).unwrap();
        let mut stock = Stock::new(255);
        let (mut taken, mut sizes) = (Vec::new(), Vec::new());
        for _ in 0..255 {
            if stock.runs_low(&(size..=size)) {
                let before = stock.elements().0;
                stock.grow(NOW, Standing::Known, size).unwrap();
                sizes.push((taken.len(), stock.elements().0 - before));
            }
            taken.push(stock.take(size, &mut budget).unwrap().unwrap());
        }
        assert_eq!(sizes, [(0, 8), (8, 32), (36, 128), (148, 255)]);
        taken.into_iter().for_each(|rmbe| stock.give_back(NOW, rmbe, &mut budget));
        stock.close(&mut budget);
    }

    /// A peer reaches an element through every RNIC of the group, by keys of its own, and through
    /// none any more once it was withdrawn there.
    #[test]
    fn an_rmb_has_a_key_with_every_rnic() {
        let network = Network::new(1, Odds::CALM);
        let mut nics: Vec<_> = (1..=2)
            .map(|number| {
                let mac = MacAddress([number; 6]);
                network.rnic(Port { gid: Gid([number; 16]), mac, mtu: Mtu::B1024 }).0
            })
            .collect();
        let mut budget = Budget::new(1 << 20);
        let size = RmbeSize::from_bytes(16_384).unwrap();
        let mut stock = Stock::new(3);
        stock.grow(NOW, Standing::Known, size).unwrap();
        for (index, nic) in nics.iter_mut().enumerate() {
            let domain = nic.open_domain().unwrap();
            stock.register(PortId(index), domain, nic, &mut budget).unwrap();
            stock.register(PortId(index), domain, nic, &mut budget).unwrap();
        }
        let rmbe = stock.take(size, &mut budget).unwrap().unwrap();
        assert!(stock.key(&rmbe, PortId(0)).is_some() && stock.key(&rmbe, PortId(1)).is_some());
        stock.withdraw(PortId(0), &mut nics[0]);
        assert_eq!(stock.key(&rmbe, PortId(0)), None);
        assert!(stock.key(&rmbe, PortId(1)).is_some());
        stock.give_back(NOW, rmbe, &mut budget);
        stock.withdraw(PortId(1), &mut nics[1]);
        stock.close(&mut budget);
    }

    /// Hardware takes memory for elements that nobody uses, too. If only those in use counted, many
    /// peers with one connection each could take all memory of the host.
    #[test]
    fn what_is_pinned_counts_as_a_whole() {
        let port = Port { gid: Gid([1; 16]), mac: MacAddress([1; 6]), mtu: Mtu::B1024 };
        let odds = Odds { pins: Chance::percent(100), ..Odds::CALM };
        let (mut nic, _fabric) = Network::new(1, odds).rnic(port);
        let domain = nic.open_domain().unwrap();
        let size = RmbeSize::from_bytes(16_384).unwrap();
        let all = 2 * 3 * 16_384 + 100;
        let mut budget = Budget::new(all);
        let mut stocks: Vec<_> = (0..3).map(|_| Stock::new(3)).collect();
        for stock in &mut stocks {
            stock.grow(NOW, Standing::Known, size).unwrap();
        }
        // One element is out before the RNIC comes; it counts once.
        let early = stocks[0].take(size, &mut budget).unwrap().unwrap();
        for (index, stock) in stocks.iter_mut().enumerate() {
            let registered = stock.register(PortId(0), domain, &mut nic, &mut budget);
            assert_eq!(registered.is_ok(), index < 2);
        }
        assert_eq!(budget.left(), 100);
        assert_eq!(stocks[2].take(size, &mut budget).err(), Some(Exhausted));
        let late = stocks[0].take(size, &mut budget).unwrap().unwrap();
        for rmbe in [early, late] {
            stocks[0].give_back(NOW, rmbe, &mut budget);
        }
        assert_eq!(budget.left(), 100, "what has come home is pinned still");
        for (_, key) in stocks[1].discard(RmbIndex(0), &mut budget) {
            nic.deregister(key);
        }
        assert_eq!(budget.left(), 3 * 16_384 + 100);
        stocks[0].withdraw(PortId(0), &mut nic);
        stocks.into_iter().for_each(|stock| stock.close(&mut budget));
        assert_eq!(budget.left(), all);
    }

    /// Connections that need large elements and those that are many share a group, each with what
    /// fits; one size that is used up does not make the other scarce.
    // RFC 7609 4.1 #3: RMBs of several element sizes
    #[test]
    fn a_group_has_elements_of_several_sizes() {
        let [small, large] = [16_384, 65_536].map(|bytes| RmbeSize::from_bytes(bytes).unwrap());
        let mut budget = Budget::new(1 << 20);
        let mut stock = Stock::new(2);
        for size in [small, large] {
            assert!(
                stock.take(size, &mut budget).unwrap().is_none() && stock.runs_low(&(size..=size))
            );
            stock.grow(NOW, Standing::Announced, size).unwrap();
            assert!(!stock.runs_low(&(size..=size)), "it is on its way");
        }
        stock.set_standing(RmbIndex(0), Standing::Known);
        stock.set_standing(RmbIndex(1), Standing::Known);
        let mut take = |size| stock.take(size, &mut budget).unwrap();
        let taken = [large, small, large].map(|size| take(size).unwrap());
        assert_eq!(taken.each_ref().map(Rmbe::size), [large, small, large]);
        assert!(
            take(large).is_none()
                && stock.runs_low(&(large..=large))
                && !stock.runs_low(&(small..=small))
        );
        taken.into_iter().for_each(|rmbe| stock.give_back(NOW, rmbe, &mut budget));
        stock.close(&mut budget);
    }
}
