//! RoCE packets to one NIC, from its peer and from strangers, while it has requests of its own.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use smcr_memory::{Backing, Region, SendPool};
use smcr_proto::{Gid, Instant, MacAddress, Mtu, Psn, QpAddress, Qpn, Rkey};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::roce::lossy::{Lossy, Network, Odds};
use smcr_rnic::roce::{self, Fabric, Parameters, Run, Share, UDP_PORT, Wire};
use smcr_rnic::{
    Completion, Domain, Fabric as _, Messages, Opening as _, Port, QpId, Registration, Rnic as _,
    Tag, Work,
};

use super::Input;

const MEMORY: usize = 8192;
const BTH_LEN: usize = 12;
const RETH_END: usize = BTH_LEN + 16;
/// The opcode of packets of several requests.
const DENSE: u8 = 0xc0;

/// Each instruction is a byte, and what it needs behind it.
///
/// # Panics
///
/// If a byte changes that no request of the peer may change, if more packets answer than came, or
/// if a request of ours does not end once.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let Some(shape) = input.byte() else { return };
    let mut nic = Nic::new(shape);
    while let Some(instruction) = input.byte() {
        nic.obey(instruction, &mut input);
    }
    nic.end();
}

struct Nic {
    network: Network,
    peer: Lossy,
    /// Somebody at another address who knows all numbers.
    stranger: Lossy,
    fabric: Fabric<Lossy>,
    now: Instant,
    qp: QpId,
    /// Our end of the queue pair, which the peer knows.
    ours: QpAddress,
    pool: SendPool,
    /// What the peer has the key of.
    open: Region,
    /// What is in it, as far as it was right to place it there.
    image: Vec<u8>,
    /// What the write that began last may change.
    writing: Range<usize>,
    registration: Registration,
    /// What others have the key of.
    closed: Region,
    closed_key: Registration,
    out: Vec<Completion>,
    posted: u64,
    ended: Vec<u64>,
    broke: u32,
}

impl Nic {
    fn new(shape: u8) -> Self {
        let mark = if shape & 4 != 0 { Chance::percent(50) } else { Chance::NEVER };
        let network = Network::new(1, Odds { mark, ..Odds::default() });
        if shape & 1 != 0 {
            network.hide_identification();
        }
        let mut dice = Dice::new(7);
        let setup = Parameters {
            backing: Backing::Private,
            port: port(1),
            udp_port: UDP_PORT,
            share: Share::ALL,
            payload_max: 4096,
            window_max: 1 << 16,
            entropy: Box::new(move || {
                u32::try_from(dice.next_u64() >> 32).expect("half of it") | 0x00ff_ff00
            }),
            path: std::sync::Arc::new(|_, _| Ok(9000)),
        };
        let (mut rnic, mut fabric) = roce::join(setup, network.plug(address(1)));
        let memory = || Region::new(MEMORY).expect("little memory");
        let (open, closed) = (memory(), memory());
        let domains: [Domain; 2] = [(); 2].map(|()| rnic.open_domain().expect("few domains"));
        let registration = rnic.register(domains[0], &open).expect("few keys");
        let closed_key = rnic.register(domains[1], &closed).expect("few keys");
        let messages = if shape & 2 == 0 { Messages::Short } else { Messages::Long };
        let mut opening = rnic.open_for(domains[0], messages).expect("few queue pairs");
        if shape & 8 != 0 {
            opening.pack_densely();
        }
        let ours = opening.address();
        let theirs = QpAddress {
            mac: port(0).mac,
            gid: port(0).gid,
            qpn: Qpn(0x0012_3456),
            psn: Psn(0x00ff_fffe),
            mtu: Mtu::B1024,
        };
        let qp = fabric.adopt(Instant(0), opening.connect(theirs).expect("the peer has a way"));
        Self {
            peer: network.plug(address(0)),
            stranger: network.plug(address(9)),
            network,
            fabric,
            now: Instant(0),
            qp,
            ours,
            pool: SendPool::new(memory(), 2048),
            open,
            image: vec![0; MEMORY],
            writing: 0..0,
            registration,
            closed,
            closed_key,
            out: Vec::with_capacity(64),
            posted: 0,
            ended: Vec::new(),
            broke: 0,
        }
    }

    fn obey(&mut self, instruction: u8, input: &mut Input<'_>) {
        match instruction % 8 {
            0 => {
                let len = usize::from(input.short()) % 2048;
                let packet = input.bytes(len).to_vec();
                self.receive(&packet, false);
                self.turn_and_judge(&[]);
            }
            1..=3 => {
                let packet = match instruction {
                    0x80.. => self.likely_dense(input),
                    _ => self.likely(input, 0),
                };
                self.receive(&packet, false);
                self.turn_and_judge(&packet);
            }
            4 => self.send(input),
            5 => self.write(input),
            6 => self.now = self.now + Duration::from_micros(input.short().into()),
            _ => {
                let packet = self.likely(input, 9);
                self.receive(&packet, true);
                let before = self.fabric.counters().unknown_qp + self.fabric.counters().malformed;
                self.turn_and_judge(&[]);
                let after = self.fabric.counters().unknown_qp + self.fabric.counters().malformed;
                assert_eq!(after, before + 1, "it was for nobody");
            }
        }
        self.turn_and_judge(&[]);
    }

    /// One turn, in which this packet arrives from the peer, or none.
    fn turn_and_judge(&mut self, packet: &[u8]) {
        let before = self.ignored();
        self.turn();
        let counters = *self.fabric.counters();
        // Of these the NIC takes nothing but its number: the write before it goes on behind it.
        let packet = if self.ignored() == before { packet } else { &[] };
        assert!(counters.acks_out + counters.naks_out <= counters.packets_in, "{counters:?}");
        assert!(counters.cnps_out <= counters.marked_in, "{counters:?}");
        let (before, payload) = (std::mem::take(&mut self.image), self.payload(packet));
        let mut after = vec![0; MEMORY];
        self.open.copy_out(0, &mut after);
        if packet.first() == Some(&DENSE) {
            assert!(self.images(&before, packet).contains(&after), "promise 4: {packet:02x?}");
        } else if before != after {
            // All of the payload is in one place, where the write may change bytes.
            let last = self.writing.end.saturating_sub(payload.len());
            let is_right = (self.writing.start..=last).any(|at| {
                let end = at + payload.len();
                after[at..end] == *payload
                    && after[..at] == before[..at]
                    && after[end..] == before[end..]
            });
            assert!(is_right && !payload.is_empty(), "promise 4: {:?} {packet:02x?}", self.writing);
        }
        self.image = after;
    }

    /// How many packets came that are no next one of the peer: it has sent them before, or out of
    /// order, or they are not well-formed.
    fn ignored(&self) -> u64 {
        let counters = self.fabric.counters();
        counters.duplicates + counters.out_of_order + counters.psn_errors + counters.malformed
    }

    /// The bytes that a packet may write. Notes where, if a write begins with it.
    fn payload<'p>(&mut self, packet: &'p [u8]) -> &'p [u8] {
        let Some((opcode, flags)) = packet.first().zip(packet.get(1)) else { return &[] };
        let is_first = matches!(opcode, 0x06 | 0x0a);
        let headers = if is_first { RETH_END } else { BTH_LEN };
        let end = packet.len().saturating_sub(4 + usize::from(flags >> 4 & 3));
        if end < headers || !matches!(opcode, 0x06..=0x08 | 0x0a) {
            return &[];
        }
        if is_first {
            let (address, rest) = packet[BTH_LEN..].split_first_chunk().expect("it has a RETH");
            let (key, rest) = rest.split_first_chunk().expect("it has a RETH");
            let (len, _) = rest.split_first_chunk().expect("it has a RETH");
            let start = u64::from_be_bytes(*address).wrapping_sub(self.registration.address);
            let len = u32::from_be_bytes(*len) as usize;
            let is_open = u32::from_be_bytes(*key) == self.registration.rkey.0;
            let start = usize::try_from(start).unwrap_or(MEMORY);
            let fits = start.checked_add(len).is_some_and(|end| end <= MEMORY);
            // A refused write leaves the one before it as it was: nothing follows on that.
            self.writing = if is_open && fits { start..start + len } else { 0..0 };
        }
        &packet[headers..end]
    }

    /// What may be in the region behind a dense packet: what its first parts have written there, as
    /// many of them as there are or less.
    fn images(&self, before: &[u8], packet: &[u8]) -> Vec<Vec<u8>> {
        let mut images = vec![before.to_vec()];
        let mut rest = &packet[BTH_LEN..packet.len() - 4];
        while let [opcode, _, l1, l0, behind @ ..] = rest {
            let len = usize::from(u16::from_be_bytes([*l1, *l0]));
            let (reth, behind) = behind.split_at(if *opcode == 0x0a { 16 } else { 0 });
            let (payload, behind) = behind.split_at(len.next_multiple_of(4));
            let mut image = images.last().expect("there is one").clone();
            if let Some((address, key)) = reth.split_first_chunk() {
                let start = u64::from_be_bytes(*address).wrapping_sub(self.registration.address);
                let start = usize::try_from(start).unwrap_or(MEMORY);
                let fits = start.checked_add(len).is_some_and(|end| end <= MEMORY);
                if !fits || key[..4] != self.registration.rkey.0.to_be_bytes() {
                    break;
                }
                image[start..start + len].copy_from_slice(&payload[..len]);
            }
            images.push(image);
            rest = behind;
        }
        images
    }

    /// A packet of several requests that would be believed, but for what the input says.
    fn likely_dense(&self, input: &mut Input<'_>) -> Vec<u8> {
        let [flags, ahead] = [(); 2].map(|()| input.byte().unwrap_or(0));
        let mut packet = vec![DENSE, 0, 0xff, 0xff];
        packet.extend(self.ours.qpn.0.to_be_bytes());
        let psn = 0x00ff_fffe_u32.wrapping_add_signed(i32::from(ahead.cast_signed()));
        packet.extend((psn & 0x00ff_ffff | u32::from(flags & 1) << 31).to_be_bytes());
        let parts = flags >> 1 & 7;
        for part in 0..=parts {
            let [kind, size] = [(); 2].map(|()| input.byte().unwrap_or(0));
            // Mostly what a gateway sends: writes, and messages of 44 bytes.
            let is_write = kind & 1 != 0;
            let len = if is_write || kind & 2 != 0 { u16::from(size) * 2 + 1 } else { 44 };
            let more = part < parts;
            let opcode = match (is_write, kind & 0x70) {
                (_, 0x70) => size,
                (true, _) => 0x0a,
                (false, _) => 0x04,
            };
            packet.extend([opcode, u8::from(more) ^ u8::from(kind & 0x78 == 0x48)]);
            packet.extend(len.to_be_bytes());
            if is_write {
                let key = if kind & 4 == 0 { &self.registration } else { &self.closed_key };
                packet.extend((key.address + u64::from(input.short())).to_be_bytes());
                packet.extend(key.rkey.0.to_be_bytes());
                packet.extend((u32::from(len) + u32::from(kind >> 7)).to_be_bytes());
            }
            let end = packet.len() + usize::from(len).next_multiple_of(4);
            packet.extend(input.bytes(len.into()));
            packet.resize(end, 0);
        }
        packet.truncate(4096);
        seal(&mut packet, 0);
        packet
    }

    /// A packet that would be believed, but for what the input says: headers of any kind with the
    /// numbers of this connection in it.
    fn likely(&self, input: &mut Input<'_>, from: u8) -> Vec<u8> {
        let [opcode, flags, ahead] = [(); 3].map(|()| input.byte().unwrap_or(0));
        let len = usize::from(input.short()) % 2048;
        let mut packet = vec![opcode, flags & 0x30, 0xff, 0xff];
        packet.extend(self.ours.qpn.0.to_be_bytes());
        // Ahead of what is expected, or behind it.
        let psn = 0x00ff_fffe_u32.wrapping_add_signed(i32::from(ahead.cast_signed()));
        let ack_request = u32::from(flags & 1) << 31;
        packet.extend((psn & 0x00ff_ffff | ack_request).to_be_bytes());
        packet.extend(input.bytes(len));
        if flags & 6 != 0 && packet.len() >= RETH_END {
            // The address and the key of a region of ours; where in it, the input says.
            let key = if flags & 2 != 0 { &self.registration } else { &self.closed_key };
            let at = u64::from(u16::from_be_bytes([packet[BTH_LEN + 6], packet[BTH_LEN + 7]]));
            packet[BTH_LEN..BTH_LEN + 8].copy_from_slice(&(key.address + at).to_be_bytes());
            packet[BTH_LEN + 8..BTH_LEN + 12].copy_from_slice(&key.rkey.0.to_be_bytes());
        }
        if flags & 8 != 0 && packet.len() >= RETH_END {
            let payload = u32::try_from(packet.len() - RETH_END).expect("two KiB at most");
            packet[BTH_LEN + 12..RETH_END].copy_from_slice(&payload.to_be_bytes());
        }
        let padding = packet.len().wrapping_neg() % 4;
        packet[1] = packet[1] & 0xcf | u8::try_from(padding).expect("three at most") << 4;
        packet.resize(packet.len() + padding, 0);
        seal(&mut packet, from);
        packet
    }

    /// A packet arrives, from the peer or from a stranger.
    fn receive(&mut self, packet: &[u8], is_strange: bool) {
        if packet.is_empty() {
            return;
        }
        let (len, number) = (packet.len(), self.ours.qpn);
        let run = Run {
            target: address(1),
            number,
            reacts: true,
            range: 0..len,
            segment_len: len,
            segments: 1,
        };
        let from = if is_strange { &mut self.stranger } else { &mut self.peer };
        from.send(self.now, packet, &[run]);
    }

    fn send(&mut self, input: &mut Input<'_>) {
        if self.fabric.room(self.qp) > 0 {
            let message = [input.byte().unwrap_or(0); 44];
            self.post(|tag| Work::Send { message, tag });
        }
    }

    fn write(&mut self, input: &mut Input<'_>) {
        let bytes = vec![7; 1 + usize::from(input.short()) % 2048];
        let max = u32::try_from(bytes.len()).expect("two KiB at most");
        if self.fabric.room(self.qp) == 0 {
            return;
        }
        let filled = self.pool.fill(max, |room| {
            let len = bytes.len().min(room.len());
            room.copy_in(&bytes[..len]);
            Ok::<_, ()>(len)
        });
        let Some(Ok(Some(lease))) = filled else { return };
        self.post(|tag| Work::Write { lease, rkey: Rkey(1), address: 4096, tag });
    }

    fn post(&mut self, work: impl FnOnce(Tag) -> Work) {
        self.posted += 1;
        self.fabric.post(self.qp, &mut vec![work(Tag(self.posted))]);
    }

    fn turn(&mut self) {
        self.now = self.now + Duration::from_micros(5);
        self.fabric.poll(self.now, &mut self.out);
        for completion in self.out.drain(..) {
            match completion {
                Completion::Wrote { lease, tag, .. } => {
                    self.pool.take_back(lease);
                    self.ended.push(tag.0);
                }
                Completion::Sent { tag, .. } => self.ended.push(tag.0),
                Completion::Received { .. } => assert_eq!(self.broke, 0, "promise 5"),
                Completion::ReceivedLong { message, .. } => {
                    assert_eq!(self.broke, 0, "promise 5");
                    assert!(message.len() <= smcr_rnic::LONG_MESSAGE_MAX);
                }
                Completion::Broke { .. } => self.broke += 1,
            }
        }
        self.fabric.transmit(self.now);
        self.peer.receive(self.now);
    }

    /// The peer has fallen silent: all that was posted ends, in order and once.
    fn end(mut self) {
        let mut turns = 0;
        loop {
            self.turn();
            self.network.pass(self.now);
            let Some(at) = self.fabric.prepare_sleep(self.now) else { break };
            self.now = self.now.max(at);
            turns += 1;
            assert!(turns < 100_000, "never quiet: {:?}", self.fabric.counters());
        }
        assert_eq!(self.ended, (1..=self.posted).collect::<Vec<_>>(), "promises 1 and 3");
        assert_eq!(self.pool.leases_out(), 0);
        assert!(self.broke <= 1, "it breaks once");
        let mut bytes = vec![1; MEMORY];
        self.closed.copy_out(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "promise 4");
    }
}

fn address(host: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host + 1], UDP_PORT))
}

fn port(host: u8) -> Port {
    Port {
        gid: Gid::from_ipv4([10, 0, 0, host + 1]),
        mac: MacAddress([2, 0, 0, 0, 0, host]),
        mtu: Mtu::B1024,
    }
}

/// Appends the ICRC: what IBTA Annex A17 says, for a packet of host `from` whose identification is
/// zero, in the simplest words.
fn seal(packet: &mut Vec<u8>, from: u8) {
    let len = u16::try_from(packet.len() + 4 + 8).expect("two KiB");
    let mut covered = vec![0xff; 8];
    covered.extend([0x45, 0xff]);
    covered.extend((len + 20).to_be_bytes());
    covered.extend([0, 0, 0x40, 0, 0xff, 17, 0xff, 0xff]);
    covered.extend([10, 0, 0, from + 1, 10, 0, 0, 2]);
    covered.extend([UDP_PORT.to_be_bytes(), UDP_PORT.to_be_bytes()].concat());
    covered.extend(len.to_be_bytes());
    covered.extend([0xff, 0xff]);
    covered.extend(&packet[..]);
    covered[8 + 20 + 8 + 4] = 0xff;
    packet.extend(crc32fast::hash(&covered).to_le_bytes());
}
