//! The gateway's side of `smcgate capture`: what goes over its RNICs, as pcapng.
//!
//! It shows what connections carry, so only root and the gateway's own user may ask. Who asks is
//! known of Unix sockets, not of TCP. The socket has a name but no file, and the name follows from
//! the address of the admin endpoint: whoever can reach that knows where to ask.
//!
//! ```text
//!   client ── Request, a line of JSON ─────────────────────► capture thread
//!   client ◄─ Answer, a line of JSON, and then pcapng ────── capture thread ◄─ taps ◄─ pollers
//!   client ── shutdown ────────────────────────────────────► statistics, end
//! ```
//!
//! One client is served at a time. A client that reads slowly delays nobody but itself: the taps
//! drop what finds no room, and count it. One that reads nothing is given up.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::net::{IpAddr, SocketAddr as AdminAddress};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{
    InterfaceStatisticsBlock, InterfaceStatisticsOption,
};
use pcap_file::{DataLink, PcapError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use smcr_engine::clock::Clock;
use smcr_rnic::tracer::{Record, Selection, Tracer};

use crate::supervise;

/// What a client asks for. Without filters it is everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Only what goes over this RNIC.
    pub rnic: Option<String>,
    /// Only what goes to the RNIC with this address, or comes from it.
    pub peer: Option<IpAddr>,
    /// How many bytes of each frame to keep; `None` for all.
    pub snap_len: Option<u32>,
    /// After how many frames to end.
    pub count: Option<u64>,
}

/// Whether a client gets what it asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Why not, in one line; `None` if the capture follows.
    pub error: Option<String>,
}

/// The tap of one poller.
#[derive(Debug)]
pub struct Tapped {
    /// Its RNIC. All pollers of an RNIC are one interface of the capture.
    pub rnic: String,
    /// The kind of the RNIC and its device.
    pub description: String,
    /// Where its records come out.
    pub tracer: Tracer,
}

/// Where a gateway with this admin endpoint listens for clients.
///
/// # Panics
///
/// Never: the name is far shorter than the limit.
pub fn address_of(admin: AdminAddress) -> SocketAddr {
    let name = format!("smcgate capture {admin}");
    SocketAddr::from_abstract_name(name).expect("the name is short")
}

/// Serves captures of the taps that come out of `taps`, now and later, from a new thread, as long
/// as the process lives.
///
/// # Errors
///
/// If the socket's name is taken, or no thread can be started.
pub fn spawn(admin: AdminAddress, clock: Clock, taps: mpsc::Receiver<Tapped>) -> io::Result<()> {
    let listener = UnixListener::bind_addr(&address_of(admin))?;
    listener.set_nonblocking(true)?;
    let entrance = Entrance { listener };
    let mut desk = Desk { entrance, clock, taps: Vec::new(), new_taps: taps };
    supervise::spawn("capture", move || {
        loop {
            desk.entrance.wait(None, None);
            match desk.entrance.listener.accept() {
                Ok((client, _)) => {
                    if let Err(error) = desk.serve(client) {
                        tracing::debug!(%error, "a capture ended");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // No descriptor is left, say: the client waits, and so do we.
                Err(_) => thread::sleep(PATIENCE),
            }
        }
    })?;
    Ok(())
}

/// Whoever serves clients.
struct Desk {
    entrance: Entrance,
    clock: Clock,
    taps: Vec<Tapped>,
    /// Those of RNICs that were opened since the last client came.
    new_taps: mpsc::Receiver<Tapped>,
}

/// Where clients come in.
struct Entrance {
    listener: UnixListener,
}

impl Desk {
    /// Serves one client until it wants no more.
    fn serve(&mut self, client: UnixStream) -> io::Result<()> {
        self.taps.extend(self.new_taps.try_iter());
        client.set_nonblocking(false)?;
        client.set_read_timeout(Some(PATIENCE))?;
        // A stranger's words are not even read.
        let request = may_ask(&client).and_then(|()| read_request(&client));
        let request = match request.and_then(|request| self.check(request)) {
            Ok(request) => request,
            Err(why) => return answer(&client, Some(why)),
        };
        answer(&client, None)?;
        tracing::info!(rnic = request.rnic, peer = ?request.peer, "a capture begins");
        let outcome = self.capture(&client, &request);
        chosen(&mut self.taps, &request).for_each(|tap| tap.tracer.stop());
        match &outcome {
            Ok((frames, dropped)) => tracing::info!(frames, dropped, "the capture is over"),
            Err(error) => tracing::info!(%error, "the capture is over"),
        }
        outcome.map(drop)
    }

    fn check(&self, request: Request) -> Result<Request, String> {
        match &request.rnic {
            Some(name) if self.taps.iter().all(|tap| tap.rnic != *name) => {
                let mut names: Vec<&str> = self.taps.iter().map(|tap| &tap.rnic[..]).collect();
                names.dedup();
                Err(format!("there is no RNIC named {name}; there are: {}", names.join(", ")))
            }
            Some(_) | None => Ok(request),
        }
    }

    /// Writes frames until the client wants no more. Returns how many, and how many were dropped.
    fn capture(&mut self, client: &UnixStream, request: &Request) -> io::Result<(u64, u64)> {
        let Self { entrance, clock, taps, .. } = self;
        let snap_len = request.snap_len.unwrap_or(u32::MAX);
        client.set_nonblocking(true)?;
        let mut file = File::new(BufWriter::new(Outlet::new(client, entrance, *clock)))?;
        let mut interfaces = BTreeMap::new();
        for tap in chosen(taps, request) {
            if !interfaces.contains_key(&tap.rnic) {
                let number = u32::try_from(interfaces.len()).expect("RNICs are few");
                file.add_interface(&tap.rnic, &tap.description, snap_len)?;
                interfaces.insert(tap.rnic.clone(), number);
            }
            let snap_len = usize::try_from(snap_len).unwrap_or(usize::MAX);
            tap.tracer.start(Selection { peer: request.peer, snap_len });
        }
        file.flush()?;
        let began = clock.calendar_time(smcr_proto::Instant(0));
        let mut merge = Merge::default();
        let mut left = request.count.unwrap_or(u64::MAX);
        let mut frames = 0;
        let mut is_over = false;
        while left > 0 {
            if !is_over && entrance.is_over(client) {
                is_over = true;
                chosen(taps, request).for_each(|tap| tap.tracer.stop());
            }
            let takes = usize::try_from(left).unwrap_or(usize::MAX).min(BATCH);
            let batch = merge.oldest(takes, &mut chosen(taps, request));
            for (record, rnic) in &batch {
                let at = began + Duration::from_nanos(record.at.0);
                file.write(interfaces[*rnic], at, record)?;
            }
            left -= batch.len() as u64;
            frames += batch.len() as u64;
            file.flush()?;
            match (batch.is_empty(), is_over) {
                (true, true) => break,
                (true, false) => entrance.wait(Some(client), Some(IDLE)),
                (false, _) => {}
            }
        }
        let mut dropped_by: BTreeMap<u32, u64> = BTreeMap::new();
        for tap in chosen(taps, request) {
            *dropped_by.entry(interfaces[&tap.rnic]).or_default() += tap.tracer.dropped();
        }
        let now = began + Duration::from_nanos(clock.now().0);
        for (interface, dropped) in &dropped_by {
            file.add_statistics(*interface, now, *dropped)?;
        }
        file.flush()?;
        Ok((frames, dropped_by.values().sum()))
    }
}

impl Entrance {
    /// Tells others that they must wait.
    fn turn_away(&self) {
        while let Ok((other, _)) = self.listener.accept() {
            // Whoever does not hear why hears that nobody answers.
            answer(&other, Some("another capture goes on".to_owned())).ok();
        }
    }

    /// Whether the client has said that it wants no more. Turns others away.
    fn is_over(&self, client: &UnixStream) -> bool {
        self.turn_away();
        let mut fds = [PollFd::new(client, PollFlags::IN)];
        // The client says nothing after its request, so this is the end of what it says.
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }

    /// Waits until somebody wants something, or that long.
    fn wait(&self, client: Option<&UnixStream>, limit: Option<Timespec>) {
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(client.map(|client| PollFd::new(client, PollFlags::IN)));
        // A signal ends the wait early, which harms nobody.
        poll(&mut fds, limit.as_ref()).ok();
    }
}

/// The taps that a client asks for.
fn chosen<'a>(
    taps: &'a mut [Tapped],
    request: &'a Request,
) -> impl Iterator<Item = &'a mut Tapped> {
    let is_chosen = |tap: &&mut Tapped| request.rnic.as_ref().is_none_or(|name| tap.rnic == *name);
    taps.iter_mut().filter(is_chosen)
}

fn may_ask(client: &UnixStream) -> Result<(), String> {
    let asks = socket_peercred(client).map_err(|error| error.to_string())?;
    if asks.uid.is_root() || asks.uid == geteuid() {
        return Ok(());
    }
    let own = geteuid().as_raw();
    Err(format!("it shows what connections carry: only root and user {own} may"))
}

/// The request, or what is wrong with it.
fn read_request(client: &UnixStream) -> Result<Request, String> {
    let mut line = String::new();
    let mut reader = BufReader::new(client.take(REQUEST_MAX));
    reader.read_line(&mut line).map_err(|error| error.to_string())?;
    serde_json::from_str(&line).map_err(|error| format!("the request cannot be read: {error}"))
}

fn answer(mut client: &UnixStream, error: Option<String>) -> io::Result<()> {
    let line = serde_json::to_string(&Answer { error }).map_err(io::Error::other)?;
    client.write_all(format!("{line}\n").as_bytes())
}

/// Brings the records of several taps into the order of time. Each tap has its own in order.
#[derive(Default)]
struct Merge {
    /// The next record of each tap, taken before it was known which of them is the oldest.
    heads: Vec<Option<Record>>,
}

impl Merge {
    /// Takes the oldest records of `taps`, `most` of them or all that there are, each with the name
    /// of its RNIC. It must always be called for the same taps.
    fn oldest<'a>(
        &mut self,
        most: usize,
        taps: &mut dyn Iterator<Item = &'a mut Tapped>,
    ) -> Vec<(Record, &'a str)> {
        let taps: Vec<&Tapped> = taps.map(|tap| &*tap).collect();
        self.heads.resize(taps.len(), None);
        let mut batch = Vec::new();
        while batch.len() < most {
            for (head, tap) in self.heads.iter_mut().zip(&taps) {
                if head.is_none() {
                    *head = tap.tracer.take(Record::clone);
                }
            }
            let heads = self.heads.iter_mut().zip(&taps).filter(|(head, _)| head.is_some());
            let oldest = heads.min_by_key(|(head, _)| head.as_ref().map(|record| record.at));
            let Some((head, tap)) = oldest else { break };
            batch.extend(head.take().map(|record| (record, tap.rnic.as_str())));
        }
        batch
    }
}

/// Writes to a client that may read more slowly than frames come, or not at all.
struct Outlet<'a> {
    client: &'a UnixStream,
    entrance: &'a Entrance,
    clock: Clock,
    /// It was given up. What a buffer still has is not written, and nobody waits for that.
    is_given_up: bool,
}

impl<'a> Outlet<'a> {
    /// `client` does not block.
    fn new(client: &'a UnixStream, entrance: &'a Entrance, clock: Clock) -> Self {
        Self { client, entrance, clock, is_given_up: false }
    }
}

impl Write for Outlet<'_> {
    /// Waits until the client has read something. Turns others away meanwhile.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let until = self.clock.now() + STALL_MAX;
        while !self.is_given_up {
            match self.client.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            self.entrance.turn_away();
            let left = until.since(self.clock.now());
            self.is_given_up = left.is_zero();
            let limit = Timespec::try_from(left).expect("it is a few seconds");
            let (out, others) = (
                PollFd::new(self.client, PollFlags::OUT),
                PollFd::new(&self.entrance.listener, PollFlags::IN),
            );
            // A signal ends the wait early, which harms nobody.
            poll(&mut [out, others], Some(&limit)).ok();
        }
        let why = format!("the client has read nothing for {} s", STALL_MAX.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A capture file that is being written.
struct File<W: Write>(PcapNgWriter<W>);

impl<W: Write> File<W> {
    fn new(out: W) -> io::Result<Self> {
        PcapNgWriter::new(out).map(Self).map_err(to_io)
    }

    fn add_interface(&mut self, name: &str, description: &str, snap_len: u32) -> io::Result<()> {
        let options = vec![
            InterfaceDescriptionOption::IfName(Cow::Borrowed(name)),
            InterfaceDescriptionOption::IfDescription(Cow::Borrowed(description)),
            // Nanoseconds.
            InterfaceDescriptionOption::IfTsResol(9),
        ];
        // Zero means that there is no limit.
        let snaplen = if snap_len == u32::MAX { 0 } else { snap_len };
        let block = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen, options };
        self.0.write_pcapng_block(block).map(drop).map_err(to_io)
    }

    fn write(&mut self, interface_id: u32, timestamp: Duration, record: &Record) -> io::Result<()> {
        let direction = if record.is_sent { OUTBOUND } else { INBOUND };
        let block = EnhancedPacketBlock {
            interface_id,
            timestamp,
            original_len: u32::try_from(record.frame_len).expect("frames are short"),
            data: Cow::Borrowed(&record.bytes),
            options: vec![EnhancedPacketOption::Flags(direction)],
        };
        self.0.write_pcapng_block(block).map(drop).map_err(to_io)
    }

    fn add_statistics(&mut self, interface_id: u32, at: Duration, dropped: u64) -> io::Result<()> {
        // The reader and writer of these blocks take the two halves of a time stamp as one number,
        // the upper half first in the file whatever the byte order.
        let nanos = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        let timestamp = if cfg!(target_endian = "little") { nanos.rotate_left(32) } else { nanos };
        let options = vec![InterfaceStatisticsOption::IsbIfDrop(dropped)];
        let block = InterfaceStatisticsBlock { interface_id, timestamp, options };
        self.0.write_pcapng_block(block).map(drop).map_err(to_io)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}

fn to_io(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        PcapError::IncompleteBuffer
        | PcapError::InvalidField(_)
        | PcapError::Utf8Error(_)
        | PcapError::FromUtf8Error(_)
        | PcapError::InvalidInterfaceId(_) => io::Error::other(error),
    }
}

/// The flag of a frame that was received.
const INBOUND: u32 = 1;
/// The flag of a frame that was sent.
const OUTBOUND: u32 = 2;
/// How many frames are written before the client is listened to again.
const BATCH: usize = 512;
/// How long a client may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a client may read nothing while there is something for it.
const STALL_MAX: Duration = Duration::from_secs(5);
/// The longest request in bytes.
const REQUEST_MAX: u64 = 4096;
/// How long to wait for more frames.
const IDLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

#[cfg(test)]
mod tests;
