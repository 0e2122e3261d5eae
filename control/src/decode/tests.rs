//! Captures of other stacks, and damage.
