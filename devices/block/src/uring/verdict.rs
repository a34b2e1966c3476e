//! Outcome of a request whose call returned.

use std::io;

use vmm_base::sys::Iovecs;

use crate::{engine::Operation, target::unsupported};

/// Action after the return of a call.
pub(super) enum Verdict {
    /// Its request is at its end.
    Over(io::Result<()>),
    /// That is left to be done; `patient` by a kernel thread that may wait.
    Again { operation: Operation, patient: bool },
    /// The pool may know another way.
    Elsewhere,
}

/// Classifies the return of `operation`, the rest of a request. `result` is the value of the system
/// call, or the negative error number. `buffers` belongs to the request; the transferred part is
/// consumed.
pub(super) fn classify(operation: Operation, result: i32, buffers: &mut Iovecs) -> Verdict {
    if let Ok(count) = u32::try_from(result) {
        return advance(operation, count, buffers);
    }
    let error = io::Error::from_raw_os_error(result.saturating_neg());
    let is_allocation = matches!(
        operation,
        Operation::Discard { .. } | Operation::WriteZeroes { .. }
    );
    match error.kind() {
        io::ErrorKind::Interrupted => Verdict::Again {
            operation,
            patient: false,
        },
        io::ErrorKind::WouldBlock => Verdict::Again {
            operation,
            patient: true,
        },
        _ if is_allocation && unsupported(&error) => Verdict::Elsewhere,
        _ => Verdict::Over(Err(error)),
    }
}

/// When `count` bytes of an operation are done.
fn advance(operation: Operation, count: u32, buffers: &mut Iovecs) -> Verdict {
    let (offset, at_end) = match operation {
        Operation::Read { offset } => (offset, io::ErrorKind::UnexpectedEof),
        Operation::Write { offset, .. } => (offset, io::ErrorKind::WriteZero),
        _ => return Verdict::Over(Ok(())),
    };
    buffers.skip(count as usize);
    if buffers.is_empty() {
        return Verdict::Over(Ok(()));
    }
    if count == 0 {
        return Verdict::Over(Err(at_end.into()));
    }
    let offset = offset.saturating_add(count.into());
    let operation = match operation {
        Operation::Write { stable, .. } => Operation::Write { offset, stable },
        _ => Operation::Read { offset },
    };
    Verdict::Again {
        operation,
        patient: false,
    }
}
