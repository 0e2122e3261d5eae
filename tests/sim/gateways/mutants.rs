//! Faults of our own, planted where the simulator can reach: the judges must notice each.
