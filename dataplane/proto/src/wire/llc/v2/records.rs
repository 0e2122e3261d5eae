//! The list at the end of a message: as many records as its count says.

use core::fmt;
use core::ops::Range;

use super::super::add_link::RkeyPair;
use crate::vocabulary::{Gid, Rkey};
use crate::wire::{array, put, u32_at};

/// An item of a list in a message. All items of a list have the same length.
pub trait Record: Copy {
    /// Its length in bytes.
    const LEN: usize;

    /// Reads it from [`Self::LEN`] bytes.
    fn read(bytes: &[u8]) -> Self;

    /// Writes it to [`Self::LEN`] bytes.
    fn write(self, bytes: &mut [u8]);
}

impl Record for Rkey {
    const LEN: usize = 4;

    fn read(bytes: &[u8]) -> Self {
        Self(u32_at(bytes, 0..Self::LEN))
    }

    fn write(self, bytes: &mut [u8]) {
        put(bytes, 0..Self::LEN, &self.0.to_be_bytes());
    }
}

impl Record for Gid {
    const LEN: usize = 16;

    fn read(bytes: &[u8]) -> Self {
        Self(array(bytes, 0..Self::LEN))
    }

    fn write(self, bytes: &mut [u8]) {
        put(bytes, 0..Self::LEN, &self.0);
    }
}

impl Record for RkeyPair {
    const LEN: usize = 16;

    fn read(bytes: &[u8]) -> Self {
        Self::decode(bytes)
    }

    fn write(self, bytes: &mut [u8]) {
        self.encode_into(bytes);
    }
}

/// A list of records, borrowed from the received message or from whoever sends it, so that no
/// message of 8 KiB is copied.
#[derive(Clone, Copy)]
pub struct Records<'a, T>(Source<'a, T>);

#[derive(Clone, Copy)]
enum Source<'a, T> {
    Received(&'a [u8]),
    Ours(&'a [T]),
}

impl<'a, T: Record> Records<'a, T> {
    /// Those to send.
    pub const fn ours(records: &'a [T]) -> Self {
        Self(Source::Ours(records))
    }

    /// The first `count` in `bytes`, if so many are there.
    pub(super) fn received(bytes: &'a [u8], count: u8) -> Option<Self> {
        bytes.get(..usize::from(count) * T::LEN).map(|bytes| Self(Source::Received(bytes)))
    }

    /// How many there are.
    pub const fn len(&self) -> usize {
        match self.0 {
            Source::Received(bytes) => bytes.len() / T::LEN,
            Source::Ours(records) => records.len(),
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them.
    pub fn iter(self) -> impl Iterator<Item = T> + 'a
    where
        T: 'a,
    {
        (0..self.len()).map(move |index| match self.0 {
            Source::Received(bytes) => T::read(&bytes[Self::place(index)]),
            Source::Ours(records) => records[index],
        })
    }

    /// How many there are, for the count field of a message.
    ///
    /// # Panics
    ///
    /// If there are more than 255: they are ours.
    pub(super) fn count(&self) -> u8 {
        u8::try_from(self.len()).expect("a message lists at most 255")
    }

    /// Writes them to the beginning of `bytes`.
    pub(super) fn write_into(self, bytes: &mut [u8]) {
        self.iter().enumerate().for_each(|(at, record)| record.write(&mut bytes[Self::place(at)]));
    }

    fn place(index: usize) -> Range<usize> {
        index * T::LEN..(index + 1) * T::LEN
    }
}

impl<T: Record + PartialEq> PartialEq for Records<'_, T> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<T: Record + Eq> Eq for Records<'_, T> {}

impl<T: Record + fmt::Debug> fmt::Debug for Records<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
