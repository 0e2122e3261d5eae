//! Capabilities: which are kept, and how the others are dropped for good.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    remove_capability_from_bounding_set, set_capabilities,
};

use super::needs::Needs;

/// The capabilities that are kept, if we have them; none to say that all are.
pub(super) fn kept(needs: &Needs) -> Option<CapabilitySet> {
    if needs.dpdk {
        return None;
    }
    // A listener that a reload brings may be at a low port.
    let mut kept = CapabilitySet::NET_BIND_SERVICE;
    kept.set(CapabilitySet::NET_ADMIN, needs.network || needs.programs || needs.loads_ebpf);
    kept.set(CapabilitySet::BPF, needs.ebpf || needs.loads_ebpf);
    kept.set(CapabilitySet::NET_RAW, needs.packets);
    kept.set(CapabilitySet::SYS_NICE, needs.priority);
    kept.set(CapabilitySet::IPC_LOCK, needs.verbs);
    Some(kept)
}

/// Drops all capabilities of this thread, and of those that it starts from now on, except `kept`.
///
/// # Errors
///
/// When the kernel refuses, which it does to nobody.
pub(super) fn drop_all_but(kept: CapabilitySet) -> io::Result<()> {
    // As long as we may: it is beyond users without CAP_SETPCAP, who gain nothing by it either.
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match capability_is_in_bounding_set(one) {
            Ok(true) if !kept.contains(one) => drop(remove_capability_from_bounding_set(one)),
            Ok(_) => {}
            // The kernel knows no more.
            Err(_) => break,
        }
    }
    let CapabilitySets { effective, permitted, inheritable } = capabilities(None)?;
    let sets = CapabilitySets {
        effective: effective & kept,
        permitted: permitted & kept,
        inheritable: inheritable & kept,
    };
    // What is not permitted any more is not ambient any more.
    set_capabilities(None, sets)?;
    Ok(())
}

/// Their names, as `capabilities(7)` has them.
pub(super) fn names(set: CapabilitySet) -> Vec<String> {
    let known = set.iter_names().map(|(name, _)| format!("CAP_{name}"));
    let unknown = (0..u64::BITS).filter(|number| {
        let one = CapabilitySet::from_bits_retain(1 << number);
        set.contains(one) && !CapabilitySet::all().contains(one)
    });
    known.chain(unknown.map(|number| format!("capability {number}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With CAP_SYS_ADMIN or CAP_SYS_PTRACE, whoever takes a gateway over has the host.
    #[test]
    fn no_configuration_but_one_of_dpdk_keeps_the_keys_to_the_host() {
        let all = Needs {
            programs: true,
            loads_ebpf: true,
            ebpf: true,
            network: true,
            packets: true,
            priority: true,
            realtime: true,
            verbs: true,
            ..Needs::default()
        };
        let kept = kept(&all).unwrap();
        let expected = [
            "CAP_NET_BIND_SERVICE",
            "CAP_NET_ADMIN",
            "CAP_NET_RAW",
            "CAP_IPC_LOCK",
            "CAP_SYS_NICE",
            "CAP_BPF",
        ];
        assert_eq!(names(kept), expected);
        assert_eq!(super::kept(&Needs { dpdk: true, ..all }), None);
        let least = super::kept(&Needs::default()).unwrap();
        assert_eq!(names(least), ["CAP_NET_BIND_SERVICE"]);
    }

    /// It is for the thread that calls, and for those that it starts; no other test notices.
    #[test]
    fn what_is_dropped_is_gone() {
        let gone = std::thread::spawn(|| {
            drop_all_but(CapabilitySet::NET_BIND_SERVICE).unwrap();
            std::thread::spawn(|| capabilities(None).unwrap()).join().unwrap()
        });
        let CapabilitySets { effective, permitted, inheritable } = gone.join().unwrap();
        for set in [effective, permitted, inheritable] {
            assert!(CapabilitySet::NET_BIND_SERVICE.contains(set), "{set:?}");
        }
    }
}
