//! Failed memory of the host: the guest gets a machine check for it, as on hardware, and ends the process that used the memory.
//!
//! ```text
//! guest touches a page that the host's memory controller gave up
//!   → KVM sends SIGBUS (BUS_MCEERR_AR, host address) to the vCPU's thread, and KVM_RUN ends with EINTR
//!   → the signal's handler notes the guest address ([`note`])
//!   → the vCPU's thread takes it ([`take`]) and has KVM raise exception 18 ([`record`])
//! ```
//!
//! A thread of the `vmm` that reads such a page itself can't continue: the process ends.

use std::{cell::Cell, ffi::c_int};

use kvm_bindings::kvm_x86_mce;

/// `IA32_MCG_CAP`: the guest can recover from some errors (Intel SDM vol. 3, 16.3.1.1, MCG_SER_P).
pub(super) const RECOVERY: u64 = 1 << 24;

/// The bank of memory errors, as in QEMU (`kvm_mce_inject` of its target/i386/kvm/kvm.c).
pub(super) const BANK: u8 = 9;

/// `IA32_MCi_STATUS` (Intel SDM vol. 3, 16.3.2.2): valid, uncorrected, enabled, with `MISC` and `ADDR`, signalled by an exception, and
/// action required.
const VALID: u64 = 1 << 63;
const UNCORRECTED: u64 = 1 << 61;
const ENABLED: u64 = 1 << 60;
const HAS_MISC: u64 = 1 << 59;
const HAS_ADDRESS: u64 = 1 << 58;
const SIGNALLED: u64 = 1 << 56;
const ACTION_REQUIRED: u64 = 1 << 55;
/// The error code of a load of data (16.9.3.2).
const DATA_LOAD: u64 = 0x134;
/// `IA32_MCG_STATUS`: the instruction at which the exception comes can be repeated, and caused it; a machine check is in progress.
const MCG_STATUS: u64 = 0b111;
/// `IA32_MCi_MISC` (16.3.2.4): a physical address, whose lowest 12 bits say nothing.
const PHYSICAL_PAGE: u64 = 2 << 6 | 12;

thread_local! {
    // Without initialization and destructor, so that a signal's handler may use them.
    static IN_GUEST: Cell<bool> = const { Cell::new(false) };
    static FAILED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// This thread is about to enter the guest, or has left it.
pub(super) fn set_in_guest(inside: bool) {
    let _ = IN_GUEST.try_with(|state| state.set(inside));
}

/// For the handler of SIGBUS with this `si_code`, which came for the guest address: true when the guest handles
/// the failure and the thread continues. Allocates nothing and takes no lock.
pub fn note(code: c_int, address: Option<u64>) -> bool {
    let Some(address) = address else { return false };
    match code {
        libc::BUS_MCEERR_AR if IN_GUEST.try_with(Cell::get).unwrap_or(false) => {
            FAILED.try_with(|failed| failed.set(Some(address))).is_ok()
        }
        // No access yet. The next one raises the other signal.
        libc::BUS_MCEERR_AO => true,
        _ => false,
    }
}

/// The guest address that was noted since the last call.
pub(super) fn take() -> Option<u64> {
    FAILED.try_with(Cell::take).ok().flatten()
}

/// The registers that the guest's machine-check handler reads.
pub(super) fn record(address: u64) -> kvm_x86_mce {
    kvm_x86_mce {
        status: VALID
            | UNCORRECTED
            | ENABLED
            | HAS_MISC
            | HAS_ADDRESS
            | SIGNALLED
            | ACTION_REQUIRED
            | DATA_LOAD,
        addr: address,
        misc: PHYSICAL_PAGE,
        mcg_status: MCG_STATUS,
        bank: BANK,
        ..kvm_x86_mce::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_memory_is_the_guests_while_it_runs_alone() {
        const AT: Option<u64> = Some(0x1234_5000);
        let (required, optional) = (libc::BUS_MCEERR_AR, libc::BUS_MCEERR_AO);
        // A thread of the process itself has touched the memory.
        assert!(!note(required, AT));
        assert_eq!(take(), None);
        set_in_guest(true);
        assert!(note(required, AT));
        assert_eq!((take(), take()), (AT, None));
        // No RAM of the guest, or no failure of memory.
        assert!(!note(required, None));
        assert!(!note(libc::BUS_ADRERR, AT));
        // No thread has used it.
        assert!(note(optional, AT) && !note(optional, None));
        set_in_guest(false);
        assert!(note(optional, AT) && !note(required, AT));
        assert_eq!(take(), None);
    }
}
