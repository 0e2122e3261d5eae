//! How many connections each local program has, and each user.

use std::collections::HashMap;

use crate::local;
use crate::stats::Process;

/// The connections of local programs.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Of each process, and its name.
    processes: HashMap<u32, (u32, String)>,
    /// Of each user, by whatever process.
    users: HashMap<u32, u32>,
}

impl Counts {
    /// Whether a program may have one more, where a process may have `per_process` and the gateway
    /// has room for `free` more.
    pub(super) fn have_room(&self, per_process: u32, process: &Process, free: usize) -> bool {
        let of_process = self.processes.get(&process.pid).map_or(0, |(count, _)| *count);
        of_process < per_process && !self.crowds(process.uid, free)
    }

    /// Whether a user has so many connections that too little room is left to others, by whatever
    /// processes: a program can fork. A user who is alone gets nearly all of it; the more users
    /// there are, the less each of them gets.
    fn crowds(&self, uid: u32, free: usize) -> bool {
        let of_user = self.users.get(&uid).map_or(0, |count| *count as usize);
        of_user >= USERS_SHARE * free
    }

    /// One more. Returns the program's name.
    pub(super) fn enter(&mut self, process: &Process) -> String {
        *self.users.entry(process.uid).or_default() += 1;
        let pid = process.pid;
        let entry = self.processes.entry(pid).or_insert_with(|| (0, local::command_of(pid)));
        entry.0 += 1;
        entry.1.clone()
    }

    /// One less.
    ///
    /// # Panics
    ///
    /// If it has none.
    pub(super) fn leave(&mut self, process: &Process) {
        let (count, _) = self.processes.get_mut(&process.pid).expect(ENTERED);
        *count -= 1;
        if *count == 0 {
            self.processes.remove(&process.pid);
        }
        let count = self.users.get_mut(&process.uid).expect(ENTERED);
        *count -= 1;
        if *count == 0 {
            self.users.remove(&process.uid);
        }
    }
}

/// A user may have so many times the room that is left: eight ninths of all, if there is no other.
const USERS_SHARE: usize = 8;
const ENTERED: &str = "whoever leaves has entered";

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, uid: u32) -> Process {
        Process { pid, uid, command: String::new() }
    }

    /// A program that has lost its place in the count could have any number of connections, or
    /// none.
    #[test]
    fn each_connection_of_a_process_counts_once() {
        let mut counts = Counts::default();
        let own = process(std::process::id(), 1000);
        let command = counts.enter(&own);
        assert!(!command.is_empty() && counts.have_room(2, &own, 100));
        assert_eq!(counts.enter(&own), command);
        assert!(!counts.have_room(2, &own, 100) && counts.have_room(2, &process(1, 1000), 100));
        counts.leave(&own);
        counts.leave(&own);
        assert!(counts.processes.is_empty() && counts.users.is_empty());
    }

    /// Whatever programs a user has, and however many, those of another one come in, too.
    #[test]
    fn no_user_takes_the_room_of_others() {
        let (mut counts, room) = (Counts::default(), 9_000);
        let all = |counts: &Counts| counts.users.values().sum::<u32>() as usize;
        let may = |counts: &Counts, one: &Process| counts.have_room(1, one, room - all(counts));
        let mut fill = |uid: u32| {
            let before = all(&counts);
            let mut each = (1..).map(|number| process(uid * 10_000 + number, uid));
            while let Some(one) = each.next().filter(|one| may(&counts, one)) {
                counts.enter(&one);
            }
            all(&counts) - before
        };
        assert_eq!([fill(1), fill(2), fill(3)], [8_000, 889, 99]);
        counts.leave(&process(10_001, 1));
        assert!(!may(&counts, &process(10_001, 1)), "others come first");
        assert!(may(&counts, &process(40_001, 4)));
    }
}
