//! Only way in which this process creates threads.
//!
//! Each thread has a [`ThreadKind`], which determines its rights. Before its body, each new thread
//! runs the process's *entry*, if one was set: `vmm` limits the thread's system calls there. This
//! crate is independent of the limits.

use std::{
    fmt, io,
    sync::OnceLock,
    thread::{Builder, JoinHandle, Scope, ScopedJoinHandle},
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Purpose of a thread. Threads of one kind have the same rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// Drives the machine's life and makes most other threads; the process's first thread.
    Main,
    /// Serves the control socket, or waits for signals.
    Control,
    /// Runs a vCPU.
    Vcpu,
    /// Runs queues of a virtio device. Makes the threads of its image's pool.
    Worker,
    /// Gives queues of a virtio device to another process that serves them, and takes them back.
    Delegate,
    /// Runs a pair of queues of a network interface, and gives them to the kernel (vhost-net) where it can.
    Vhost,
    /// Carries out requests to an image by waiting for them.
    Storage,
    /// Serves the serial port.
    Serial,
    /// Serves the screen.
    Screen,
    /// Does one thing for the main thread and ends: loads a kernel, prepares memory, opens or closes an image.
    Helper,
    /// Writes a snapshot.
    Snapshot,
}

impl ThreadKind {
    /// All kinds.
    pub const ALL: [Self; 11] = [
        Self::Main,
        Self::Control,
        Self::Vcpu,
        Self::Worker,
        Self::Delegate,
        Self::Vhost,
        Self::Storage,
        Self::Serial,
        Self::Screen,
        Self::Helper,
        Self::Snapshot,
    ];

    /// Name for logs and exit records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Control => "control",
            Self::Vcpu => "vcpu",
            Self::Worker => "worker",
            Self::Delegate => "delegate",
            Self::Vhost => "vhost",
            Self::Storage => "storage",
            Self::Serial => "serial",
            Self::Screen => "screen",
            Self::Helper => "helper",
            Self::Snapshot => "snapshot",
        }
    }

    /// Bytes of stack; `None` for the process's default. Untouched stack costs only address space.
    const fn stack(self) -> Option<usize> {
        match self {
            // Device models, imago and the report of a panic go a little deep.
            Self::Vcpu | Self::Storage | Self::Helper | Self::Snapshot => Some(512 << 10),
            // A compressor's tables, some 300 KiB, are made on the stack before they go to the heap.
            Self::Screen => Some(1 << 20),
            _ => None,
        }
    }
}

impl fmt::Display for ThreadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

type Entry = Box<dyn Fn(ThreadKind) + Send + Sync>;

static ENTRY: OnceLock<Entry> = OnceLock::new();

/// Sets what each new thread runs first. To be called once, before the first [`spawn`]; false when there is an entry
/// already, which stays.
///
/// The entry has to end the process when it fails: the thread's body runs when it returns.
pub fn set_entry(entry: impl Fn(ThreadKind) + Send + Sync + 'static) -> bool {
    ENTRY.set(Box::new(entry)).is_ok()
}

/// Starts a thread. `name` is the thread's name in the kernel (its first 15 bytes) and in logs.
pub fn spawn<T: Send + 'static>(
    kind: ThreadKind,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    builder(kind, name.into()).spawn(move || {
        enter(kind);
        body()
    })
}

/// Starts a thread that ends before `scope` does.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    kind: ThreadKind,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    builder(kind, name.into()).spawn_scoped(scope, move || {
        enter(kind);
        body()
    })
}

/// A thread that serves until [`stop`](Self::stop), or until this is dropped.
#[derive(Debug)]
pub struct Server {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the thread. `prepare` gets the event that becomes readable when the thread has to end, and returns the
    /// thread's body.
    pub fn start<B: FnOnce() + Send + 'static>(
        kind: ThreadKind,
        name: &str,
        prepare: impl FnOnce(EventFd) -> io::Result<B>,
    ) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK)?;
        let body = prepare(stop.try_clone()?)?;
        let thread = Some(spawn(kind, name, body)?);
        Ok(Self { stop, thread })
    }

    /// Ends the thread, which finishes its work first. Returns whether it had been alive.
    pub fn stop(&mut self) -> bool {
        let Some(thread) = self.thread.take() else {
            return true;
        };
        // Fails only when the counter is full, and then it is readable.
        let _full = self.stop.write(1);
        thread.join().is_ok()
    }

    /// Whether the thread is gone without having been told to.
    pub fn failed(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn builder(kind: ThreadKind, name: String) -> Builder {
    let builder = Builder::new().name(name);
    match kind.stack() {
        Some(bytes) => builder.stack_size(bytes),
        None => builder,
    }
}

fn enter(kind: ThreadKind) {
    if let Some(entry) = ENTRY.get() {
        entry(kind);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static ENTERED: Cell<Option<ThreadKind>> = const { Cell::new(None) };
    }

    #[test]
    fn every_new_thread_runs_the_entry_before_its_body_with_its_kind() {
        assert!(set_entry(|kind| ENTERED.set(Some(kind))));
        assert!(!set_entry(|_| ENTERED.set(None)), "there is one entry");
        for kind in ThreadKind::ALL {
            let thread = spawn(kind, "by-kind", || ENTERED.get()).unwrap();
            assert_eq!(thread.join().unwrap(), Some(kind));
            let scoped = std::thread::scope(|scope| {
                let thread = spawn_scoped(scope, kind, "scoped", || ENTERED.get()).unwrap();
                thread.join().unwrap()
            });
            assert_eq!(scoped, Some(kind));
        }
        assert_eq!(ENTERED.get(), None, "not this thread");
    }
}
