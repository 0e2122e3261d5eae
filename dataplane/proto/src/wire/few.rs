//! A short list without a heap, so that messages are plain values.

use core::fmt;

/// At most `N` items of `T`, in order.
#[derive(Clone, Copy)]
pub struct Few<T, const N: usize> {
    items: [T; N],
    len: usize,
}

impl<T: Copy + Default, const N: usize> Few<T, N> {
    /// An empty list.
    pub fn new() -> Self {
        Self { items: [T::default(); N], len: 0 }
    }

    /// The list of `items`, or `None` if there are more than `N`.
    pub fn from_items(items: impl IntoIterator<Item = T>) -> Option<Self> {
        let mut few = Self::new();
        items.into_iter().try_for_each(|item| few.push(item)).map(|()| few)
    }

    /// Appends one, or returns `None` if there is no room.
    #[must_use = "there may be no room"]
    pub fn push(&mut self, item: T) -> Option<()> {
        *self.items.get_mut(self.len)? = item;
        self.len += 1;
        Some(())
    }

    /// All of them.
    pub fn as_slice(&self) -> &[T] {
        &self.items[..self.len]
    }
}

impl<T: Copy + Default, const N: usize> Default for Few<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Copy + Default + PartialEq, const N: usize> PartialEq for Few<T, N> {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl<T: Copy + Default + Eq, const N: usize> Eq for Few<T, N> {}

impl<T: Copy + Default + fmt::Debug, const N: usize> fmt::Debug for Few<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ninth EID would otherwise overwrite the first, and connections stay TCP.
    #[test]
    fn a_full_list_takes_no_more() {
        let mut few = Few::<u8, 2>::from_items([7, 8]).unwrap();
        assert_eq!(few.push(9), None);
        assert_eq!(few.as_slice(), [7, 8]);
        assert_eq!(Few::<u8, 2>::from_items([1, 2, 3]), None);
    }
}
