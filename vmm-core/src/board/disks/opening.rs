//! An image that is being opened on a thread of its own.

use std::sync::{
    Arc,
    mpsc::{Receiver, TryRecvError, channel, sync_channel},
};

use devices::{
    block::Image,
    thread::{self, ThreadKind},
};
use proto::{model::machine::Disk, vmm::ErrorKind};

use super::super::{assemble::Fds, leaving::Leaving};
use crate::lifecycle::{Failure, Notice, Notifier, Pluggable, Token};

/// How an image is opened.
pub(super) type Opener = Arc<dyn Fn(&Disk, &mut Fds) -> Result<Box<dyn Image>, Failure> + Send + Sync>;

/// See the module.
pub(super) struct Opening {
    /// Who asked for the disk.
    pub token: Token,
    pub spec: Disk,
    /// The image can be taken, or can't be opened.
    opened: Receiver<()>,
    /// Without a buffer: what nobody takes is closed by the thread, which may take long too.
    image: Receiver<Result<Box<dyn Image>, Failure>>,
    /// An image that nobody took is closed.
    closed: Receiver<()>,
}

impl Opening {
    /// Begins. [`Notice::ImageOpened`] comes when [`take`](Self::take) gives something.
    pub fn begin(
        opener: &Opener,
        token: Token,
        spec: Disk,
        mut fds: Fds,
        notifier: Notifier,
    ) -> Result<Self, Failure> {
        let (tell_opened, opened) = channel();
        let (hand_over, image) = sync_channel(0);
        let (tell_closed, closed) = channel();
        let (opener, disk) = (Arc::clone(opener), spec.clone());
        let body = move || {
            let image = opener(&disk, &mut fds);
            // Those that the image did not take.
            drop(fds);
            // Nobody listens when it was cancelled.
            let _cancelled = tell_opened.send(());
            notifier.notify(Notice::ImageOpened);
            if let Err(unwanted) = hand_over.send(image) {
                drop(unwanted);
                let _machine_is_gone = tell_closed.send(());
                notifier.notify(Notice::Unplugged);
            }
        };
        thread::spawn(ThreadKind::Helper, "open", body).map_err(|error| Failure {
            kind: ErrorKind::Resources,
            message: format!("starting a thread that opens disk {}: {error}", spec.name),
        })?;
        Ok(Self {
            token,
            spec,
            opened,
            image,
            closed,
        })
    }

    /// The image, or why it can't be opened, once that is known. Does not wait.
    pub fn take(&self) -> Option<Result<Box<dyn Image>, Failure>> {
        let lost = || Failure {
            kind: ErrorKind::Internal,
            message: format!("the thread that opened disk {} is gone", self.spec.name),
        };
        match self.opened.try_recv() {
            // The thread hands it over, or is about to.
            Ok(()) => Some(self.image.recv().unwrap_or_else(|_| Err(lost()))),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(lost())),
        }
    }

    /// Nobody wants the image any more; its file is closed when it is open.
    pub fn cancel(self, forced: bool) -> Leaving {
        Leaving::new(Pluggable::Disk, self.spec.name, forced, false, self.closed)
    }
}
