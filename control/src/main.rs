//! The gateway.

fn main() {}
