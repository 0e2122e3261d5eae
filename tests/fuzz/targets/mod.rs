//! What the fuzzer calls: one module per target, each with one function `run` that takes any bytes
//! and panics only where the program is wrong.
//!
//! Bytes are instructions to the target: what a peer sends, and in what order with what else. They
//! are read by [`Input`], which is at its end when there are none, so every input means something.

pub mod cdc;
pub mod clc;
pub mod config;
pub mod door;
pub mod llc;
pub mod pcap;
pub mod rings;
pub mod roce;
pub mod shortcut;

/// Bytes that are taken from the front.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// The next byte, if there is one.
    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next two bytes, in network order; what is missing is zero.
    pub fn short(&mut self) -> u16 {
        u16::from_be_bytes([self.byte().unwrap_or(0), self.byte().unwrap_or(0)])
    }

    /// The next four, likewise.
    pub fn word(&mut self) -> u32 {
        u32::from(self.short()) << 16 | u32::from(self.short())
    }

    /// The next `len` bytes, or all that are left.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        first
    }
}
