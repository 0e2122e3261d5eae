//! Whether it matters to this CPU at which offsets in their pages bytes are copied.

use std::io;

use smcr_engine::spacing::{COPIED, Copies};

use super::Finding;

/// What was `measured`, and whether pollers `may` do something about it.
pub(super) fn finding(measured: io::Result<Copies>, may: io::Result<()>) -> Finding {
    let name = "copies";
    let advice = "pollers send as if offsets in pages did not matter";
    let copies = match measured {
        Ok(copies) => copies,
        Err(error) => {
            let found = format!("how fast the kernel copies cannot be measured: {error}");
            return Finding::warn(name, found, advice);
        }
    };
    let Copies { near, apart } = copies;
    let kib = COPIED / 1_024;
    if !copies.are_slow() {
        let found = format!("the kernel copies {kib} KiB in {apart:.1?}, whatever the offsets");
        return Finding::ok(name, found);
    }
    let found = format!(
        "the kernel copies {kib} KiB in {apart:.1?}, but in {near:.1?} between near offsets in \
         pages"
    );
    match may {
        Ok(()) => {
            let what = "pollers move what they send to programs on this host";
            Finding::ok(name, format!("{found}: {what}"))
        }
        Err(error) => {
            Finding::warn(name, format!("{found}, and 127.0.0.1 is of no use: {error}"), advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tools::doctor::Level;

    #[test]
    fn it_says_what_was_measured_and_what_follows() {
        let of = |near, apart, may| {
            let micros = Duration::from_micros;
            finding(Ok(Copies { near: micros(near), apart: micros(apart) }), may)
        };
        let slow = of(20, 1, Ok(()));
        assert_eq!(slow.level, Level::Ok);
        assert!(slow.found.contains("32 KiB in 1.0µs, but in 20.0µs between"), "{}", slow.found);
        assert!(slow.found.contains(": pollers move"), "{}", slow.found);
        let refused = of(20, 1, Err(io::ErrorKind::NetworkUnreachable.into()));
        assert_eq!(refused.level, Level::Warn);
        assert!(
            refused.found.ends_with("127.0.0.1 is of no use: network unreachable"),
            "{}",
            refused.found
        );
        let even = of(2, 1, Ok(()));
        assert!(even.found.ends_with("32 KiB in 1.0µs, whatever the offsets"), "{}", even.found);
        let unknown = finding(Err(io::ErrorKind::OutOfMemory.into()), Ok(()));
        assert_eq!(unknown.level, Level::Warn);
        assert!(unknown.line().contains("out of memory; pollers send"), "{}", unknown.line());
    }
}
