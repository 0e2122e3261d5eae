//! A bounded queue between two threads, whose receiver may sleep.
//!
//! Sending is one push. Only when the receiver has said that it sleeps does the sender pay for a
//! system call to wake it. Neither end ever waits for the other ([`Queue`]).

use crate::sync::{Arc, AtomicBool, AtomicU64, Bell, Descriptor, Ordering, Queue, fence};

#[derive(Debug)]
struct Mailbox<T> {
    queue: Queue<T>,
    waker: Waker,
}

/// Wakes a thread that sleeps on a descriptor. Shared by all queues that thread receives from.
#[derive(Clone, Debug)]
pub struct Waker {
    inner: Arc<Sleeper>,
}

#[derive(Debug)]
struct Sleeper {
    /// Set by the receiver before its last look at the queues, cleared by whoever wakes it.
    sleeping: AtomicBool,
    /// Rings that the receiver has not counted yet, of those that others have decided on. Only the
    /// receiver touches it.
    owed: AtomicU64,
    bell: Bell,
}

impl Waker {
    /// A waker with its own descriptor.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub fn new() -> std::io::Result<Self> {
        let bell = Bell::new()?;
        let (sleeping, owed) = (AtomicBool::new(false), AtomicU64::new(0));
        Ok(Self { inner: Arc::new(Sleeper { sleeping, owed, bell }) })
    }

    /// Readable when somebody called `wake` while the receiver slept.
    pub fn descriptor(&self) -> Descriptor<'_> {
        self.inner.bell.descriptor()
    }

    /// Whether nothing keeps the receiver asleep: somebody has woken it since it announced its
    /// sleep, or no announcement stands. Costs no system call; the descriptor may become readable a
    /// moment later. For simulations, whose threads sleep on nothing.
    pub fn has_woken(&self) -> bool {
        !self.inner.sleeping.load(Ordering::SeqCst)
    }

    /// Wakes the receiver if it sleeps or is about to.
    pub fn wake(&self) {
        // This fence stands between the push that came before it and the look at the receiver, the
        // receiver's between its announcement and its look at the queue. So one of the two sees
        // the other, however weakly the queue orders its own accesses.
        fence(Ordering::SeqCst);
        if self.inner.sleeping.load(Ordering::SeqCst)
            && self.inner.sleeping.swap(false, Ordering::SeqCst)
        {
            self.inner.bell.ring();
        }
    }

    /// Announces that the receiver is about to sleep. It must look at its queues once more between
    /// this call and the sleep.
    pub fn about_to_sleep(&self) {
        self.inner.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Takes the announcement back, and makes the descriptor unreadable. Call it once for each.
    ///
    /// Who wakes us may come between the two steps of [`Self::wake`] and ring only afterwards. That
    /// ring is owed: it ends one more sleep, and is counted then.
    pub fn awake(&self) {
        let Sleeper { sleeping, owed, bell } = &*self.inner;
        let woken = !sleeping.swap(false, Ordering::SeqCst);
        let expected = owed.load(Ordering::Relaxed) + u64::from(woken);
        if expected > 0 {
            let left = expected.checked_sub(bell.count());
            let left = left.expect("each ring has ended one announcement, once");
            owed.store(left, Ordering::Relaxed);
        }
    }
}

/// The sending end.
#[derive(Debug)]
pub struct Sender<T>(Arc<Mailbox<T>>);

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The receiving end. There is one, for life.
#[derive(Debug)]
pub struct Receiver<T>(Arc<Mailbox<T>>);

/// A queue of `capacity`, rounded up to a power of two, whose receiver is woken by `waker`.
pub fn mailbox<T>(capacity: usize, waker: Waker) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Mailbox { queue: Queue::new(capacity), waker });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl<T> Sender<T> {
    /// Puts `value` in the queue without waking the receiver; follow with `wake`.
    ///
    /// # Errors
    ///
    /// The value, when the queue has no room for it.
    pub fn push(&self, value: T) -> Result<(), T> {
        self.0.queue.push(value)
    }

    /// Wakes the receiver if it sleeps.
    pub fn wake(&self) {
        self.0.waker.wake();
    }

    /// `push` and `wake`.
    ///
    /// # Errors
    ///
    /// The value, when the queue is full.
    pub fn send(&self, value: T) -> Result<(), T> {
        self.push(value)?;
        self.wake();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// The oldest value.
    pub fn receive(&self) -> Option<T> {
        self.0.queue.pop()
    }

    /// The values that are there now, oldest first, and none that comes while they are taken:
    /// otherwise a sender could keep the receiver for ever.
    pub fn waiting(&self) -> impl Iterator<Item = T> {
        (0..self.0.queue.len()).map_while(|_| self.receive())
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.0.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(waker: &Waker) -> bool {
        let descriptor = waker.descriptor();
        let mut set = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut set, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 }))
            .unwrap()
            == 1
    }

    #[test]
    fn only_a_sleeper_is_woken_and_only_once() {
        let waker = Waker::new().unwrap();
        let (sender, receiver) = mailbox(2, waker.clone());
        sender.send(1).unwrap();
        assert!(!readable(&waker));
        assert_eq!(receiver.receive(), Some(1));

        waker.about_to_sleep();
        sender.send(2).unwrap();
        assert!(readable(&waker));
        waker.awake();
        assert!(!readable(&waker));
        assert_eq!(receiver.receive(), Some(2));

        waker.about_to_sleep();
        waker.awake();
        sender.send(3).unwrap();
        assert!(!readable(&waker));
    }

    /// The ring of a thread that was interrupted in the middle of `wake`: a descriptor that stays
    /// readable would keep the receiver from ever sleeping again.
    #[test]
    fn a_late_ring_ends_one_sleep_and_no_more() {
        let waker = Waker::new().unwrap();
        waker.about_to_sleep();
        assert!(waker.inner.sleeping.swap(false, Ordering::SeqCst));
        waker.awake();
        waker.inner.bell.ring();
        waker.about_to_sleep();
        assert!(readable(&waker));
        waker.awake();
        waker.about_to_sleep();
        assert!(!readable(&waker));
        waker.wake();
        assert!(readable(&waker));
        waker.awake();
        assert!(!readable(&waker));
    }

    #[test]
    fn a_full_queue_gives_the_value_back() {
        let (sender, _receiver) = mailbox(1, Waker::new().unwrap());
        assert_eq!(sender.push(1), Ok(()));
        assert_eq!(sender.push(2), Err(2));
    }

    /// A peer that answers faster than the control thread works kept it from everything else.
    #[test]
    fn what_comes_meanwhile_waits_for_the_next_look() {
        let (sender, receiver) = mailbox(8, Waker::new().unwrap());
        (0..3).for_each(|value| sender.push(value).unwrap());
        for value in receiver.waiting() {
            sender.push(value + 10).unwrap();
        }
        assert_eq!(receiver.waiting().collect::<Vec<_>>(), [10, 11, 12]);
        assert_eq!(receiver.waiting().count(), 0);
    }
}
