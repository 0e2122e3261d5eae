//! A capture that somebody sent us.

use smcgate::tools::decode::decode;

/// Decodes `data` as a capture file, and prints every line.
///
/// # Panics
///
/// If what was shown is not what was counted.
pub fn run(data: &[u8]) {
    let mut lines = 0;
    let decoded = decode(data, &mut |line| {
        lines += 1;
        assert!(!line.to_string().is_empty());
        Ok(())
    });
    if let Ok(summary) = decoded {
        assert_eq!(summary.lines, lines);
    }
}
