//! The RMBs of a link group: registered ahead of need, taken and given back element by element.

use smcr_memory::{Region, Rmb, Rmbe};
use smcr_proto::{Rkey, RmbeSize};
use smcr_rnic::{Domain, Exhausted, Registration, Rnic};

/// What a connection gets: an element, and how the peer reaches it.
#[derive(Debug)]
pub struct Element {
    /// Ours to read.
    pub rmbe: Rmbe,
    /// The peer's key to it.
    pub rkey: Rkey,
    /// Where its RMB begins, as the peer must name it.
    pub rmb_address: u64,
}

/// The stock of one link group. All RMBs have the same shape.
#[derive(Debug)]
pub struct Stock {
    domain: Domain,
    size: RmbeSize,
    elements: u8,
    rmbs: Vec<Registered>,
}

#[derive(Debug)]
struct Registered {
    rmb: Rmb,
    registration: Registration,
}

impl Stock {
    /// An empty stock of RMBs with `elements` elements of `size` each.
    pub fn new(domain: Domain, size: RmbeSize, elements: u8) -> Self {
        Self { domain, size, elements, rmbs: Vec::new() }
    }

    /// Takes an element, registering another RMB if all are in use.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when there is no memory or no key left.
    pub fn take(&mut self, rnic: &mut impl Rnic) -> Result<Element, Exhausted> {
        if self.rmbs.iter().all(|one| one.rmb.in_use() == one.rmb.elements()) {
            self.grow(rnic)?;
        }
        // The oldest first, so that the younger can fall idle.
        let found = self.rmbs.iter_mut().find_map(|one| Some((one.rmb.take()?, &one.registration)));
        let (rmbe, registration) = found.expect("the stock has just grown if it was empty");
        Ok(Element { rmbe, rkey: registration.rkey, rmb_address: registration.address })
    }

    /// Takes an element back.
    ///
    /// # Panics
    ///
    /// If it is of another stock.
    pub fn give_back(&mut self, rmbe: Rmbe) {
        let address = rmbe.rmb_address();
        let home = self.rmbs.iter_mut().find(|one| one.rmb.region().address() == address);
        home.expect("an element goes back where it came from").rmb.give_back(rmbe);
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
        self.rmbs.iter().map(|one| one.rmb.region().len() as u64).sum()
    }

    /// Withdraws everything from the NIC.
    ///
    /// # Panics
    ///
    /// If an element is still out.
    pub fn close(self, rnic: &mut impl Rnic) {
        for one in self.rmbs {
            assert_eq!(one.rmb.in_use(), 0);
            rnic.deregister(one.registration);
        }
    }

    fn grow(&mut self, rnic: &mut impl Rnic) -> Result<(), Exhausted> {
        let bytes = self.size.bytes() as usize * usize::from(self.elements);
        let region = Region::new(bytes).map_err(|_| Exhausted)?;
        let registration = rnic.register(self.domain, &region)?;
        self.rmbs.push(Registered { rmb: Rmb::carve(region, self.size), registration });
        Ok(())
    }
}
