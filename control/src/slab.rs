//! A table whose keys never name anything else than what they were given for.

/// An entry of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its index.
    pub index: u32,
    /// How often the index was used before, modulo 2^24.
    pub generation: u32,
}

/// Generations wrap here: whoever packs a key into 64 bits needs the bits above for other things.
pub const GENERATION_MASK: u32 = 0x00ff_ffff;

/// Values by key, in reused places.
#[derive(Debug)]
pub struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    len: usize,
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), len: 0 }
    }
}

impl<T> Slab<T> {
    /// How many values there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts a value in.
    pub fn insert(&mut self, value: T) -> Key {
        self.len += 1;
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.value = Some(value);
            return Key { index, generation: entry.generation };
        }
        let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 entries");
        self.entries.push(Entry { generation: 0, value: Some(value) });
        Key { index, generation: 0 }
    }

    /// The value, unless it was removed.
    pub fn at(&self, key: Key) -> Option<&T> {
        let entry = self.entries.get(key.index as usize)?;
        entry.value.as_ref().filter(|_| entry.generation == key.generation)
    }

    /// The value, unless it was removed.
    pub fn at_mut(&mut self, key: Key) -> Option<&mut T> {
        let entry = self.entries.get_mut(key.index as usize)?;
        entry.value.as_mut().filter(|_| entry.generation == key.generation)
    }

    /// Takes the value out.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let entry = self.entries.get_mut(key.index as usize)?;
        if entry.generation != key.generation {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = (entry.generation + 1) & GENERATION_MASK;
        self.free.push(key.index);
        self.len -= 1;
        Some(value)
    }

    /// Puts what `change` makes of a value in its place.
    ///
    /// # Panics
    ///
    /// If the value was removed.
    pub fn replace(&mut self, key: Key, change: impl FnOnce(T) -> T) {
        let entry = &mut self.entries[key.index as usize];
        assert_eq!(entry.generation, key.generation, "a removed value is replaced by none");
        entry.value = entry.value.take().map(change);
    }

    /// Every key and value.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| {
            let index = u32::try_from(index).expect("fewer than 2^32 entries");
            Some((Key { index, generation: entry.generation }, entry.value.as_ref()?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_a_removed_value_names_nothing() {
        let mut slab = Slab::default();
        let first = slab.insert("a");
        assert_eq!(slab.remove(first), Some("a"));
        let second = slab.insert("b");
        assert_eq!(first.index, second.index);
        assert_eq!(slab.at(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!((slab.at(second), slab.len()), (Some(&"b"), 1));
    }
}
