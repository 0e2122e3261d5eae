//! What a machine wants its caller to do, in order, in a fixed place.

/// A queue of at most `N` actions.
#[derive(Clone, Debug)]
pub(crate) struct Outbox<T, const N: usize> {
    /// The oldest first; the filled places are at the front.
    slots: [Option<T>; N],
}

impl<T: Copy, const N: usize> Outbox<T, N> {
    pub(crate) const fn new() -> Self {
        Self { slots: [None; N] }
    }

    /// Appends an action.
    ///
    /// # Panics
    ///
    /// If there is no room: the caller did not drain the machine after the last input.
    pub(crate) fn push(&mut self, action: T) {
        let free = self.slots.iter_mut().find(|slot| slot.is_none());
        *free.expect("actions are drained after every input") = Some(action);
    }

    /// Takes the oldest action.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let oldest = self.slots.first_mut()?.take();
        self.slots.rotate_left(1);
        oldest
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
