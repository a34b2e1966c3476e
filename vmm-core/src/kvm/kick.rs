//! Exit of a vCPU from `KVM_RUN`.
//!
//! A signal alone is lost if it arrives just before `KVM_RUN`. KVM does not check `immediate_exit`
//! while the guest runs. The caller therefore sets the flag first, and then signals the thread:
//! either KVM sees the flag on entry, or the signal ends the run. The flag stays set until the
//! thread that stopped the vCPU clears it.

use std::{
    mem::offset_of,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::{
        OnceLock,
        atomic::{AtomicU8, Ordering},
    },
    thread::JoinHandle,
};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::host::KvmError;

const PAGE: usize = 4096;

/// The `immediate_exit` flag of one vCPU, for any thread.
///
/// It has a mapping of its own of the page, so that it may outlive the vCPU.
#[derive(Debug)]
pub struct Kicker {
    page: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value, and the one byte used of it is accessed atomically.
unsafe impl Send for Kicker {}
// SAFETY: as above.
unsafe impl Sync for Kicker {}

impl Kicker {
    pub(super) fn new(vcpu: &VcpuFd) -> Result<Self, KvmError> {
        // SAFETY: the fd is open for the duration of this function.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe {
            mmap(
                std::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        let failed = |source| KvmError::Ioctl {
            operation: "mapping of kvm_run",
            source,
        };
        let page = page.map_err(|errno| failed(errno.into()))?;
        NonNull::new(page.cast())
            .map(|page| Self { page })
            .ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))
    }

    /// Makes the present or next `KVM_RUN` of the vCPU return once pending I/O is completed. A thread that is in it
    /// needs [`interrupt`] too.
    pub fn set(&self) {
        self.flag().store(1, Ordering::SeqCst);
    }

    /// Lets `KVM_RUN` run again.
    pub fn clear(&self) {
        self.flag().store(0, Ordering::SeqCst);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.flag().load(Ordering::SeqCst) != 0
    }

    fn flag(&self) -> &AtomicU8 {
        const OFFSET: usize = offset_of!(kvm_run, immediate_exit);
        const { assert!(OFFSET < PAGE) };
        // SAFETY: within the mapped page.
        let byte = unsafe { self.page.add(OFFSET) };
        // SAFETY: the byte is mapped as long as `self` lives; kernel and vCPU threads read it only.
        unsafe { AtomicU8::from_ptr(byte.as_ptr()) }
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; references to it don't outlive `self`.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Makes the kick signal (`SIGRTMIN`) one that interrupts system calls and does nothing else.
pub(crate) fn install_handler() -> Result<(), KvmError> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| register_signal_handler(SIGRTMIN(), nothing).map_err(|errno| errno.errno()))
        .map_err(|errno| KvmError::Ioctl {
            operation: "installing the kick signal's handler",
            source: std::io::Error::from_raw_os_error(errno),
        })
}

/// Interrupts `thread` if it is in a system call.
pub(crate) fn interrupt<T>(thread: &JoinHandle<T>) {
    // A thread that has ended needs no signal; there is no other way for this to fail.
    let _ = thread.kill(SIGRTMIN());
}
