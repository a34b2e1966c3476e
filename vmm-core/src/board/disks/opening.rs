//! An image that is being opened on a thread of its own.

use std::sync::{
    Arc,
    mpsc::{Receiver, TryRecvError, channel, sync_channel},
};

use block::Image;
use vmm_base::thread::{self, ThreadKind};
use vmm_protocol::{machine::Disk, vmm::ErrorKind};

use super::super::{assemble::Fds, leaving::Leaving};
use crate::lifecycle::{Failure, Notice, Notifier, Pluggable, Token};

/// How an image is opened.
pub(super) type Opener = Arc<dyn Fn(&Disk, &mut Fds) -> Result<Box<dyn Image>, Failure> + Send + Sync>;

/// Use of an image once it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A disk is attached with it.
    Attach,
    /// The medium of a CD-ROM drive; with `force` although the guest prevents the removal of the old one.
    Medium {
        /// See the variant.
        force: bool,
    },
}

/// See the module.
pub(super) struct Opening {
    /// Request that attached the disk.
    pub token: Token,
    pub spec: Disk,
    pub purpose: Purpose,
    /// A message says that the open has ended, with an image or an error.
    opened: Receiver<()>,
    /// Without a buffer: the thread itself closes an image that is not taken, which may take long
    /// too.
    image: Receiver<Result<Box<dyn Image>, Failure>>,
    /// A message says that an image that was not taken is closed.
    closed: Receiver<()>,
}

impl Opening {
    /// Begins. [`Notice::ImageOpened`] comes when [`take`](Self::take) gives something.
    pub fn begin(
        opener: &Opener,
        token: Token,
        spec: Disk,
        purpose: Purpose,
        mut fds: Fds,
        notifier: Notifier,
    ) -> Result<Self, Failure> {
        let (tell_opened, opened) = channel();
        let (hand_over, image) = sync_channel(0);
        let (tell_closed, closed) = channel();
        let (opener, disk) = (Arc::clone(opener), spec.clone());
        let body = move || {
            let image = opener(&disk, &mut fds);
            // The descriptors that the image did not take.
            drop(fds);
            // The send fails if the open was cancelled.
            let _cancelled = tell_opened.send(());
            notifier.notify(Notice::ImageOpened);
            if let Err(unwanted) = hand_over.send(image) {
                drop(unwanted);
                let _machine_is_gone = tell_closed.send(());
                notifier.notify(Notice::Unplugged);
            }
        };
        thread::spawn(ThreadKind::Helper, "open", body).map_err(|error| {
            Failure::of(
                ErrorKind::Resources,
                format!("starting a thread that opens disk {}: {error}", spec.name),
            )
        })?;
        Ok(Self {
            token,
            spec,
            purpose,
            opened,
            image,
            closed,
        })
    }

    /// Returns the image or the error of the open, if the open has ended. Does not wait.
    pub fn take(&self) -> Option<Result<Box<dyn Image>, Failure>> {
        let lost = || {
            Failure::of(
                ErrorKind::Internal,
                format!("the thread that opened disk {} is gone", self.spec.name),
            )
        };
        match self.opened.try_recv() {
            // The thread hands it over, or is about to.
            Ok(()) => Some(self.image.recv().unwrap_or_else(|_| Err(lost()))),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(lost())),
        }
    }

    /// Gives the image up; the thread closes its file after the open.
    pub fn cancel(self, forced: bool) -> Leaving {
        Leaving::new(Pluggable::Disk, self.spec.name, forced, false, self.closed)
    }
}
