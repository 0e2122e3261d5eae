//! The thread of a NIC that does what may take long: it connects queue pairs and maps memory.
//!
//! Each queue pair has a connection of its own between the workers of the two NICs, and one that is
//! its bell. The end with the smaller name calls the other. Whoever connects says first which queue
//! pair it means, and proves that it was told of it. It may come before the callee's control thread
//! knows the caller, so the worker keeps callers whom nobody expects for a while.
//!
//! A region is asked for by its key when the peer first writes there, and not announced: so the
//! rkey works from the moment that it exists, and it gives access only to peers of its domain,
//! which is that of the queue pair by whose connection they ask.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::fs::inotify;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use smcr_memory::Region;
use smcr_proto::{Instant, Qpn, Rkey};

use super::REGION_MAX;
use super::bell::Bell;
use super::callers::{Caller, Callers};
use super::directory::name_of;
use super::doubtful::{self, Doubtful};
use super::end::{End, Stage};
use super::entrance::Entrance;
use super::line::{Line, Packet};
use super::ring::Ring;
use super::shared::{Job, News, Shared};
use super::wire::{Message, Name};
use crate::Domain;

/// The worker of one NIC.
pub(super) struct Worker {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    entrance: Entrance,
    /// An inotify descriptor for the directory.
    watch: OwnedFd,
    keys: HashMap<Rkey, Key>,
    ends: HashMap<Qpn, End>,
    /// Connections that are of no queue pair yet.
    callers: Callers,
    /// Queue pairs of which each connection is, by its token.
    owners: HashMap<u64, Qpn>,
    tokens: u64,
    /// Queue pairs whose peers had too many callers at once.
    again: Vec<Qpn>,
}

/// A registered region.
struct Key {
    domain: Domain,
    region: Region,
    address: u64,
}

impl Worker {
    /// Starts the worker. It ends when all halves have left.
    pub(super) fn start(shared: &Arc<Shared>, listener: OwnedFd) -> io::Result<()> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        let goes = inotify::WatchFlags::DELETE
            | inotify::WatchFlags::DELETE_SELF
            | inotify::WatchFlags::MOVED_FROM;
        inotify::add_watch(&watch, shared.directory.path(""), goes)?;
        let flags = epoll::EventFlags::IN;
        epoll::add(&epoll, shared.work(), epoll::EventData::new_u64(WORK), flags)?;
        epoll::add(&epoll, &watch, epoll::EventData::new_u64(WATCH), flags)?;
        let entrance = Entrance::new(listener, epoll.as_fd(), ENTRANCE)?;
        let worker = Self {
            shared: Arc::clone(shared),
            epoll,
            entrance,
            watch,
            keys: HashMap::new(),
            ends: HashMap::new(),
            callers: Callers::default(),
            owners: HashMap::new(),
            tokens: FIRST_TOKEN,
            again: Vec::new(),
        };
        thread::Builder::new().name("shm".into()).spawn(move || worker.run())?;
        Ok(())
    }

    fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        let mut ticked = now();
        loop {
            self.do_jobs();
            if self.shared.is_left() {
                return;
            }
            let waits =
                !self.again.is_empty() || !self.callers.is_empty() || self.entrance.is_closed();
            let tick = Timespec::try_from(TICK).expect("a short time");
            events.clear();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            // An interrupted call is made again: nothing has happened then.
            let _ = epoll::wait(&self.epoll, buffer, waits.then_some(&tick));
            // Also if there are always events: peers must not be able to stop the clock.
            let now = now();
            if now.since(ticked) >= TICK {
                ticked = now;
                self.tick();
            }
            for event in &events {
                match event.data.u64() {
                    // Jobs are done before everything else.
                    WORK => drop(rustix::io::read(self.shared.work(), &mut [0; 8])),
                    ENTRANCE => self.accept(),
                    WATCH => self.look_at_directory(),
                    token => self.listen_to(token),
                }
            }
        }
    }

    fn do_jobs(&mut self) {
        while let Some(job) = self.shared.take_job() {
            match job {
                Job::Register { rkey, domain, region, address } => {
                    self.keys.insert(rkey, Key { domain, region, address });
                }
                Job::Deregister(rkey) => self.revoke(rkey),
                Job::Connect { own, domain, peer, part, inbox } => {
                    let (stage, asked, granted) = (Stage::Apart, None, Vec::new());
                    let end = End { own, domain, peer, part, inbox, stage, asked, granted };
                    self.ends.insert(own.qpn, end);
                    if own.calls(&peer) {
                        self.call(own.qpn);
                    } else {
                        self.answer_whoever_waits(own.qpn);
                    }
                }
                Job::Ask(qpn, rkey) => self.ask(qpn, rkey),
                Job::Leave(qpn) => {
                    if let Some(end) = self.ends.remove(&qpn) {
                        self.hang_up(end.stage);
                    }
                    self.again.retain(|other| *other != qpn);
                    self.shared.free_number(qpn);
                }
                Job::Unmap(regions) => drop(regions),
                Job::Forget(ring) => drop(ring),
            }
        }
    }

    /// Time has passed.
    fn tick(&mut self) {
        for qpn in std::mem::take(&mut self.again) {
            self.call(qpn);
        }
        for line in self.callers.grow_older() {
            self.unwatch(&line);
        }
        self.entrance.open(self.epoll.as_fd());
    }

    /// Tells the fabric of a queue pair.
    fn tell(&self, qpn: Qpn, news: News) {
        if let Some(end) = self.ends.get(&qpn) {
            self.shared.parts()[end.part].tell_of(qpn, &end.inbox, news);
        }
    }

    /// A line over a socket, which is watched from now on.
    fn watch(&mut self, socket: Doubtful) -> io::Result<Line> {
        let token = self.tokens;
        self.tokens += 1;
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN)?;
        Ok(Line { socket, token })
    }

    fn unwatch(&mut self, line: &Line) {
        self.owners.remove(&line.token);
        // The peer may have a copy of our end if it made the pair; closing would not be enough.
        let _ = epoll::delete(&self.epoll, &line.socket);
    }

    fn hang_up(&mut self, stage: Stage) {
        match stage {
            Stage::Apart | Stage::Deaf { .. } => {}
            Stage::Calling { line, .. } | Stage::Talking(line) => self.unwatch(&line),
        }
    }

    /// Connects to the peer of a queue pair, and says hello.
    fn call(&mut self, qpn: Qpn) {
        let Some(end) = self.ends.get(&qpn) else { return };
        if !matches!(end.stage, Stage::Apart) {
            return;
        }
        let (own, peer) = (end.own, end.peer);
        let call = || self.shared.directory.call(peer.gid).map(Doubtful::from);
        let called = call().and_then(|bell| Ok((bell, call()?)));
        let (bell, socket) = match called {
            Ok(both) => both,
            Err(Errno::AGAIN) => {
                self.again.push(qpn);
                return;
            }
            Err(_) => return self.tell(qpn, News::Unreachable),
        };
        if doubtful::too_many_wait() || socket.source().has_too_much() {
            return self.tell(qpn, News::Unreachable);
        }
        let said = Ring::memory().and_then(|memory| {
            let (caller, Name { qpn, psn, .. }) = (own, peer);
            let [bell, line] = [bell, socket].map(|socket| Line { socket, token: NOBODY });
            bell.send(&Message::Bell { caller, qpn, psn }, &[])?;
            let descriptor = memory.descriptor().expect("the memory of a ring is shared");
            line.send(&Message::Hello { caller, qpn, psn }, &[descriptor])?;
            Ok((self.watch(line.socket)?, memory, Bell::over(bell.socket)))
        });
        match said {
            Ok((line, memory, bell)) => {
                self.owners.insert(line.token, qpn);
                let end = self.ends.get_mut(&qpn).expect("it was there above");
                end.stage = Stage::Calling { line, memory, bell };
            }
            Err(_) => self.tell(qpn, News::Unreachable),
        }
    }

    /// Accepts those who call, a few at once, and hears what they have said by then: most of them
    /// need not wait at all.
    fn accept(&mut self) {
        for _ in 0..ACCEPTED_PER_TURN {
            let Some(socket) = self.entrance.accept(self.epoll.as_fd()) else { return };
            let Ok(line) = self.watch(socket) else { continue };
            let token = line.token;
            self.callers.add(line);
            self.listen_to(token);
            let goes = self.callers.make_room();
            goes.into_iter().for_each(|line| self.unwatch(&line));
        }
    }

    /// Answers the caller that has asked for this queue pair, and has brought a bell, if there is
    /// one. If it is for us to call, nobody is answered: there would be two connections.
    fn answer_whoever_waits(&mut self, qpn: Qpn) {
        let Some(end) = self.ends.get(&qpn) else { return };
        if !matches!(end.stage, Stage::Apart) || end.own.calls(&end.peer) {
            return;
        }
        let (caller, psn) = (end.peer, end.own.psn);
        let bell = self.callers.who_said(&Message::Bell { caller, qpn, psn });
        let hello = self.callers.who_said(&Message::Hello { caller, qpn, psn });
        if let (Some(hello), Some(bell)) = (hello, bell) {
            self.answer(qpn, hello, bell);
        }
    }

    /// Connects a queue pair to the caller that has asked for it by connections of these tokens.
    fn answer(&mut self, qpn: Qpn, hello: u64, bell: u64) {
        let [hello, bell] = [hello, bell].map(|token| self.callers.take(token));
        let Caller { line, hello, .. } = hello.expect("a caller that waits");
        let bell = bell.expect("as above").line;
        // Its poller hears it from now on.
        self.unwatch(&bell);
        let (_, descriptors) = hello.expect("it has said whom it wants");
        let welcome = Ring::given(&descriptors).and_then(|memory| {
            line.send(&Message::Welcome, &[])?;
            Ok(memory)
        });
        let end = self.ends.get_mut(&qpn).expect("the queue pair that was asked for");
        match welcome {
            Ok(memory) => {
                let bell = Bell::over(bell.socket);
                self.owners.insert(line.token, qpn);
                end.stage = Stage::Talking(line);
                self.tell(qpn, News::Connected(Box::new(Ring::new(memory, false, bell))));
            }
            // It knows the queue pair, so it is the peer, and it will not come again.
            Err(_) => {
                self.unwatch(&line);
                self.tell(qpn, News::Unreachable);
            }
        }
    }

    /// Asks the peer for a region.
    fn ask(&mut self, qpn: Qpn, rkey: Rkey) {
        let Some(end) = self.ends.get_mut(&qpn) else { return };
        // If the two do not talk any more, the fabric will hear so, or has heard.
        let Stage::Talking(line) = &end.stage else { return };
        end.asked = Some(rkey);
        if line.send(&Message::Ask(rkey), &[]).is_err() {
            self.part(qpn, News::Gone);
        }
    }

    /// Lets nobody have a region any more.
    fn revoke(&mut self, rkey: Rkey) {
        self.keys.remove(&rkey);
        let mut deaf = Vec::new();
        for (qpn, end) in &mut self.ends {
            let before = end.granted.len();
            end.granted.retain(|granted| *granted != rkey);
            if let Stage::Talking(line) = &end.stage
                && end.granted.len() < before
                && line.send(&Message::Revoke(rkey), &[]).is_err()
            {
                deaf.push(*qpn);
            }
        }
        deaf.into_iter().for_each(|qpn| self.part(qpn, News::Gone));
        self.shared.free_key(rkey);
    }

    /// Ends the connection of a queue pair, for this reason.
    fn part(&mut self, qpn: Qpn, why: News) {
        let end = self.ends.get_mut(&qpn).expect("a queue pair that is connected");
        let stage = std::mem::replace(&mut end.stage, Stage::Apart);
        self.hang_up(stage);
        self.tell(qpn, why);
    }

    /// The peer of a queue pair has broken the rules.
    fn turn_away(&mut self, qpn: Qpn) {
        let end = self.ends.get_mut(&qpn).expect("a queue pair that is connected");
        let stage = std::mem::replace(&mut end.stage, Stage::Apart);
        if let Stage::Calling { line, .. } | Stage::Talking(line) = stage {
            self.unwatch(&line);
            let end = self.ends.get_mut(&qpn).expect("as above");
            end.stage = Stage::Deaf { _kept: line };
        }
        self.tell(qpn, News::Misbehaved);
    }

    /// Takes in what came by a connection.
    fn listen_to(&mut self, token: u64) {
        for _ in 0..PACKETS_PER_TURN {
            let owner = self.owners.get(&token).copied();
            let more = match owner {
                Some(qpn) => self.listen_to_peer(qpn),
                None => self.listen_to_caller(token),
            };
            if !more {
                return;
            }
        }
    }

    /// Takes in what a caller says. Returns whether it may have said more.
    fn listen_to_caller(&mut self, token: u64) -> bool {
        // It may have been forgotten in the same turn.
        let Some(caller) = self.callers.find(token) else { return false };
        if caller.line.socket.source().has_too_much() {
            self.dismiss(token);
            return false;
        }
        let (message, descriptors) = match caller.line.receive() {
            Packet::None => return false,
            Packet::Message(message, descriptors) if caller.hello.is_none() => {
                (message, descriptors)
            }
            // It may say hello once, and then has to wait.
            Packet::Message(..) | Packet::Nonsense | Packet::End => {
                self.dismiss(token);
                return false;
            }
        };
        caller.hello = Some((message, descriptors));
        // Our own control thread may have told us of the queue pair just before.
        self.do_jobs();
        if let Message::Hello { qpn, .. } | Message::Bell { qpn, .. } = message {
            self.answer_whoever_waits(qpn);
        }
        true
    }

    /// A caller must go.
    fn dismiss(&mut self, token: u64) {
        let caller = self.callers.take(token).expect("the caller has found it");
        self.unwatch(&caller.line);
    }

    /// Takes in what the peer of a queue pair says. Returns whether it may have said more.
    fn listen_to_peer(&mut self, qpn: Qpn) -> bool {
        // Whatever a peer has brought about, it must not end the process.
        let Some(end) = self.ends.get_mut(&qpn) else { return false };
        let packet = match &end.stage {
            Stage::Apart | Stage::Deaf { .. } => return false,
            Stage::Calling { line, .. } | Stage::Talking(line) => line.receive(),
        };
        let calls = matches!(end.stage, Stage::Calling { .. });
        match packet {
            Packet::None => return false,
            Packet::End if calls => self.part(qpn, News::Unreachable),
            Packet::End => self.part(qpn, News::Gone),
            Packet::Message(Message::Welcome, _) if calls => self.welcome(qpn),
            Packet::Message(Message::Ask(rkey), _) if !calls => self.grant(qpn, rkey),
            Packet::Message(Message::Grant { rkey, address }, descriptors)
                if end.asked == Some(rkey) =>
            {
                end.asked = None;
                self.take_grant(qpn, rkey, address, &descriptors);
            }
            Packet::Message(Message::Refuse(rkey), _) if end.asked == Some(rkey) => {
                end.asked = None;
                self.tell(qpn, News::Refused);
            }
            Packet::Message(Message::Revoke(rkey), _) => self.tell(qpn, News::Revoked(rkey)),
            Packet::Message(..) | Packet::Nonsense => self.turn_away(qpn),
        }
        true
    }

    /// The callee is there.
    fn welcome(&mut self, qpn: Qpn) {
        let end = self.ends.get_mut(&qpn).expect("the owner of a connection");
        let stage = std::mem::replace(&mut end.stage, Stage::Apart);
        let Stage::Calling { line, memory, bell } = stage else {
            unreachable!("only a caller is welcomed");
        };
        end.stage = Stage::Talking(line);
        self.tell(qpn, News::Connected(Box::new(Ring::new(memory, true, bell))));
    }

    /// The peer of a queue pair wants to have a region.
    fn grant(&mut self, qpn: Qpn, rkey: Rkey) {
        // Our own control thread may have registered it just before the peer was told of it, or
        // deregistered it.
        self.do_jobs();
        let Some(end) = self.ends.get_mut(&qpn) else { return };
        let Stage::Talking(line) = &end.stage else { return };
        let key = self.keys.get(&rkey).filter(|key| key.domain == end.domain);
        let Some(key) = key else {
            // If it does not hear this, it hears that we have gone.
            let _ = line.send(&Message::Refuse(rkey), &[]);
            return self.turn_away(qpn);
        };
        let descriptor = key.region.descriptor().expect("`register` has checked it");
        let message = Message::Grant { rkey, address: key.address };
        if line.send(&message, &[descriptor]).is_err() {
            return self.part(qpn, News::Gone);
        }
        if !end.granted.contains(&rkey) {
            end.granted.push(rkey);
        }
    }

    /// The peer of a queue pair lets us have a region.
    fn take_grant(&mut self, qpn: Qpn, rkey: Rkey, address: u64, given: &[Doubtful]) {
        let descriptor = given.first().ok_or_else(|| Errno::BADF.into());
        let region =
            descriptor.and_then(|descriptor| Region::of_peer(descriptor.as_fd(), REGION_MAX));
        match region {
            Ok(region) if address.checked_add(region.len() as u64).is_some() => {
                self.tell(qpn, News::Granted { rkey, address, region });
            }
            // Whether it is to blame or we have no memory left: nothing can be written there.
            Ok(_) | Err(_) => self.part(qpn, News::Gone),
        }
    }

    /// Looks whether our socket is still where peers look for it.
    fn look_at_directory(&mut self) {
        let mut room = [std::mem::MaybeUninit::uninit(); 1_024];
        let mut reader = inotify::Reader::new(&self.watch, &mut room);
        while reader.next().is_ok() {}
        let path = self.shared.directory.path(&name_of(self.shared.gid));
        if !self.shared.is_gone() && rustix::fs::stat(path).is_err() {
            self.shared.unplug();
        }
    }
}

fn now() -> Instant {
    let now = clock_gettime(ClockId::Monotonic);
    Instant(u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).expect("no time before zero"))
}

// Tokens of what is no connection.
const WORK: u64 = 0;
const ENTRANCE: u64 = 1;
const WATCH: u64 = 2;
/// Of a connection that is not watched.
const NOBODY: u64 = 3;
const FIRST_TOKEN: u64 = 4;
const EVENTS_PER_TURN: usize = 64;
/// The most packets of one connection that are read while others wait.
const PACKETS_PER_TURN: usize = 16;
/// The most callers that are accepted while others wait.
const ACCEPTED_PER_TURN: usize = 64;
/// How long the worker waits while something is to be tried again.
const TICK: Duration = Duration::from_millis(10);
