//! What a device may do to those who use it.

use crate::network::Network;

/// A trouble of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// It was pulled out. The kernel has ended all that the NIC had, and all calls fail with `EIO`,
    /// destroying calls too. A post seems to succeed: it rings a doorbell that nobody hears.
    Gone,
    /// Calls that connect a queue pair do not return: the kernel looks for the peer.
    ConnectsLast,
    /// It carries out what is posted, but says that it did not, and names no request.
    DeniesPosts,
    /// Its completion queues cannot be polled.
    CannotBePolled,
    /// Calls that destroy fail, for a reason that says nothing about the NIC.
    CannotDestroy,
}

impl Network {
    pub(crate) fn trouble(&mut self, name: &str, trouble: Trouble, is_on: bool) {
        let device = self.device(name);
        if is_on {
            device.troubles.insert(trouble);
        } else {
            device.troubles.remove(&trouble);
        }
        if self.has(name, Trouble::Gone) {
            let number = self.devices.iter().position(|one| one.name == name).expect("plugged");
            self.regions.retain(|_, region| region.device != number);
            self.pairs.retain(|_, pair| pair.device != number);
        }
    }

    pub(crate) fn has(&self, name: &str, trouble: Trouble) -> bool {
        let device = self.devices.iter().find(|one| one.name == name).expect("plugged");
        device.troubles.contains(&trouble)
    }

    /// The errno of a call to device `number` that ends an object.
    pub(crate) fn refuses_to_end(&self, number: usize) -> Option<i32> {
        let troubles = &self.devices[number].troubles;
        if troubles.contains(&Trouble::Gone) {
            return Some(libc::EIO);
        }
        troubles.contains(&Trouble::CannotDestroy).then_some(libc::EBUSY)
    }

    /// Whether the limit of device `number` allows to register so many bytes more.
    pub(crate) fn may_register(&self, number: usize, len: usize) -> bool {
        let ours = self.regions.values().filter(|region| region.device == number);
        let registered: u64 = ours.map(|region| region.len).sum();
        registered + len as u64 <= self.devices[number].registered_max
    }

    /// Whether device `number` has the trouble.
    pub(crate) fn suffers(&self, number: usize, trouble: Trouble) -> bool {
        self.devices[number].troubles.contains(&trouble)
    }
}
