//! An open device: its limits, its ports, their GIDs, and what it reports.

use std::ffi::{CStr, c_int};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};
use std::{fmt, io, mem, slice};

use rdma_core_sys::*;

use crate::check;

/// Opens the libibverbs of the distribution, once for the life of the process.
///
/// # Errors
///
/// [`Missing`], when it is not installed or is of a version without the functions we need.
pub fn load() -> Result<&'static Library, Missing> {
    static LIBRARY: OnceLock<Result<Library, Missing>> = OnceLock::new();
    // SAFETY: `open` asks that a file of this name be libibverbs: it is the library's name in every
    // distribution, and no other library has it.
    let library = LIBRARY.get_or_init(|| unsafe { Library::open(c"libibverbs.so.1") });
    library.as_ref().map_err(Clone::clone)
}

/// An open device.
pub struct Context {
    raw: NonNull<ibv_context>,
    library: &'static Library,
}

/// Why a device cannot be opened.
#[derive(Debug)]
pub enum OpenError {
    /// There is no device of this name, but these.
    Absent(Vec<String>),
    /// The kernel or the driver refuses.
    Refused(io::Error),
}

/// What the device offers at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Completion queues.
    pub completion_queues: u32,
    /// Entries of one completion queue.
    pub completion_entries: u32,
    /// Requests of one send or receive queue.
    pub requests: u32,
}

/// A port, as it is now.
#[derive(Clone, Copy, Debug)]
pub struct PortState {
    /// Whether it carries packets.
    pub active: bool,
    /// Whether it is an Ethernet port, so that its packets are RoCE.
    pub ethernet: bool,
    /// The code of its path MTU.
    pub mtu: u8,
}

/// One entry of a port's table of GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID.
    pub gid: [u8; 16],
    /// Its index.
    pub index: u32,
    /// Whether packets from it are RoCEv2, over UDP; otherwise RoCE v1, or InfiniBand.
    pub over_udp: bool,
    /// The interface index of its network device; zero if it has none.
    pub interface: u32,
}

/// What a device reports by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// It is about a port, of which the first is 1.
    Port(u8, PortEvent),
    /// The device is dead.
    DeviceFatal,
    /// Anything else, by the number that the C headers give it.
    Other(i32),
}

/// What a device reports about one of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortEvent {
    /// The port carries packets again.
    Active,
    /// The port carries packets no more.
    Error,
    /// The port has other GIDs.
    GidsChanged,
}

// SAFETY: verbs objects are not tied to the thread that made them: THREADS.
unsafe impl Send for Context {}
// SAFETY: THREADS.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device `name`.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(library: &'static Library, name: &str) -> Result<Arc<Self>, OpenError> {
        let mut count: c_int = 0;
        // SAFETY: `ibv_get_device_list` asks for a place to store a count: a live local.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(|| match last_error() {
            // The kernel has no RDMA, so there are no devices.
            error if error.raw_os_error() == Some(libc::ENOSYS) => OpenError::Absent(Vec::new()),
            error => OpenError::Refused(error),
        })?;
        let count = usize::try_from(count).expect("a count");
        // SAFETY: `from_raw_parts` asks for that many initialized elements that stay: the list has
        // as many as the call counted, and is freed only below.
        let devices = unsafe { slice::from_raw_parts(list.as_ptr(), count) };
        let names: Vec<String> =
            devices.iter().map(|device| device_name(library, *device)).collect();
        let opened = match names.iter().position(|one| one == name) {
            // SAFETY: `ibv_open_device` asks for a device of a list that was not freed.
            Some(index) => NonNull::new(unsafe { (library.ibv_open_device)(devices[index]) })
                .ok_or_else(|| OpenError::Refused(last_error())),
            None => Err(OpenError::Absent(names)),
        };
        // SAFETY: `ibv_free_device_list` asks for a list that is freed once; an open device keeps
        // what it needs of it.
        unsafe { (library.ibv_free_device_list)(list.as_ptr()) };
        let context = Self { raw: opened?, library };
        // Reading events must not block: there may be none.
        set_nonblocking(context.event_descriptor()).map_err(OpenError::Refused)?;
        Ok(Arc::new(context))
    }

    /// What the device offers at most.
    ///
    /// # Errors
    ///
    /// When the driver does not answer.
    pub fn limits(&self) -> io::Result<Limits> {
        // SAFETY: `zeroed` asks for a type that may be all zero: integers.
        let mut attributes: ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: `ibv_query_device` asks for an open device (LIVE) and a place to store: a local
        // of the size that the headers give it.
        check(unsafe { (self.library.ibv_query_device)(self.raw(), &raw mut attributes) })?;
        let at_least_zero = |count: c_int| u32::try_from(count).unwrap_or(0);
        Ok(Limits {
            completion_queues: at_least_zero(attributes.max_cq),
            completion_entries: at_least_zero(attributes.max_cqe),
            requests: at_least_zero(attributes.max_qp_wr),
        })
    }

    /// The state of a port. The first port is 1.
    ///
    /// # Errors
    ///
    /// When there is no such port.
    pub fn port(&self, port: u8) -> io::Result<PortState> {
        // SAFETY: `zeroed` asks for a type that may be all zero: integers.
        let mut attributes: ibv_port_attr = unsafe { mem::zeroed() };
        // SAFETY: `ibv_query_port` asks for an open device (LIVE) and a place to store: a local
        // of the size that the headers give it.
        check(unsafe { (self.library.ibv_query_port)(self.raw(), port, &raw mut attributes) })?;
        Ok(PortState {
            active: attributes.state == IBV_PORT_ACTIVE,
            ethernet: attributes.link_layer == IBV_LINK_LAYER_ETHERNET,
            mtu: u8::try_from(attributes.active_mtu).unwrap_or(0),
        })
    }

    /// The GIDs of a port, in the order of their indexes.
    ///
    /// # Errors
    ///
    /// When the driver does not answer.
    pub fn gids(&self, port: u8) -> io::Result<Vec<GidEntry>> {
        // SAFETY: `zeroed` asks for a type that may be all zero: integers.
        let mut entries: Vec<ibv_gid_entry> = vec![unsafe { mem::zeroed() }; GIDS_MAX];
        let size = size_of::<ibv_gid_entry>();
        // SAFETY: `_ibv_query_gid_table` asks for an open device (LIVE), and for room for as many
        // entries of this size as we say.
        let count = unsafe {
            (self.library._ibv_query_gid_table)(
                self.raw(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size,
            )
        };
        let count = usize::try_from(count)
            .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-count).unwrap_or(0)))?;
        let ours = entries[..count].iter().filter(|entry| entry.port_num == u32::from(port));
        let ours = ours.map(|entry| GidEntry {
            gid: entry.gid.raw,
            index: entry.gid_index,
            over_udp: entry.gid_type == IBV_GID_TYPE_ROCE_V2,
            interface: entry.ndev_ifindex,
        });
        Ok(ours.collect())
    }

    /// The file name of its node below `/dev/infiniband`, which goes when the device goes.
    pub fn node(&self) -> String {
        // SAFETY: reading asks for a context that is open: LIVE.
        let device = unsafe { (*self.raw()).device };
        // SAFETY: reading asks for a device of an open context, which the library keeps.
        let name = unsafe { (*device).dev_name };
        let bytes = name.iter().map(|letter| letter.to_ne_bytes()[0]);
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Readable while [`event`](Self::event) has something.
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: reading asks for a context that is open: LIVE.
        let descriptor = unsafe { (*self.raw()).async_fd };
        // SAFETY: `borrow_raw` asks for a descriptor that stays open: it is the device's, which is
        // open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }

    /// Takes the next report of the device.
    pub fn event(&self) -> Option<AsyncEvent> {
        let element = ibv_event_element { object: ptr::null_mut() };
        let mut event = ibv_async_event { element, event_type: 0 };
        // SAFETY: `ibv_get_async_event` asks for an open device (LIVE) and a place to store. Its
        // descriptor does not block.
        let errno = unsafe { (self.library.ibv_get_async_event)(self.raw(), &raw mut event) };
        if errno != 0 {
            return None;
        }
        // SAFETY: `ibv_ack_async_event` asks for an event that was taken and not acknowledged.
        unsafe { (self.library.ibv_ack_async_event)(&raw mut event) };
        Some(match event.event_type {
            IBV_EVENT_PORT_ACTIVE => AsyncEvent::Port(port_of(&event), PortEvent::Active),
            IBV_EVENT_PORT_ERR => AsyncEvent::Port(port_of(&event), PortEvent::Error),
            IBV_EVENT_GID_CHANGE => AsyncEvent::Port(port_of(&event), PortEvent::GidsChanged),
            IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
            other => AsyncEvent::Other(other),
        })
    }

    pub(crate) fn poll_cq(&self) -> PollCq {
        // SAFETY: reading asks for a context that is open: LIVE, and TABLE.
        unsafe { (*self.raw()).ops.poll_cq }
    }

    pub(crate) fn req_notify_cq(&self) -> ReqNotifyCq {
        // SAFETY: reading asks for a context that is open: LIVE, and TABLE.
        unsafe { (*self.raw()).ops.req_notify_cq }
    }

    pub(crate) fn post_send(&self) -> PostSend {
        // SAFETY: reading asks for a context that is open: LIVE, and TABLE.
        unsafe { (*self.raw()).ops.post_send }
    }

    pub(crate) fn post_recv(&self) -> PostRecv {
        // SAFETY: reading asks for a context that is open: LIVE, and TABLE.
        unsafe { (*self.raw()).ops.post_recv }
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: `ibv_close_device` asks for an open device that nothing uses any more: LIVE, all
        // that was made from it holds an `Arc` of it.
        unsafe { (self.library.ibv_close_device)(self.raw()) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("node", &self.node()).finish_non_exhaustive()
    }
}

/// The number of the port that an event is about.
fn port_of(event: &ibv_async_event) -> u8 {
    // SAFETY: reading a field of a union asks for a value of its type: `Context::event` has set all
    // bytes of the union, and any bytes are an integer.
    let number = unsafe { event.element.port_num };
    // No port has a number above 255, so 0 is that of no port.
    u8::try_from(number).unwrap_or(0)
}

fn device_name(library: &Library, device: *mut ibv_device) -> String {
    // SAFETY: `ibv_get_device_name` asks for a device of a list that was not freed.
    let name = unsafe { (library.ibv_get_device_name)(device) };
    // SAFETY: `from_ptr` asks for a string that ends with zero and stays: it is part of the device.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// Lets reads of the descriptor fail rather than block.
pub(crate) fn set_nonblocking(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: `fcntl(F_SETFL)` asks for an open descriptor, which a `BorrowedFd` is.
    let result = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// The error of a call that has just returned nothing.
pub(crate) fn last_error() -> io::Error {
    io::Error::last_os_error()
}

/// The most GIDs that we look at; what has more has the first of them in use.
const GIDS_MAX: usize = 1_024;
