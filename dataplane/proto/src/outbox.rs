//! A queue of actions without a heap: what a machine demands of its caller, in order.

/// A queue of at most `N` actions.
#[derive(Clone, Debug)]
pub(crate) struct Outbox<T, const N: usize> {
    slots: [Option<T>; N],
    /// The index of the oldest action, and how many there are. The others follow it, and go on at
    /// the beginning of the array.
    first: usize,
    len: usize,
}

impl<T: Copy, const N: usize> Outbox<T, N> {
    pub(crate) const fn new() -> Self {
        Self { slots: [None; N], first: 0, len: 0 }
    }

    /// Appends an action.
    ///
    /// # Panics
    ///
    /// If there is no room: the caller did not drain the machine after the last input.
    pub(crate) fn push(&mut self, action: T) {
        assert!(self.len < N, "actions are drained after every input");
        self.slots[(self.first + self.len) % N] = Some(action);
        self.len += 1;
    }

    /// Takes the oldest action.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let oldest = self.slots[self.first].take()?;
        self.first = (self.first + 1) % N;
        self.len -= 1;
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An Accept sent after the connection was handed over would reach the application.
    #[test]
    fn actions_leave_in_the_order_they_came() {
        let mut outbox = Outbox::<u8, 2>::new();
        outbox.push(1);
        outbox.push(2);
        assert_eq!(outbox.pop(), Some(1));
        outbox.push(3);
        assert_eq!([outbox.pop(), outbox.pop(), outbox.pop()], [Some(2), Some(3), None]);
    }

    #[test]
    #[should_panic(expected = "drained")]
    fn too_many_actions_are_our_bug() {
        let mut outbox = Outbox::<u8, 1>::new();
        outbox.push(1);
        outbox.push(2);
    }
}
