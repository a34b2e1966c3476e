//! File system device (virtio 1.3, 5.11): a directory of the node, served by a separate process
//! (virtiofsd) over vhost-user.
//!
//! ```text
//!              start, INIT of a driver                driver resets
//!  refusing ───────────────────────────▶ delegated ───────────────▶ parked
//!     ▲  ◀──────── process gone ───────────┘
//! ```
//!
//! *Delegated*: the process takes requests from the rings in guest memory and signals the guest
//! without this process. *Refusing*: the serving process is gone. The device completes each request
//! at once with ENOTCONN, as Linux does after the end of a FUSE server, so that no process of the
//! guest hangs. A new process does not have the driver's inodes and handles. It gets the queues
//! only with the next FUSE_INIT, which a driver sends for a new mount. A handle of the old process
//! must never refer to a file of the new process.
//!
//! The saved state contains the process's own state: the driver's inodes and handles, as paths of
//! their files. The process behind the restored device receives this state before it gets the
//! queues. If a process cannot load the state, the device drops this process, and the driver must
//! mount again.

mod request;
mod worker;

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError},
};

use vmm_base::thread::ThreadKind;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::worker::FsHandler;
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes, thread_name},
    signals::Signals,
};
use crate::state::{Section, StateError, message};

/// Longest tag in bytes (5.11.4).
pub const MAX_TAG: usize = 36;
/// Bytes of the configuration space without VIRTIO_FS_F_NOTIFICATION: the tag and `num_request_queues`.
const CONFIG: usize = MAX_TAG + 4;
/// The queue for requests of high priority, and one for all others: what virtiofsd serves.
const QUEUE_SIZES: [u16; 2] = [1024, 1024];

/// The front.
pub struct Fs {
    name: String,
    config: [u8; CONFIG],
    inbox: Arc<Inbox>,
}

impl Fs {
    /// A file system that drivers know by `tag`: 1 to [`MAX_TAG`] bytes of UTF-8. `name` is for messages. `backend` is a connected
    /// socket on which a process waits for a vhost-user front end.
    pub fn new(name: &str, tag: &str, backend: OwnedFd) -> io::Result<Self> {
        if tag.is_empty() || tag.len() > MAX_TAG {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a tag has 1 to 36 bytes",
            ));
        }
        let mut config = [0; CONFIG];
        let request_queues: u32 = 1;
        let bytes = tag.bytes().chain(std::iter::repeat(0)).take(MAX_TAG);
        for (place, byte) in config.iter_mut().zip(bytes.chain(request_queues.to_le_bytes())) {
            *place = byte;
        }
        Ok(Self {
            name: name.to_owned(),
            config,
            inbox: Arc::new(Inbox {
                socket: Mutex::new(Some(backend)),
                arrived: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
            }),
        })
    }

    /// Returns a handle that can replace the serving process.
    pub fn control(&self) -> FsControl {
        FsControl(Arc::clone(&self.inbox))
    }
}

/// Handle that replaces the serving process of a file system device.
#[derive(Clone)]
pub struct FsControl(Arc<Inbox>);

impl FsControl {
    /// A process waits for a front end behind this connected socket.
    pub fn set_backend(&self, socket: OwnedFd) -> io::Result<()> {
        self.0.put(socket);
        self.0.arrived.write(1)
    }
}

/// A socket that the worker has not taken yet.
struct Inbox {
    socket: Mutex<Option<OwnedFd>>,
    arrived: EventFd,
}

impl Inbox {
    fn put(&self, socket: OwnedFd) {
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
    }

    fn take(&self) -> Option<OwnedFd> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl VirtioDevice for Fs {
    fn kind(&self) -> DeviceKind {
        DeviceKind::FileSystem
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        CONFIG
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&self.config, offset, data);
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self, signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let count = u16::try_from(QUEUE_SIZES.len()).unwrap_or(0);
        let handler = FsHandler::new(count, Arc::clone(&self.inbox), Arc::clone(signals))?;
        Ok(vec![WorkerSpec {
            name: thread_name("fs", &self.name, 0),
            kind: ThreadKind::Delegate,
            queues: (0..count).collect(),
            handler: Box::new(handler),
        }])
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("fs", &message::VirtioFs {}))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        section.open::<message::VirtioFs>().map(drop)
    }
}

#[cfg(test)]
mod tests;
