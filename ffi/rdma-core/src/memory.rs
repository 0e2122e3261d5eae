//! Protection domains, and the memory that a NIC may touch for queue pairs of one.

use std::ffi::{c_uint, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::*;
use smcr_os::{Exposed, Extent};

use crate::context::{Context, last_error};
use crate::has_ended;

/// A protection domain.
#[derive(Debug)]
pub struct ProtectionDomain {
    raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

/// Who may do what with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Our own queue pairs may read and write it.
    Local,
    /// Peers may write it, too.
    Peers,
}

/// Registered memory. The NIC touches it until the value is dropped.
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    domain: Arc<ProtectionDomain>,
    extent: Extent,
    /// Only dropped after the NIC has forgotten it: EXPOSED.
    memory: ManuallyDrop<Box<dyn Exposed>>,
}

// SAFETY: THREADS.
unsafe impl Send for ProtectionDomain {}
// SAFETY: THREADS.
unsafe impl Sync for ProtectionDomain {}
// SAFETY: THREADS, and `Exposed` is `Send`.
unsafe impl Send for MemoryRegion {}
// SAFETY: THREADS, and `Exposed` is `Sync`.
unsafe impl Sync for MemoryRegion {}

impl ProtectionDomain {
    /// Makes a domain.
    ///
    /// # Errors
    ///
    /// When device or driver have no resources.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: `ibv_alloc_pd` asks for an open device: LIVE.
        let raw = unsafe { (context.library().ibv_alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: `ibv_dealloc_pd` asks for a domain that nothing uses any more: LIVE. If it fails,
        // the kernel ends the domain when the device is closed.
        unsafe { (self.context.library().ibv_dealloc_pd)(self.raw()) };
    }
}

impl MemoryRegion {
    /// Registers memory, whose first byte peers will call `known_as`. May take milliseconds.
    ///
    /// # Errors
    ///
    /// When device, driver or the limit of locked memory have no room for it.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        memory: Box<dyn Exposed>,
        access: Access,
        known_as: u64,
    ) -> io::Result<Self> {
        let extent = memory.extent();
        let flags = match access {
            Access::Local => IBV_ACCESS_LOCAL_WRITE,
            Access::Peers => IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
        };
        let library = domain.context.library();
        // SAFETY: `ibv_reg_mr_iova2` asks for
        // - a domain that exists: LIVE;
        // - memory that stays mapped, and that may change at any time, until it is deregistered:
        //   `Exposed`, and EXPOSED, which the result establishes.
        let raw = unsafe {
            (library.ibv_reg_mr_iova2)(
                domain.raw(),
                extent.address as *mut c_void,
                extent.len,
                known_as,
                flags as c_uint,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        Ok(Self { raw, domain: Arc::clone(domain), extent, memory: ManuallyDrop::new(memory) })
    }

    /// The key that our own requests carry.
    pub fn lkey(&self) -> u32 {
        // SAFETY: reading asks for a region that is registered: LIVE.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// The key that peers' writes carry.
    pub fn rkey(&self) -> u32 {
        // SAFETY: reading asks for a region that is registered: LIVE.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    pub(crate) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// The memory.
    pub fn extent(&self) -> Extent {
        self.extent
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let library = self.domain.context.library();
        // SAFETY: `ibv_dereg_mr` asks for a region that is registered: LIVE.
        let errno = unsafe { (library.ibv_dereg_mr)(self.raw.as_ptr()) };
        if has_ended(errno) {
            // SAFETY: `drop` asks for a value that is not used again: it is a field of `self`,
            // which ends here. The NIC touches the memory no more.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // The NIC may still write the memory, so it is never given back.
            std::mem::forget(Arc::clone(&self.domain));
        }
    }
}

impl std::fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRegion").field("extent", &self.extent).finish_non_exhaustive()
    }
}
