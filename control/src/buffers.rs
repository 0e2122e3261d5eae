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

/// How much memory RMBs may still take, over all link groups.
#[derive(Debug)]
pub struct Budget {
    bytes: u64,
}

impl Budget {
    /// A budget of `bytes`.
    pub fn new(bytes: u64) -> Self {
        Self { bytes }
    }
}

/// The stock of one link group. Its RMBs have elements of one size, and as many of them as the
/// budget had room for.
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
    /// [`Exhausted`] when there is no budget, no memory or no key left.
    pub fn take(
        &mut self,
        rnic: &mut impl Rnic,
        budget: &mut Budget,
    ) -> Result<Element, Exhausted> {
        if self.rmbs.iter().all(|one| one.rmb.in_use() == one.rmb.elements()) {
            self.grow(rnic, budget)?;
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

    /// Withdraws everything from the NIC, and returns the memory to the budget.
    ///
    /// # Panics
    ///
    /// If an element is still out.
    pub fn close(self, rnic: &mut impl Rnic, budget: &mut Budget) {
        budget.bytes += self.bytes();
        for one in self.rmbs {
            assert_eq!(one.rmb.in_use(), 0);
            rnic.deregister(one.registration);
        }
    }

    fn grow(&mut self, rnic: &mut impl Rnic, budget: &mut Budget) -> Result<(), Exhausted> {
        let element_bytes = u64::from(self.size.bytes());
        let bytes = element_bytes * (budget.bytes / element_bytes).min(self.elements.into());
        if bytes == 0 {
            return Err(Exhausted);
        }
        let len = usize::try_from(bytes).map_err(|_| Exhausted)?;
        let region = Region::new(len).map_err(|_| Exhausted)?;
        let registration = rnic.register(self.domain, &region)?;
        budget.bytes -= bytes;
        self.rmbs.push(Registered { rmb: Rmb::carve(region, self.size), registration });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use smcr_proto::{Gid, MacAddress, Mtu};
    use smcr_rnic::Port;
    use smcr_rnic::sim::{Network, Odds};

    use super::*;

    /// The last connections that fit get an element; the next one stays TCP; and what a finished
    /// group held serves others.
    #[test]
    fn a_budget_is_used_up_and_comes_back() {
        let port = Port { gid: Gid([1; 16]), mac: MacAddress([2; 6]), mtu: Mtu::B1024 };
        let (mut rnic, _fabric) = Network::new(1, Odds::CALM).rnic(port);
        let mut budget = Budget::new(5 * 16_384 + 100);
        let size = RmbeSize::from_bytes(16_384).unwrap();
        let domain = rnic.open_domain().unwrap();
        let mut stock = Stock::new(domain, size, 3);
        let taken: Vec<_> =
            (0..5).map(|_| stock.take(&mut rnic, &mut budget).unwrap().rmbe).collect();
        assert_eq!((stock.rmbs(), stock.elements()), (2, (5, 5)), "three elements, then two");
        assert_eq!(stock.take(&mut rnic, &mut budget).unwrap_err(), Exhausted);
        for rmbe in taken {
            stock.give_back(rmbe);
        }
        stock.close(&mut rnic, &mut budget);

        let mut other = Stock::new(domain, size, 255);
        let rmbe = other.take(&mut rnic, &mut budget).unwrap().rmbe;
        assert_eq!(other.elements(), (5, 1));
        other.give_back(rmbe);
        other.close(&mut rnic, &mut budget);
    }
}
