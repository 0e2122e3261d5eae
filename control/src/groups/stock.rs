//! The RMBs of a link group: registered with every RNIC of the group, taken and given back element
//! by element.

use smcr_memory::{Region, Rmb, Rmbe};
use smcr_proto::{Rkey, RmbeSize};
use smcr_rnic::{Domain, Exhausted, Registration, Rnic};

use super::ports::PortId;

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
    size: RmbeSize,
    elements: u8,
    rmbs: Vec<Registered>,
}

#[derive(Debug)]
struct Registered {
    rmb: Rmb,
    /// With each RNIC of the group.
    keys: Vec<(PortId, Registration)>,
}

impl Stock {
    /// An empty stock of RMBs with `elements` elements of `size` each.
    pub fn new(size: RmbeSize, elements: u8) -> Self {
        Self { size, elements, rmbs: Vec::new() }
    }

    /// Takes an element, if one is home.
    pub fn take(&mut self) -> Option<Rmbe> {
        // The oldest first, so that the younger can fall idle.
        self.rmbs.iter_mut().find_map(|one| one.rmb.take())
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

    /// What the peer must be told to reach the RMB of this element through a link on `port`: key
    /// and address.
    pub fn key(&self, rmbe: &Rmbe, port: PortId) -> Option<(Rkey, u64)> {
        let address = rmbe.rmb_address();
        let home = self.rmbs.iter().find(|one| one.rmb.region().address() == address)?;
        let (_, registration) = home.keys.iter().find(|(other, _)| *other == port)?;
        Some((registration.rkey, registration.address))
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

    /// Adds an RMB that no RNIC knows yet.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when there is no budget or no memory left.
    pub fn grow(&mut self, budget: &mut Budget) -> Result<(), Exhausted> {
        let element_bytes = u64::from(self.size.bytes());
        let bytes = element_bytes * (budget.bytes / element_bytes).min(self.elements.into());
        if bytes == 0 {
            return Err(Exhausted);
        }
        let len = usize::try_from(bytes).map_err(|_| Exhausted)?;
        let region = Region::new(len).map_err(|_| Exhausted)?;
        budget.bytes -= bytes;
        self.rmbs.push(Registered { rmb: Rmb::carve(region, self.size), keys: Vec::new() });
        Ok(())
    }

    /// Registers with an RNIC what it does not know yet.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when there is no key left. What was registered stays so.
    pub fn register(
        &mut self,
        port: PortId,
        domain: Domain,
        rnic: &mut impl Rnic,
    ) -> Result<(), Exhausted> {
        for one in &mut self.rmbs {
            if one.keys.iter().all(|(other, _)| *other != port) {
                one.keys.push((port, rnic.register(domain, one.rmb.region())?));
            }
        }
        Ok(())
    }

    /// Gives up the youngest RMB, which no peer was told of.
    pub fn shrink(&mut self, budget: &mut Budget) -> Vec<(PortId, Registration)> {
        let Some(one) = self.rmbs.pop() else { return Vec::new() };
        budget.bytes += one.rmb.region().len() as u64;
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

    /// Returns the memory to the budget.
    ///
    /// # Panics
    ///
    /// If an element is still out, or an RNIC still knows of it.
    pub fn close(self, budget: &mut Budget) {
        budget.bytes += self.bytes();
        for one in self.rmbs {
            assert_eq!(one.rmb.in_use(), 0);
            assert!(one.keys.is_empty(), "what is registered may be written");
        }
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
        let mut budget = Budget::new(5 * 16_384 + 100);
        let size = RmbeSize::from_bytes(16_384).unwrap();
        let mut stock = Stock::new(size, 3);
        let mut taken = Vec::new();
        for _ in 0..5 {
            if stock.elements().0 == taken.len() as u64 {
                stock.grow(&mut budget).unwrap();
            }
            taken.push(stock.take().unwrap());
        }
        assert_eq!((stock.rmbs(), stock.elements()), (2, (5, 5)), "three elements, then two");
        assert!(stock.take().is_none());
        assert_eq!(stock.grow(&mut budget), Err(Exhausted));
        for rmbe in taken {
            stock.give_back(rmbe);
        }
        stock.close(&mut budget);

        let mut other = Stock::new(size, 255);
        other.grow(&mut budget).unwrap();
        let rmbe = other.take().unwrap();
        assert_eq!(other.elements(), (5, 1));
        other.give_back(rmbe);
        other.close(&mut budget);
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
        let mut stock = Stock::new(RmbeSize::from_bytes(16_384).unwrap(), 3);
        stock.grow(&mut budget).unwrap();
        for (index, nic) in nics.iter_mut().enumerate() {
            let domain = nic.open_domain().unwrap();
            stock.register(PortId(index), domain, nic).unwrap();
            stock.register(PortId(index), domain, nic).unwrap();
        }
        let rmbe = stock.take().unwrap();
        assert!(stock.key(&rmbe, PortId(0)).is_some() && stock.key(&rmbe, PortId(1)).is_some());
        stock.withdraw(PortId(0), &mut nics[0]);
        assert_eq!(stock.key(&rmbe, PortId(0)), None);
        assert!(stock.key(&rmbe, PortId(1)).is_some());
        stock.give_back(rmbe);
        stock.withdraw(PortId(1), &mut nics[1]);
        stock.close(&mut budget);
    }
}
