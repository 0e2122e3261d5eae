//! DPDK behind a table of plain functions, loaded at run time.
//!
//! Most of DPDK's data path is inline functions and structures of its C headers. `shim.c` uses them
//! and exports one [`Table`]; no structure of DPDK crosses into Rust. The shim is a shared object
//! inside this library. [`table`] hands it to the dynamic linker, which then loads DPDK's
//! libraries: so a program starts without them, and says in one line what is missing when DPDK is
//! asked for.
//!
//! There is no logic here. The crate `dpdk` makes the functions safe.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::marker::{PhantomData, PhantomPinned};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;

mod object {
    //! The shim, which the build script compiled.
    include!(concat!(env!("OUT_DIR"), "/object.rs"));
}

/// A port of DPDK. The shim knows what is in it.
#[repr(C)]
#[derive(Debug)]
pub struct Port {
    opaque: [u8; 0],
    marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// A frame in a packet buffer of DPDK, or room for one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Its first byte.
    pub bytes: *mut u8,
    /// Its length, or how many bytes it may have.
    pub len: u32,
}

/// What a port says of itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Info {
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// The largest IP packet it carries.
    pub mtu: u16,
    /// Not zero if it fills in checksums of IPv4 headers.
    pub ipv4_checksum: u32,
    /// The name of its driver, which a zero ends.
    pub driver: [c_char; 32],
}

/// What a port has counted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Frames that came while the receive queue was full.
    pub missed: u64,
    /// Frames that came damaged.
    pub receive_errors: u64,
    /// Frames that were not sent.
    pub send_errors: u64,
    /// Frames that came when there was no packet buffer.
    pub without_buffer: u64,
}

/// What a port is to be like. Zero is no wish.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wishes {
    /// The MTU in bytes.
    pub mtu: u16,
    /// The VLAN that it is in.
    pub vlan: u16,
    /// The Ethernet address of the group in which neighbours look for its IPv6 address.
    pub group: [u8; 6],
}

/// The functions of the shim. Status is 0 or an errno, unless it says otherwise.
#[repr(C)]
#[derive(Debug)]
pub struct Table {
    /// [`ABI`], of the shim.
    pub abi: u32,
    /// The most frames of one burst.
    pub burst_max: u32,
    /// Names the version of DPDK that was loaded. Never null; the string lives for ever.
    pub version: unsafe extern "C" fn() -> *const c_char,
    /// Moves what DPDK has logged to a buffer of so many bytes. Returns how many it wrote. Any
    /// thread may call it.
    pub take_log: unsafe extern "C" fn(*mut c_char, u32) -> u32,
    /// Starts DPDK with the arguments of its environment abstraction layer (EAL). To be called once
    /// in a process. It pins the calling thread. The arguments must be writable and live for ever.
    pub start: unsafe extern "C" fn(c_int, *mut *mut c_char) -> c_int,
    /// Makes the calling thread known to DPDK.
    pub enter_thread: unsafe extern "C" fn() -> c_int,
    /// Undoes `enter_thread`, on the same thread.
    pub leave_thread: unsafe extern "C" fn(),
    /// Opens a device by its arguments and its name. Says in the last argument what failed, by a
    /// string that lives for ever.
    pub open_port: unsafe extern "C" fn(
        *const c_char,
        *const c_char,
        *const Wishes,
        *mut *mut Port,
        *mut *const c_char,
    ) -> c_int,
    /// Closes a port and gives up its device.
    pub close_port: unsafe extern "C" fn(*mut Port),
    /// Describes a port.
    pub describe: unsafe extern "C" fn(*mut Port, *mut Info) -> c_int,
    /// Receives a burst, which replaces the last one, into an array of `burst_max`. Returns the
    /// number of frames.
    pub receive: unsafe extern "C" fn(*mut Port, *mut Frame) -> u32,
    /// Gives room for up to so many frames, at most `burst_max`. Returns for how many. The bytes
    /// stay the caller's until it calls `transmit` or `close_port`.
    pub vacate: unsafe extern "C" fn(*mut Port, *mut Frame, u32) -> u32,
    /// Sends the first frames that `vacate` gave room for, of these lengths. If the last argument
    /// is not zero, the port fills in checksums of IPv4 headers. Returns how many frames it took.
    pub transmit: unsafe extern "C" fn(*mut Port, *const u32, u32, u32) -> u32,
    /// Whether the link is up: 1, 0, or -1 if the device is gone.
    pub link_state: unsafe extern "C" fn(*mut Port) -> c_int,
    /// Reads the counters.
    pub count: unsafe extern "C" fn(*mut Port, *mut Figures),
}

/// The version of this interface. The shim has the same.
pub const ABI: u32 = 3;
/// The most frames of one burst.
pub const BURST_MAX: usize = 64;

/// Why there is no DPDK. The text is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// This program was built without it, for this reason.
    NotBuilt(&'static str),
    /// The dynamic linker could not load it, and says so.
    NotLoaded(String),
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt(why) => {
                write!(
                    f,
                    "this program was built without DPDK: {why}; run scripts/setup and build it"
                )
            }
            Self::NotLoaded(why) => write!(
                f,
                "DPDK's libraries cannot be loaded: {why}; run scripts/setup, or install the \
                 libraries and drivers of DPDK"
            ),
        }
    }
}

/// The functions of DPDK. The first call loads it.
///
/// # Errors
///
/// [`Unavailable`], then and ever after: this program was built without DPDK, or its libraries are
/// not installed.
pub fn table() -> Result<&'static Table, Unavailable> {
    static TABLE: OnceLock<Result<&'static Table, Unavailable>> = OnceLock::new();
    TABLE.get_or_init(|| load(object::OBJECT.map_err(Unavailable::NotBuilt)?)).clone()
}

/// Loads the shim and finds its table.
fn load(object: &[u8]) -> Result<&'static Table, Unavailable> {
    let not_loaded = |why: String| Unavailable::NotLoaded(why);
    let file = file_of(object).map_err(|error| not_loaded(error.to_string()))?;
    let path = format!("/proc/self/fd/{}\0", file.as_raw_fd());
    // SAFETY: `dlopen` asks for a string that a zero ends, and that what the object runs when it is
    // loaded is sound: `path` ends so and outlives the call. The object is ours, and runs what
    // DPDK's drivers do to make themselves known.
    let handle = unsafe { libc::dlopen(path.as_ptr().cast(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(not_loaded(last_error()));
    }
    // The linker knows objects by their paths: another file must never have this one.
    let _: RawFd = file.into_raw_fd();
    // SAFETY: `dlsym` asks for a handle that is open, which nobody closes, and for a string that a
    // zero ends.
    let symbol = unsafe { libc::dlsym(handle, c"smcgate_dpdk".as_ptr()) };
    let table = NonNull::new(symbol.cast::<Table>()).ok_or_else(|| not_loaded(last_error()))?;
    // SAFETY: the shim defines the symbol as a constant with the layout of `Table`, which the two
    // files keep alike; the object is never unloaded.
    let table = unsafe { table.as_ref() };
    assert_eq!(table.abi, ABI, "the shim was built from the file beside this one");
    assert_eq!(table.burst_max as usize, BURST_MAX, "the shim has bursts of another length");
    Ok(table)
}

/// A file in memory with these bytes.
fn file_of(bytes: &[u8]) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("smcgate-dpdk", MemfdFlags::CLOEXEC)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let written = rustix::io::write(&file, rest)?;
        rest = &rest[written..];
    }
    Ok(file)
}

/// What the dynamic linker says went wrong.
fn last_error() -> String {
    // SAFETY: `dlerror` asks for nothing. It returns null or a string of this thread that stays
    // until the next call of its kind on it.
    let text: *mut c_char = unsafe { libc::dlerror() };
    if ptr::eq(text, ptr::null()) {
        return "the dynamic linker does not say why".into();
    }
    // SAFETY: not null, and a string that a zero ends; nothing is called before it is copied.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

/// The shim's functions take and give these by address.
const _: () = {
    assert!(size_of::<Frame>() == 16 && size_of::<Info>() == 44 && size_of::<Figures>() == 32);
    assert!(size_of::<Wishes>() == 10);
    assert!(size_of::<Table>() == 8 + 13 * size_of::<*const c_void>());
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_object_is_not_loaded() {
        let error = load(b"not an object").expect_err("no linker takes this");
        let Unavailable::NotLoaded(why) = &error else { panic!("{error}") };
        assert!(why.contains("/proc/self/fd"), "{why}");
        assert_eq!(error.to_string().lines().count(), 1);
    }

    #[test]
    fn the_object_of_this_build_has_a_table() {
        let table = table().expect("scripts/setup installs what DPDK needs");
        // SAFETY: it asks for nothing.
        let version = unsafe { (table.version)() };
        // SAFETY: DPDK's own constant.
        let version = unsafe { CStr::from_ptr(version) };
        assert!(version.to_str().expect("ASCII").starts_with("DPDK "), "{version:?}");
    }

    #[test]
    fn a_program_without_dpdk_says_why() {
        let error = Unavailable::NotBuilt("there were no headers");
        let text = "this program was built without DPDK: there were no headers; run scripts/setup \
                    and build it";
        assert_eq!(error.to_string(), text);
    }
}
