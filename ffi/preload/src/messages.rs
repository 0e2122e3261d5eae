//! Several messages in one call, as the kernel moves them.

use libc::{c_int, mmsghdr, ssize_t};

/// What became of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// As `sendmsg` and `recvmsg` say it.
    pub(crate) result: ssize_t,
    /// Whether the next one may follow. Behind a message that was sent in part, its bytes would
    /// stand in the place of the rest.
    pub(crate) goes_on: bool,
}

/// Has `act` move one message after the other until one fails; it hears whether it is the first.
/// Returns how many were moved, or -1 if the first has failed.
pub(crate) fn each(
    messages: &mut [mmsghdr],
    mut act: impl FnMut(&mut mmsghdr, bool) -> Moved,
) -> c_int {
    let mut count: c_int = 0;
    for message in messages.iter_mut().take(MESSAGES_MAX) {
        let Moved { result, goes_on } = act(message, count == 0);
        let Ok(length) = result.try_into() else {
            return if count == 0 { -1 } else { count };
        };
        message.msg_len = length;
        count += 1;
        if !goes_on {
            break;
        }
    }
    count
}

/// The kernel does not move more by one call (UIO_MAXIOV).
const MESSAGES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves messages with these results, of which those of less than `whole` are cut.
    fn moves(results: &[ssize_t], whole: ssize_t) -> (c_int, Vec<u32>) {
        // SAFETY: all bits zero are messages: numbers, and null.
        let mut messages = vec![unsafe { std::mem::zeroed::<mmsghdr>() }; results.len()];
        let mut left = results.iter();
        let count = each(&mut messages, |_, is_first| {
            assert_eq!(is_first, left.len() == results.len());
            let result = *left.next().unwrap();
            Moved { result, goes_on: result >= whole }
        });
        (count, messages.iter().map(|message| message.msg_len).collect())
    }

    /// A peer would take the second message for the rest of the first.
    #[test]
    fn nothing_follows_a_message_that_was_cut() {
        assert_eq!(moves(&[9, 9, 9], 9), (3, vec![9, 9, 9]));
        assert_eq!(moves(&[9, 5, 9], 9), (2, vec![9, 5, 0]));
        assert_eq!(moves(&[0, 9], 0), (2, vec![0, 9]), "an empty one is whole");
    }

    #[test]
    fn only_the_first_one_fails_the_call() {
        assert_eq!(moves(&[-1, 9], 0), (-1, vec![0, 0]));
        assert_eq!(moves(&[9, -1, 9], 0), (1, vec![9, 0, 0]));
        assert_eq!(moves(&[], 0), (0, vec![]));
        assert_eq!(moves(&[1; MESSAGES_MAX + 1], 0).0, 1024);
    }
}
