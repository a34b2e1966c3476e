//! What this crate needs of the daemon.

use std::path::Path;

use tokio_util::sync::CancellationToken;
use vmmd_host::{failure::Failure, image_process::ImageProcesses, pool::Pools};
use vmmd_objects::{event::Events, operation::Operations, request};
use vmmd_store::ImageRecord;

use crate::{folder::Folder, registry::Images, rules::ImportRules};

/// The daemon, as images see it.
pub trait Ports: request::Ports {
    /// All images.
    fn images(&self) -> &Images;

    /// Where imports are reported.
    fn operations(&self) -> &Operations;

    /// Where events of images go.
    fn events(&self) -> &Events;

    /// For blocking work on files.
    fn pools(&self) -> &Pools;

    /// For work on images from other parties.
    fn image_processes(&self) -> &ImageProcesses;

    /// The section `images` of the configuration.
    fn rules(&self) -> &ImportRules;

    /// Folder of the daemon's files that do not survive a boot.
    fn run_dir(&self) -> &Path;

    /// Folder of the images' files.
    fn folder(&self) -> Folder;

    /// Cancelled when the daemon ends.
    fn stopping(&self) -> &CancellationToken;

    /// Names of the disks and of the VMs that use an image.
    fn users(&self, image: &ImageRecord) -> (Vec<String>, Vec<String>);

    /// Name of a snapshot that needs the image with this UUID.
    fn snapshot_with(&self, image: &[u8]) -> Option<String>;

    /// Opens a file of the node for reading, below the folders that the configuration allows. Errors begin with `label`. Blocking.
    fn open_source(&self, label: &str, path: &Path) -> Result<SourceFile, Failure>;
}

/// A file of the node that an image is made of.
#[derive(Debug)]
pub struct SourceFile {
    /// Open for reading.
    pub file: std::fs::File,
    /// In bytes.
    pub size: u64,
    /// Whether it is a block device.
    pub block_device: bool,
}
