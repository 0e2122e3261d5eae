//! The devices, their queue pairs, and the thread that carries out requests.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::c_void;
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::Duration;

use rdma_core_sys::*;

use crate::trouble::Trouble;

/// All devices of the process.
#[derive(Default)]
pub(crate) struct Network {
    pub(crate) devices: Vec<Device>,
    pub(crate) pairs: HashMap<u32, Pair>,
    pub(crate) regions: HashMap<u32, Region>,
    pub(crate) queues: HashMap<usize, Queue>,
    pub(crate) next_key: u32,
    dice: u64,
}

pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) address: [u8; 4],
    /// The first is port 1, which has the address and carries what queue pairs send.
    pub(crate) ports: [Port; 2],
    pub(crate) troubles: HashSet<Trouble>,
    /// The most bytes that a request may carry itself.
    pub(crate) inline_max: u32,
    /// The most bytes that may be registered; the kernel says `ENOMEM` to more.
    pub(crate) registered_max: u64,
    /// Each with the port that it is about.
    pub(crate) events: VecDeque<(i32, u8)>,
    /// An eventfd that counts the events.
    pub(crate) wakeup: i32,
    pub(crate) census: HashMap<&'static str, usize>,
}

#[derive(Clone, Copy)]
pub(crate) struct Port {
    pub(crate) up: bool,
    /// The code of its path MTU.
    pub(crate) mtu: i32,
}

pub(crate) struct Pair {
    pub(crate) device: usize,
    pub(crate) pd: usize,
    pub(crate) queue: usize,
    pub(crate) state: i32,
    pub(crate) peer: u32,
    pub(crate) sends: VecDeque<Send>,
    pub(crate) receives: VecDeque<Receive>,
    pub(crate) most: [usize; 2],
    pub(crate) inline: u32,
    /// Turns in which the peer did not answer.
    pub(crate) silence: u32,
}

pub(crate) struct Send {
    pub(crate) id: u64,
    pub(crate) opcode: i32,
    pub(crate) signaled: bool,
    /// Bytes that were copied when it was posted; otherwise they are read when it is carried out.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) piece: ibv_sge,
    pub(crate) rkey: u32,
    pub(crate) address: u64,
}

pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) piece: ibv_sge,
}

pub(crate) struct Region {
    pub(crate) device: usize,
    pub(crate) pd: usize,
    pub(crate) memory: u64,
    pub(crate) known_as: u64,
    pub(crate) len: u64,
    pub(crate) peers: bool,
}

pub(crate) struct Queue {
    pub(crate) entries: VecDeque<ibv_wc>,
    pub(crate) most: usize,
    pub(crate) armed: bool,
    pub(crate) channel: usize,
    /// The channel's eventfd.
    pub(crate) wakeup: i32,
}

static NETWORK: Mutex<Option<Network>> = Mutex::new(None);

/// Calls `act` with the network, which has a thread of its own from the first call on.
pub(crate) fn with<R>(act: impl FnOnce(&mut Network) -> R) -> R {
    static THREAD: Once = Once::new();
    THREAD.call_once(|| {
        thread::spawn(|| {
            loop {
                thread::sleep(TURN);
                with(Network::turn);
            }
        });
    });
    // A test that has failed has said so.
    let mut network = NETWORK.lock().unwrap_or_else(PoisonError::into_inner);
    act(network.get_or_insert_with(Network::default))
}

impl Network {
    pub(crate) fn plug(&mut self, address: [u8; 4]) -> String {
        let name = format!("fake{}", self.devices.len());
        // SAFETY: `eventfd` asks for nothing.
        let wakeup = unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) };
        assert!(wakeup >= 0);
        self.devices.push(Device {
            name: name.clone(),
            address,
            ports: [Port { up: true, mtu: 3 }; 2],
            troubles: HashSet::new(),
            inline_max: 256,
            registered_max: u64::MAX,
            events: VecDeque::new(),
            wakeup,
            census: HashMap::new(),
        });
        name
    }

    pub(crate) fn report(&mut self, device: &str, event: i32, number: u8) {
        let device = self.device(device);
        let up = &mut device.port(number).expect("a device has two ports").up;
        *up = event != IBV_EVENT_PORT_ERR && (*up || event == IBV_EVENT_PORT_ACTIVE);
        device.events.push_back((event, number));
        signal(device.wakeup);
    }

    pub(crate) fn device(&mut self, name: &str) -> &mut Device {
        self.devices.iter_mut().find(|one| one.name == name).expect("plugged")
    }

    pub(crate) fn census(&self, device: &str) -> HashMap<&'static str, usize> {
        self.devices.iter().find(|one| one.name == device).expect("plugged").census.clone()
    }

    pub(crate) fn count(&mut self, device: usize, what: &'static str, more: bool) {
        let count = self.devices[device].census.entry(what).or_default();
        *count = if more { *count + 1 } else { count.checked_sub(1).expect("it existed") };
    }

    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.dice >> 33) % sides
    }

    /// Carries out some requests of each queue pair.
    fn turn(&mut self) {
        let mut numbers: Vec<u32> = self.pairs.keys().copied().collect();
        let shift = self.roll(numbers.len().max(1) as u64);
        numbers.rotate_left(usize::try_from(shift).expect("an index"));
        for number in numbers {
            for _ in 0..self.roll(64) {
                if !self.step(number) {
                    break;
                }
            }
        }
    }

    /// Carries out one request. Returns false if there is none, or it must wait.
    fn step(&mut self, number: u32) -> bool {
        let pair = self.pairs.get_mut(&number).expect("listed");
        if pair.state == IBV_QPS_ERR {
            return self.flush(number);
        }
        let up = self.devices[pair.device].ports[0].up;
        if pair.state != IBV_QPS_RTS || pair.sends.is_empty() {
            return false;
        }
        let (peer, device) = (pair.peer, pair.device);
        let answers = self.pairs.get(&peer).is_some_and(|far| {
            let connected = far.peer == number && [IBV_QPS_RTR, IBV_QPS_RTS].contains(&far.state);
            connected && self.devices[far.device].ports[0].up
        });
        if !answers || !up {
            return self.go_on_trying(number, device);
        }
        let far = self.pairs.get(&peer).expect("it answers");
        let send = &self.pairs[&number].sends[0];
        if send.opcode == IBV_WR_SEND && far.receives.is_empty() {
            return false;
        }
        self.deliver(number, peer);
        true
    }

    /// Waits for a peer that does not answer, but not for ever.
    fn go_on_trying(&mut self, number: u32, _device: usize) -> bool {
        let pair = self.pairs.get_mut(&number).expect("it sends");
        pair.silence += 1;
        if pair.silence > SILENCE_MAX {
            let send = pair.sends.pop_front().expect("it sends");
            self.complete(number, send.id, IBV_WC_RETRY_EXC_ERR, 0);
            self.break_down(number);
        }
        false
    }

    /// Carries out the oldest request of a queue pair whose peer answers.
    fn deliver(&mut self, number: u32, peer: u32) {
        let pair = self.pairs.get_mut(&number).expect("it sends");
        pair.silence = 0;
        let (send, pd) = (pair.sends.pop_front().expect("it sends"), pair.pd);
        let bytes = match &send.inline {
            Some(bytes) => bytes.clone(),
            None => self.read(pd, send.piece),
        };
        let refusal = if send.opcode == IBV_WR_RDMA_WRITE {
            let far = self.pairs[&peer].pd;
            match self.target(far, send.rkey, send.address, bytes.len()) {
                Some(target) => {
                    place(target, &bytes);
                    None
                }
                None => Some((IBV_WC_REM_ACCESS_ERR, None)),
            }
        } else {
            let far = self.pairs.get_mut(&peer).expect("it answers");
            let receive = far.receives.pop_front().expect("looked at before");
            let fits = bytes.len() <= receive.piece.length as usize;
            if fits {
                let target = self.checked(self.pairs[&peer].pd, receive.piece);
                place(target, &bytes);
                self.complete(peer, receive.id, IBV_WC_SUCCESS, bytes.len());
                None
            } else {
                Some((IBV_WC_REM_INV_REQ_ERR, Some(receive.id)))
            }
        };
        match refusal {
            None if send.signaled => self.complete(number, send.id, IBV_WC_SUCCESS, 0),
            None => {}
            Some((status, receive)) => {
                if let Some(receive) = receive {
                    self.complete(peer, receive, IBV_WC_LOC_LEN_ERR, 0);
                }
                self.complete(number, send.id, status, 0);
                self.break_down(number);
                self.break_down(peer);
            }
        }
    }

    fn break_down(&mut self, number: u32) {
        self.pairs.get_mut(&number).expect("it exists").state = IBV_QPS_ERR;
    }

    /// Ends one request or receive buffer of a queue pair in error.
    fn flush(&mut self, number: u32) -> bool {
        let from_receives = self.roll(2) == 0;
        let pair = self.pairs.get_mut(&number).expect("it exists");
        let receive = pair.receives.pop_front().map(|receive| receive.id);
        let id = if from_receives || pair.sends.is_empty() {
            receive.or_else(|| pair.sends.pop_front().map(|send| send.id))
        } else {
            if let Some(id) = receive {
                self.complete(number, id, IBV_WC_WR_FLUSH_ERR, 0);
            }
            self.pairs.get_mut(&number).expect("it exists").sends.pop_front().map(|send| send.id)
        };
        let Some(id) = id else { return false };
        self.complete(number, id, IBV_WC_WR_FLUSH_ERR, 0);
        true
    }

    fn complete(&mut self, number: u32, id: u64, status: i32, len: usize) {
        let pair = &self.pairs[&number];
        let queue = self.queues.get_mut(&pair.queue).expect("it outlives its queue pairs");
        assert!(queue.entries.len() < queue.most, "a completion queue overran");
        let byte_len = u32::try_from(len).expect("short");
        // As the soft RNIC of Linux does, say nothing more than this on errors.
        queue.entries.push_back(ibv_wc {
            wr_id: id,
            status,
            opcode: 0,
            vendor_err: 0,
            byte_len,
            imm_data: 0,
            qp_num: number,
            src_qp: 0,
            wc_flags: 0,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        });
        if queue.armed {
            queue.armed = false;
            signal(queue.wakeup);
        }
    }

    /// Where the bytes of a piece are. A key that does not cover them is a bug of the caller.
    fn checked(&self, pd: usize, piece: ibv_sge) -> u64 {
        let region = self.regions.get(&piece.lkey).expect("a piece with a key that exists");
        let (address, length) = (piece.addr, u64::from(piece.length));
        let inside = address >= region.known_as && address + length <= region.known_as + region.len;
        assert!(region.pd == pd && inside, "a piece of another domain or beyond its registration");
        region.memory + (address - region.known_as)
    }

    fn read(&self, pd: usize, piece: ibv_sge) -> Vec<u8> {
        let source = self.checked(pd, piece);
        let mut bytes = vec![0; piece.length as usize];
        // SAFETY: `memcpy` asks for memory that can be read and written: the caller registered the
        // one, and the other is ours. It stands for what a NIC does: no access of Rust code.
        unsafe {
            libc::memcpy(bytes.as_mut_ptr().cast(), source as *const c_void, bytes.len());
        }
        bytes
    }

    /// Where a peer's write goes; `None` if it is forbidden.
    fn target(&self, pd: usize, rkey: u32, address: u64, len: usize) -> Option<u64> {
        let region = self.regions.get(&rkey)?;
        let end = address.checked_add(len as u64)?;
        let inside = address >= region.known_as && end <= region.known_as + region.len;
        (region.peers && region.pd == pd && inside)
            .then(|| region.memory + (address - region.known_as))
    }
}

impl Device {
    /// The port with this number, of which the first is 1.
    pub(crate) fn port(&mut self, number: u8) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(number).checked_sub(1)?)
    }
}

/// Writes as a NIC does: it is no access of Rust code.
fn place(target: u64, bytes: &[u8]) {
    // SAFETY: `memcpy` asks for memory that can be read and written: the one is ours, the other is
    // part of a registration, whose owner promised that it stays mapped.
    unsafe { libc::memcpy(target as *mut c_void, bytes.as_ptr().cast(), bytes.len()) };
}

/// Adds one to an eventfd.
pub(crate) fn signal(eventfd: i32) {
    let one = 1_u64.to_ne_bytes();
    // SAFETY: `write` asks for an open descriptor and for bytes: a live local.
    let written = unsafe { libc::write(eventfd, one.as_ptr().cast(), 8) };
    assert_eq!(written, 8);
}

/// How long the network rests between two turns.
const TURN: Duration = Duration::from_micros(30);
/// After so many turns without an answer, a request has failed: half a second or more. Longer
/// than a test lets a peer wait on purpose, or a busy machine the thread that connects the peer.
const SILENCE_MAX: u32 = 10_000;
