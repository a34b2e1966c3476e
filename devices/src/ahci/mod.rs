//! SATA: an AHCI host bus adapter (AHCI 1.3.1) with a disk or a CD-ROM drive at each port, for guests without drivers
//! of virtio.
//!
//! ```text
//!  vCPU ──▶ function ──▶ hba ──▶ port (locked) ◀── worker ──▶ engine of the image
//!           PCI, MSI     GHC, IS  PxCI, PxCMD..     │  ata, atapi: command ──▶ plan
//!                                                   └─ fis: command list, buffers, received FISes
//! ```
//!
//! A register write changes the [`port`] and wakes the port's [`worker`]; no write waits. The worker fetches commands
//! from guest memory, and turns each into a [`Plan`](crate::virtio::blk::plan::Plan) as virtio-blk turns its requests,
//! or into an answer of its own. The engine of the disk's image carries plans out, with the limits, statistics and
//! change tracking of all disks.
//!
//! A command stays in PxCI until it completes. Therefore a pause forgets the commands that have not begun, and a
//! restored machine finds all commands of its state in guest memory again.

mod ata;
mod atapi;
mod fis;
mod function;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
#[cfg(any(test, feature = "testing"))]
mod harness;
mod hba;
mod port;
mod state;
mod tray;
mod worker;

pub use self::{
    function::{Ahci, Parts},
    tray::{MediumError, NoMedium, Tray},
};

use std::{
    io,
    sync::{Arc, Mutex},
};

use block::{Engine, Image, SECTOR};

use self::port::Medium;
use crate::virtio::{
    blk::{
        BlkControl, OnError,
        control::{Shared, SharedImage},
        plan::Limits,
    },
    rate::Limiter,
};

/// Most drives of a controller: as many as ICH9 has ports.
pub const MAX_PORTS: usize = 6;

/// Options of a drive.
#[derive(Clone, Debug)]
pub struct DriveOptions {
    /// Goes into messages ("disk root") and, cut, into the thread's name.
    pub name: String,
    /// Serial number that the driver can read: at most 20 bytes of ASCII, longer values are truncated.
    pub serial: String,
    /// A CD-ROM drive with the image as its medium, which is never written to; else a disk.
    pub cdrom: bool,
    /// Reaction to a request that the host cannot carry out.
    pub on_error: OnError,
    /// Limits its requests, if there is one.
    pub limiter: Option<Arc<Limiter>>,
}

/// A drive before it is at a port.
pub struct Drive {
    options: DriveOptions,
    image: Arc<SharedImage>,
    shared: Arc<Shared>,
    engine: Box<dyn Engine>,
    limits: Limits,
    medium: Medium,
    tray: Arc<Tray>,
}

impl Drive {
    /// A drive on `image`. Returns the image's errors, and `InvalidInput` for a disk that cannot be written to: ATA has
    /// no such disks.
    pub fn new(image: Box<dyn Image>, options: DriveOptions) -> io::Result<Self> {
        let read_only = options.cdrom || image.read_only();
        if read_only && !options.cdrom {
            let message = "a SATA disk can be written to: make it a CD-ROM drive, or use a virtio disk";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let geometry = image.geometry();
        let block = if options.cdrom { atapi::BLOCK } else { SECTOR };
        let limits = Limits {
            block: u32::try_from(block).unwrap_or(u32::MAX),
            read_only,
            discard: !read_only && geometry.discard_granularity.is_some(),
        };
        let capacity = image.capacity();
        let medium = Medium {
            serial: options.serial.clone(),
            physical_block: geometry.physical_block,
            discard: limits.discard,
        };
        let shared = Shared::new(
            capacity.saturating_sub(capacity.checked_rem(block).unwrap_or(0)),
            limits.block,
            1,
            options.limiter.clone(),
        );
        let shared = Arc::new(shared);
        let engine = image.engine()?;
        let image = Arc::new(Mutex::new(image));
        Ok(Self {
            engine,
            tray: Arc::new(Tray::new(&shared, &image)),
            image,
            shared,
            limits,
            medium,
            options,
        })
    }

    /// The handle for others than the driver. A driver finds a larger capacity when it identifies the drive again.
    pub fn control(&self) -> BlkControl {
        BlkControl::new(&self.shared, &self.image)
    }

    /// The tray of a CD-ROM drive.
    pub fn tray(&self) -> Option<Arc<Tray>> {
        self.options.cdrom.then(|| Arc::clone(&self.tray))
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;
