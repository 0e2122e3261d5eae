//! Those who have called a NIC, and whose queue pair it does not expect yet.

use std::collections::HashMap;
use std::hash::Hash;

use super::doubtful::{Doubtful, Source};
use super::line::Line;
use super::wire::Message;

/// Callers that wait, oldest first.
#[derive(Debug, Default)]
pub(super) struct Callers(Vec<Caller>);

/// A connection that was accepted.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) line: Line,
    /// What it has said, and what came along.
    pub(super) hello: Option<(Message, Vec<Doubtful>)>,
    /// Turns of the clock since it came.
    age: u32,
}

impl Callers {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds one. Call [`make_room`](Self::make_room) when it was heard.
    pub(super) fn add(&mut self, line: Line) {
        self.0.push(Caller { line, hello: None, age: 0 });
    }

    /// If there are too many, returns the connection of the one that must go. Of the user that has
    /// most callers, and then of the process, it is the oldest one that has said nothing, or the
    /// oldest one.
    #[must_use = "the worker must not watch it any more"]
    pub(super) fn make_room(&mut self) -> Option<Line> {
        if self.0.len() <= CALLERS_MAX {
            return None;
        }
        let user = most_frequent(self.0.iter().map(|caller| caller.source().user))?;
        let of_user = self.0.iter().map(Caller::source).filter(|source| source.user == user);
        let source = most_frequent(of_user)?;
        let is_silent = |caller: &Caller| caller.source() == source && caller.hello.is_none();
        let oldest = self.0.iter().position(is_silent);
        let oldest = oldest.or_else(|| self.0.iter().position(|it| it.source() == source))?;
        Some(self.0.remove(oldest).line)
    }

    /// Time has passed. Returns the connections of those who have waited for too long.
    #[must_use = "the worker must not watch them any more"]
    pub(super) fn grow_older(&mut self) -> Vec<Line> {
        self.0.iter_mut().for_each(|caller| caller.age += 1);
        let late = self.0.extract_if(.., |caller| caller.age > AGE_MAX);
        late.map(|caller| caller.line).collect()
    }

    /// The one with the connection of this token.
    pub(super) fn find(&mut self, token: u64) -> Option<&mut Caller> {
        self.0.iter_mut().find(|caller| caller.line.token == token)
    }

    /// The token of the one who has said this.
    pub(super) fn who_said(&self, hello: &Message) -> Option<u64> {
        let said = |caller: &&Caller| caller.hello.as_ref().is_some_and(|(it, _)| it == hello);
        self.0.iter().find(said).map(|caller| caller.line.token)
    }

    /// Takes the one with the connection of this token.
    pub(super) fn take(&mut self, token: u64) -> Option<Caller> {
        let found = self.0.iter().position(|caller| caller.line.token == token)?;
        Some(self.0.remove(found))
    }
}

impl Caller {
    fn source(&self) -> Source {
        self.line.socket.source()
    }
}

/// What is there most often.
fn most_frequent<T: Copy + Eq + Hash>(all: impl Iterator<Item = T>) -> Option<T> {
    let mut counts = HashMap::<T, usize>::new();
    all.for_each(|one| *counts.entry(one).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(one, _)| one)
}

/// Connections that wait, two for each queue pair. One goes if there are more.
const CALLERS_MAX: usize = 512;
/// So many turns of the clock a caller may wait until our own control thread knows it.
const AGE_MAX: u32 = 1_000;

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn line(token: u64) -> Line {
        line_of(token, Source::new(1, 1))
    }

    fn line_of(token: u64, source: Source) -> Line {
        let flags = SocketFlags::CLOEXEC;
        let (socket, _) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        Line { socket: Doubtful::from(socket).of(source), token }
    }

    /// Whoever calls without end keeps only so many descriptors of ours, for only so long.
    #[test]
    fn callers_are_few_and_leave() {
        let mut callers = Callers::default();
        for token in 0..CALLERS_MAX as u64 {
            callers.add(line(token));
            assert!(callers.make_room().is_none());
        }
        callers.add(line(2_000));
        callers.find(2_000).unwrap().hello = Some((Message::Welcome, Vec::new()));
        assert_eq!(callers.make_room().map(|line| line.token), Some(0));
        assert_eq!(callers.who_said(&Message::Welcome), Some(2_000));
        assert!((0..AGE_MAX).all(|_| callers.grow_older().is_empty()));
        assert!(callers.take(2_000).is_some() && callers.take(2_000).is_none());
        assert_eq!(callers.grow_older().len(), CALLERS_MAX - 1);
        assert!(callers.is_empty());
    }

    /// Whoever comes in crowds makes room, and not whoever has come first.
    #[test]
    fn the_process_with_most_callers_makes_room() {
        let mut callers = Callers::default();
        let [crowd, same_user, other] = [(1, 1), (1, 2), (2, 1)].map(|(a, b)| Source::new(a, b));
        let says = |callers: &mut Callers, token, source| {
            callers.add(line_of(token, source));
            callers.find(token).unwrap().hello = Some((Message::Welcome, Vec::new()));
        };
        callers.add(line_of(0, same_user));
        callers.add(line_of(1, other));
        says(&mut callers, 2, crowd);
        (3..CALLERS_MAX as u64).for_each(|token| callers.add(line_of(token, crowd)));
        let mut goes = |token, source| {
            callers.add(line_of(token, source));
            callers.make_room().map(|line| line.token)
        };
        assert_eq!(goes(1_300, other), Some(3));
        assert_eq!(goes(1_301, crowd), Some(4), "it has said something, unlike this one");
        let silent: Vec<_> = (5..CALLERS_MAX as u64).chain([1_301]).collect();
        for token in silent {
            callers.take(token).unwrap();
        }
        (2_000..).take(CALLERS_MAX - 2).for_each(|token| says(&mut callers, token, crowd));
        assert_eq!(callers.make_room().map(|line| line.token), Some(2), "all have said something");
    }
}
