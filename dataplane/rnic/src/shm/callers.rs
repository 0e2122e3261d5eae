//! Those who have called a NIC, and whose queue pair it does not expect yet.

use super::doubtful::Doubtful;
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

    /// Adds one. Returns the connection of the one that must go instead.
    #[must_use = "the worker must not watch it any more"]
    pub(super) fn add(&mut self, line: Line) -> Option<Line> {
        self.0.push(Caller { line, hello: None, age: 0 });
        (self.0.len() > CALLERS_MAX).then(|| self.0.remove(0).line)
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

/// Callers that wait. The oldest goes if there are more.
const CALLERS_MAX: usize = 256;
/// So many turns of the clock a caller may wait until our own control thread knows it.
const AGE_MAX: u32 = 1_000;

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn line(token: u64) -> Line {
        let flags = SocketFlags::CLOEXEC;
        let (socket, _) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        Line { socket: socket.into(), token }
    }

    /// Whoever calls without end keeps only so many descriptors of ours, for only so long.
    #[test]
    fn callers_are_few_and_leave() {
        let mut callers = Callers::default();
        for token in 0..CALLERS_MAX as u64 {
            assert!(callers.add(line(token)).is_none());
        }
        assert_eq!(callers.add(line(1_000)).map(|line| line.token), Some(0));
        callers.find(1_000).unwrap().hello = Some((Message::Welcome, Vec::new()));
        assert_eq!(callers.who_said(&Message::Welcome), Some(1_000));
        assert!((0..AGE_MAX).all(|_| callers.grow_older().is_empty()));
        assert!(callers.take(1_000).is_some() && callers.take(1_000).is_none());
        assert_eq!(callers.grow_older().len(), CALLERS_MAX - 1);
        assert!(callers.is_empty());
    }
}
