//! A port of DPDK with one queue in each direction.

use std::ffi::{CStr, CString};
use std::fs;
use std::io::ErrorKind;
use std::num::NonZero;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Mutex;
use std::thread::{self, AccessError};
use std::time::Duration;

use dpdk_sys::{BURST_MAX, Figures, Frame, Info, Table};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};
use smcr_os::carrier::{Link, NetDevice};

use crate::Error;
use crate::eal::take_log;
use crate::lock::{self, Lock};

/// A port of DPDK with one queue in each direction.
///
/// # Invariants
///
/// Each `SAFETY` comment of this file discharges its obligations with one of these, by name.
///
/// - **LIVE** `raw` came from `open_port` of `table`, and only `drop` closes it.
/// - **SOLE** The type is `Send` but not `Sync`, and whatever enters DPDK takes `&mut self`: no two
///   threads use the port.
/// - **HELD** The first `received` entries of `arrived` name packet buffers of the last burst. DPDK
///   leaves them to us until the next `receive` or `close_port`, and nobody writes them.
/// - **OURS** The first `vacant` entries of `departing` name room in packet buffers that DPDK has
///   left to us until the next `transmit` or `close_port`. No two overlap. DPDK's memory is mapped
///   zeroed, so all its bytes have values.
#[derive(Debug)]
pub struct Port {
    table: &'static Table,
    raw: NonNull<dpdk_sys::Port>,
    info: Info,
    arrived: [Frame; BURST_MAX],
    received: usize,
    departing: [Frame; BURST_MAX],
    vacant: usize,
    /// The network device to ask for the link, if the driver does not know.
    below: Option<NetDevice>,
    /// Goes last: until the port is closed, it is busy.
    _lock: Lock,
}

/// What a port is to be like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// The MTU in bytes that a device of hardware is to have at least, up to what it can; others
    /// have their own.
    pub mtu: Option<u16>,
    /// The VLAN that the port is in, at most 4094: frames leave with its tag, which nobody sees
    /// here, and others are not received. Without one, those that are in no VLAN are.
    pub vlan: Option<NonZero<u16>>,
    /// The Ethernet address of a group whose frames the port must receive, by which neighbours look
    /// for its IPv6 address. Without one, it may leave out frames to groups.
    pub group: Option<[u8; 6]>,
}

// SAFETY: DPDK asks that no two threads use a queue of a port at the same time, which is SOLE, and
// ties nothing of a port to the thread that opened it.
unsafe impl Send for Port {}

impl Port {
    /// Opens a device: what EAL takes after `--vdev`, or a PCI address. DPDK must run. One of
    /// hardware is waited for until it has a link, or three seconds are over.
    ///
    /// # Errors
    ///
    /// [`Error`]: no DPDK, no such device, its port is busy, or there is no memory for it.
    pub fn open(device: &str, wishes: Wishes) -> Result<Self, Error> {
        let table = dpdk_sys::table().map_err(Error::Unavailable)?;
        let device = &lock::canonical(device)[..];
        let name = name_of(device)?;
        let of_hardware = lock::is_pci(device);
        let mtu = memif_mtu(device)?
            .or(wishes.mtu.filter(|mtu| of_hardware && *mtu > ETHERNET_MTU))
            .unwrap_or(0);
        let arguments = CString::new(device).map_err(|_| Error::Misnamed("it has a zero byte"))?;
        let lock = Lock::take(&lock::name(device, lock::namespace()))?;
        if let Some(socket) = socket_of_server(device) {
            remove_if_stale(socket);
        }
        let mut below = None;
        if let Some(interface) = interface_below(device) {
            let refused = |error: std::io::Error| Error::Refused {
                step: "its network device cannot be found; correct iface=",
                why: format!("{interface}: {error}"),
            };
            below = Some(NetDevice::named(interface).map_err(refused)?);
        }
        let _control = CONTROL.lock().expect("nobody panics while holding it");
        // What was logged before has another cause.
        take_log(table);
        let (mut raw, mut step) = (ptr::null_mut(), ptr::null());
        let (all, name) = (arguments.as_ptr(), name.as_ptr());
        let vlan = wishes.vlan.map_or(0, NonZero::get);
        let wishes = dpdk_sys::Wishes { mtu, vlan, group: wishes.group.unwrap_or_default() };
        // SAFETY: `open_port` asks for two strings that a zero ends, for wishes, and for two places
        // to write to: locals that outlive the call. CONTROL keeps other threads from opening and
        // closing.
        let status =
            unsafe { (table.open_port)(all, name, &raw const wishes, &raw mut raw, &raw mut step) };
        if status != 0 {
            // SAFETY: the table promises a string that a zero ends and that lives for ever.
            let step = unsafe { CStr::from_ptr(step) };
            let reason = Errno::from_raw_os_error(status).to_string();
            let mut why = take_log(table).unwrap_or(reason);
            if !device.starts_with("net_memif") && !is_privileged() {
                why += UNPRIVILEGED;
            }
            return Err(Error::Refused { step: step.to_str().expect("our own text"), why });
        }
        let raw = NonNull::new(raw).expect("a status of 0 comes with a port");
        let mut info = Info::default();
        // SAFETY: `describe` asks for an open port that no other thread uses: it was opened above,
        // and nobody else knows it; and for a place to write to.
        let status = unsafe { (table.describe)(raw.as_ptr(), &raw mut info) };
        assert_eq!(status, 0, "a port that was set up can describe itself");
        let none = Frame { bytes: ptr::null_mut(), len: 0 };
        let mut port = Self {
            table,
            raw,
            info,
            arrived: [none; BURST_MAX],
            received: 0,
            departing: [none; BURST_MAX],
            vacant: 0,
            below,
            _lock: lock,
        };
        if of_hardware {
            port.await_link();
        }
        Ok(port)
    }

    /// Waits until both ends of a cable have agreed on how to use it, but not for ever. A gateway
    /// would start with an RNIC that does not work.
    fn await_link(&mut self) {
        for _ in 0..LINK_PATIENCE {
            if self.link() == Link::Up {
                return;
            }
            thread::sleep(LINK_INTERVAL);
        }
    }

    /// Its Ethernet address.
    pub fn mac(&self) -> [u8; 6] {
        self.info.mac
    }

    /// The largest IP packet that it carries, in bytes.
    pub fn mtu(&self) -> u16 {
        self.info.mtu
    }

    /// Whether it fills in the checksums of IPv4 headers.
    pub fn sums_ipv4(&self) -> bool {
        self.info.ipv4_checksum != 0
    }

    /// The name of its driver.
    pub fn driver(&self) -> String {
        let bytes = self.info.driver.iter().map(|&letter| letter.to_ne_bytes()[0]);
        let bytes: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Receives one burst, which replaces the last one. Returns how many frames it has.
    pub fn receive(&mut self) -> usize {
        enter_thread();
        // SAFETY: `receive` asks for an open port that no other thread uses: LIVE, SOLE; and for an
        // array of `BURST_MAX`. No reference to an earlier frame lives: each borrows `self`.
        let count = unsafe { (self.table.receive)(self.raw.as_ptr(), self.arrived.as_mut_ptr()) };
        self.received = count as usize;
        assert!(self.received <= BURST_MAX);
        self.received
    }

    /// A frame of the last burst.
    ///
    /// # Panics
    ///
    /// If `index` is not below what `receive` returned.
    pub fn frame(&self, index: usize) -> &[u8] {
        let frame = self.arrived[..self.received][index];
        // SAFETY: `from_raw_parts` asks for bytes that have values and that nobody writes while the
        // reference lives: HELD, as the reference borrows `self` and `receive` borrows it mutably.
        unsafe { slice::from_raw_parts(frame.bytes, frame.len as usize) }
    }

    /// Makes room for up to `count` frames. Returns how many there is room for: fewer when packet
    /// buffers are out, and at most [`BURST_MAX`].
    pub fn vacate(&mut self, count: usize) -> usize {
        enter_thread();
        let wanted = u32::try_from(count.min(BURST_MAX)).expect("a burst is short");
        let (port, out) = (self.raw.as_ptr(), self.departing.as_mut_ptr());
        // SAFETY: `vacate` asks for an open port that no other thread uses: LIVE, SOLE; and for an
        // array of as many frames as are wanted, which is at most its length.
        let given = unsafe { (self.table.vacate)(port, out, wanted) };
        self.vacant = given as usize;
        assert!(self.vacant <= BURST_MAX);
        self.vacant
    }

    /// The room for a frame. It holds old bytes.
    ///
    /// # Panics
    ///
    /// If `index` is not below what `vacate` returned.
    pub fn room(&mut self, index: usize) -> &mut [u8] {
        let frame = self.departing[..self.vacant][index];
        // SAFETY: `from_raw_parts_mut` asks for bytes that have values and that nobody else uses
        // while the reference lives: OURS, as the reference borrows `self` mutably.
        unsafe { slice::from_raw_parts_mut(frame.bytes, frame.len as usize) }
    }

    /// Sends as many frames as there are `lens`: the first that `vacate` made room for, each of its
    /// length. Returns how many the port took. The others were not sent and must be written again.
    /// With `sum_ipv4` the port fills in the checksums of their IPv4 headers, which must be zero
    /// and have no options.
    ///
    /// # Panics
    ///
    /// If there was no room for as many, or not as long ones, or the port fills in no checksums.
    pub fn transmit(&mut self, lens: &[u32], sum_ipv4: bool) -> usize {
        let frames = &self.departing[..self.vacant][..lens.len()];
        assert!(frames.iter().zip(lens).all(|(frame, len)| *len <= frame.len));
        assert!(!sum_ipv4 || self.sums_ipv4(), "this port fills in no checksums");
        let count = u32::try_from(lens.len()).expect("a burst is short");
        let (port, sum) = (self.raw.as_ptr(), u32::from(sum_ipv4));
        self.vacant = 0;
        // SAFETY: `transmit` asks for an open port that no other thread uses: LIVE, SOLE; for the
        // length of each of the frames, none longer than its room: asserted above; and takes the
        // room back: nothing reaches it after `vacant` became 0.
        let taken = unsafe { (self.table.transmit)(port, lens.as_ptr(), count, sum) };
        assert!(taken <= count);
        taken as usize
    }

    /// Whether it can carry packets now. It costs a system call where the driver does not know.
    pub fn link(&mut self) -> Link {
        if let Some(below) = &self.below {
            return below.link();
        }
        // SAFETY: `link_state` asks for an open port that no other thread uses: LIVE, SOLE.
        match unsafe { (self.table.link_state)(self.raw.as_ptr()) } {
            1 => Link::Up,
            0 => Link::Down,
            _ => Link::Gone,
        }
    }

    /// What the port has counted.
    pub fn figures(&mut self) -> Figures {
        let mut figures = Figures::default();
        // SAFETY: `count` asks for an open port that no other thread uses: LIVE, SOLE; and for a
        // place to write to.
        unsafe { (self.table.count)(self.raw.as_ptr(), &raw mut figures) };
        figures
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // A thread that panicked while it opened a port left it unlocked.
        let _control = CONTROL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: `close_port` asks for an open port that no other thread uses, and that nobody
        // uses again: LIVE, SOLE, and this is `drop`.
        unsafe { (self.table.close_port)(self.raw.as_ptr()) };
    }
}

/// The file at which the server's end of shared memory listens.
fn socket_of_server(device: &str) -> Option<&Path> {
    let has = |argument: &str| device.split(',').any(|part| part == argument);
    let is_server = device.starts_with("net_memif") && has("role=server");
    let socket = device.split(',').find_map(|part| part.strip_prefix("socket="));
    socket.map(Path::new).filter(|_| is_server && has("socket-abstract=no"))
}

/// Removes a socket that a process left behind when it was killed: nobody could listen there again.
fn remove_if_stale(socket: &Path) {
    // The driver's sockets are of another type, so this reaches nobody who listens.
    let refused = UnixStream::connect(socket).map_err(|error| error.kind());
    if matches!(refused, Err(ErrorKind::ConnectionRefused)) {
        // If it cannot be removed, the driver says what is wrong.
        drop(fs::remove_file(socket));
    }
}

/// Whether this thread may do what drivers of network devices and of hardware ask for.
pub fn is_privileged() -> bool {
    let wanted = CapabilitySet::NET_RAW | CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
    capabilities(None).is_ok_and(|sets| sets.effective.contains(wanted))
}

/// The name that DPDK gives to a device.
fn name_of(device: &str) -> Result<CString, Error> {
    let name = device.split(',').next().unwrap_or_default();
    if name.is_empty() {
        return Err(Error::Misnamed("it begins with the name of a driver or is a PCI address"));
    }
    // The peer's process could then write to packets while we read them.
    if device.split(',').any(|argument| argument == "zero-copy=yes") {
        return Err(Error::Misnamed("zero-copy is not supported: the peer could change packets"));
    }
    CString::new(name).map_err(|_| Error::Misnamed("it has a zero byte"))
}

/// The MTU of shared memory, which has none of its own: what fits into one buffer. The driver could
/// spread a longer frame over several, but then overruns the ring of a peer that is slow.
fn memif_mtu(device: &str) -> Result<Option<u16>, Error> {
    if !device.starts_with("net_memif") {
        return Ok(None);
    }
    let size = device.split(',').find_map(|argument| argument.strip_prefix("bsize="));
    let size = size.map_or(Ok(MEMIF_BUFFER), str::parse);
    let mtu = size.ok().and_then(|size: u16| size.checked_sub(ETHERNET_HEADER));
    mtu.map(Some).ok_or(Error::Misnamed("bsize is the length of its buffers: 15 to 65535"))
}

/// The network device whose link the driver of `device` does not watch.
pub fn interface_below(device: &str) -> Option<&str> {
    let mut parts = device.split(',');
    let is_packet = parts.next()?.starts_with("net_af_packet");
    parts.find_map(|part| part.strip_prefix("iface=")).filter(|_| is_packet)
}

/// Makes this thread known to DPDK until it ends. Others can use ports too, but share the packet
/// buffers without a cache of their own.
fn enter_thread() {
    thread_local! {
        static ENTERED: Entered = Entered::new();
    }
    // An error means that the thread is ending, and uses a port after it has left DPDK.
    let _: Result<(), AccessError> = ENTERED.try_with(|_| ());
}

/// A thread that DPDK knows.
struct Entered(Option<&'static Table>);

impl Entered {
    fn new() -> Self {
        let table = dpdk_sys::table().expect("whoever has a port has loaded DPDK");
        // SAFETY: `enter_thread` asks that DPDK runs: whoever has a port has started it.
        let status = unsafe { (table.enter_thread)() };
        Self((status == 0).then_some(table))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(table) = self.0 {
            // SAFETY: `leave_thread` asks for the thread that entered: thread-local values are
            // dropped on their own thread.
            unsafe { (table.leave_thread)() };
        }
    }
}

/// What most often is in the way of drivers.
const UNPRIVILEGED: &str = "; this process has not CAP_NET_RAW, CAP_NET_ADMIN and CAP_SYS_ADMIN: \
                            run it as root";
/// How often to look whether a new port has a link, and how long at most: three seconds.
const LINK_INTERVAL: Duration = Duration::from_millis(10);
const LINK_PATIENCE: u32 = 300;
/// The length of the driver's buffers, if nobody says otherwise.
const MEMIF_BUFFER: u16 = 2048;
const ETHERNET_HEADER: u16 = 14;
const ETHERNET_MTU: u16 = 1_500;

/// DPDK opens and closes one port at a time.
static CONTROL: Mutex<()> = Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_right_is_refused_by_name() {
        let refused = |device| matches!(name_of(device), Err(Error::Misnamed(_)));
        assert!(refused("") && refused(",iface=va") && refused("net\0"));
        assert!(refused("net_memif0,role=client,zero-copy=yes"));
        assert!(!refused("net_memif0,role=client,zero-copy=no"));
    }

    #[test]
    fn shared_memory_has_the_mtu_of_its_buffers() {
        assert_eq!(memif_mtu("net_memif0,role=server"), Ok(Some(2034)));
        assert_eq!(memif_mtu("net_memif0,bsize=4608"), Ok(Some(4594)));
        assert!(
            memif_mtu("net_memif0,bsize=13").is_err() && memif_mtu("net_memif0,bsize=").is_err()
        );
        assert_eq!(memif_mtu("net_tap0,bsize=13"), Ok(None));
    }

    #[test]
    fn the_kernel_is_asked_for_links_that_the_driver_does_not_watch() {
        assert_eq!(interface_below("net_af_packet0,qpairs=1,iface=va"), Some("va"));
        assert_eq!(interface_below("net_tap0,iface=va"), None);
        assert_eq!(interface_below("0000:03:00.0"), None);
    }
}
