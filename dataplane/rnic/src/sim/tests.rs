//! What the simulator promises beyond the contract of every backend.
