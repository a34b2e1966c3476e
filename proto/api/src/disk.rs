//! Methods of the messages of disks.

use crate::v1::{self, disk_spec::Source};

impl v1::DiskSpec {
    /// The path of the node that the disk is; empty when it is none.
    pub fn path(&self) -> &str {
        match &self.source {
            Some(Source::Path(path)) => path,
            _ => "",
        }
    }

    /// The name of the disk of the DiskService that the disk is; empty when it is none.
    pub fn disk(&self) -> &str {
        match &self.source {
            Some(Source::Disk(disk)) => disk,
            _ => "",
        }
    }

    /// The name of the pod's volume that the disk is on; empty when it is on none.
    pub fn pod_volume(&self) -> &str {
        match &self.source {
            Some(Source::PodVolume(volume)) => volume,
            _ => "",
        }
    }
}
