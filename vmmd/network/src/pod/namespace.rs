//! Work in another network namespace.

use std::{os::fd::BorrowedFd, thread};

use rustix::{
    io::Errno,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use tokio::runtime::Builder;
use vmmd_host::{failure::Failure, text};

/// Carries out `work` in a network namespace. Blocking.
///
/// A thread of its own enters the namespace, has a runtime of its own, and ends with the work. Threads of the daemon's runtime and pools
/// never leave the node's namespace. Sockets, taps and processes that `work` makes are of the namespace.
pub fn within<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl AsyncFnOnce() -> Result<T, Failure> + Send,
) -> Result<T, Failure> {
    let enter = move || {
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

fn refused(errno: Errno) -> Failure {
    let words = text::words(&errno.into());
    match errno {
        Errno::PERM => {
            let message = format!(
                "enter the network namespace of the pod: {words}; give vmmd the capability CAP_SYS_ADMIN and restart vmmd: install \
                 /usr/share/doc/vmmd/examples/pods.conf as a drop-in of vmmd.service"
            );
            Failure::precondition("POD_NETWORK_FORBIDDEN", message)
        }
        _ => Failure::internal(format!("enter the network namespace of the pod: {words}")),
    }
}
