//! Exit codes of the process; part of the user interface (`vmm run --help`).

use vmm_protocol::vmm::ExitKind;

/// The guest powered off, or the run was stopped as asked.
pub const OK: i32 = 0;
/// The vmm or the host failed, or the guest could not be started.
pub const ERROR: i32 = 1;
/// The guest's kernel panicked, or a vCPU failed (triple fault).
pub const GUEST_FAILED: i32 = 2;

/// The code for how a run ended.
pub fn of(kind: ExitKind) -> i32 {
    match kind {
        ExitKind::PowerOff | ExitKind::Stopped => OK,
        ExitKind::GuestPanic | ExitKind::GuestCrash => GUEST_FAILED,
        ExitKind::Unspecified | ExitKind::VmmError | ExitKind::StartFailed | ExitKind::LifelineClosed => {
            ERROR
        }
    }
}
