//! Why root may be denied what it was never denied before.

use std::io;

use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};

/// What to add to `error`, for an operator who knows that root may do everything; nothing if that
/// is not the reason.
pub fn what_root_lacks(error: &io::Error) -> &'static str {
    // EPERM has other reasons: what is not permitted has nothing to do with who owns a file.
    if Errno::from_io_error(error) != Some(Errno::ACCESS) || !geteuid().is_root() {
        return "";
    }
    let has = capabilities(None).is_ok_and(|it| it.effective.contains(CapabilitySet::DAC_OVERRIDE));
    if has { "" } else { LACKS }
}

const LACKS: &str = "; root has no CAP_DAC_OVERRIDE here, because the gateway has given it up or \
                     was started without it: let root own the directory, or run the gateway as \
                     its owner, or write drop_capabilities = false under [confine]";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confine::capabilities::drop_all_but;

    /// Root that is refused a directory of another user looks for the reason everywhere else.
    #[test]
    fn root_learns_what_it_has_given_up() {
        let lacks = std::thread::spawn(|| {
            drop_all_but(CapabilitySet::NET_BIND_SERVICE).unwrap();
            [Errno::ACCESS, Errno::PERM].map(|errno| what_root_lacks(&errno.into()))
        });
        let expected = if geteuid().is_root() { LACKS } else { "" };
        assert_eq!(lacks.join().unwrap(), [expected, ""]);
    }
}
