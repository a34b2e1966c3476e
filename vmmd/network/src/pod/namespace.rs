//! Work in another network namespace.

use std::{io, os::fd::BorrowedFd, thread};

use rustix::{
    fs::{fstat, stat},
    io::Errno,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use tokio::runtime::Builder;
use vmmd_host::{failure::Failure, text};

/// Carries out `work` in a network namespace of a pod. Blocking. Refused as `POD_HAS_NODE_NETWORK` for that of the caller, which is the node's.
///
/// A thread of its own enters the namespace, has a runtime of its own, and ends with the work. Threads of the daemon's runtime and pools
/// never leave the node's namespace. Sockets, taps and processes that `work` makes are of the namespace.
pub fn within<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl AsyncFnOnce() -> Result<T, Failure> + Send,
) -> Result<T, Failure> {
    let enter = move || {
        if is_own(namespace).map_err(refused)? {
            let message = "the pod has the network of the node (`hostNetwork`): a VM needs a pod with a network of its own";
            return Err(Failure::precondition("POD_HAS_NODE_NETWORK", message));
        }
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network)).map_err(refused)?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::internal(format!("make a runtime: {error}")))?;
        runtime.block_on(work())
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("pod-network".to_owned());
        let thread = thread.spawn_scoped(scope, enter);
        let thread = thread.map_err(|error| Failure::internal(format!("make a thread: {error}")))?;
        let ended = thread.join();
        ended.unwrap_or_else(|_| {
            Err(Failure::internal(
                "the work in the network namespace of a pod panicked",
            ))
        })
    })
}

/// Whether the thread is in a network namespace.
fn is_own(namespace: BorrowedFd<'_>) -> Result<bool, Errno> {
    let (own, other) = (stat("/proc/thread-self/ns/net")?, fstat(namespace)?);
    Ok((own.st_dev, own.st_ino) == (other.st_dev, other.st_ino))
}

fn refused(errno: Errno) -> Failure {
    let operation = "enter the network namespace of the pod";
    match errno {
        Errno::PERM => forbidden(operation, &errno.into()),
        _ => Failure::internal(format!("{operation}: {}", text::words(&errno.into()))),
    }
}

/// Refusal for rights that the daemon lacks.
pub fn forbidden(operation: &str, error: &io::Error) -> Failure {
    let message = format!(
        "{operation}: {}; vmmd needs CAP_SYS_ADMIN and write access to /proc/sys/net: install /usr/share/vmmd/pods.conf as a drop-in of \
         vmmd.service and restart vmmd",
        text::words(error)
    );
    Failure::precondition("POD_NETWORK_FORBIDDEN", message)
}
