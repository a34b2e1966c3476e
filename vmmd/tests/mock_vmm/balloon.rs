//! The balloon, which prints its target on the console.

use vmm_protocol::vmm::{Error, ErrorKind, MachineSpec, SetBalloon, response::Result as Outcome};

use crate::guest::Guest;

/// Message at the boot.
pub fn boot(machine: &MachineSpec) -> Option<String> {
    let target = machine.balloon.map(|balloon| balloon.target_bytes);
    target
        .filter(|bytes| *bytes > 0)
        .map(|bytes| format!("balloon {bytes}\r\n"))
}

/// `mock.balloon=missing`: as a machine that was booted without one.
pub fn set(guest: &Guest, request: SetBalloon) -> Option<Outcome> {
    if guest.option("mock.balloon").is_some() {
        return Some(Outcome::Error(Error {
            message: "the machine has no balloon".into(),
            kind: ErrorKind::NotFound.into(),
        }));
    }
    guest.print(&format!("balloon {}\r\n", request.target_bytes));
    Some(Outcome::Status(guest.status()))
}
