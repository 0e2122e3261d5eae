//! The harness.

fn main() {}
