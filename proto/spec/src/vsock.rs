//! The socket device of a VM (AF_VSOCK).

use vmmd_api::v1;

use crate::Violations;

/// CID of a guest without a CID in its spec. Each guest has a host of its own, so CIDs are not unique on a node.
pub const DEFAULT_CID: u32 = 3;

/// The first CID that a guest can have (virtio 1.3, 5.10.4.1): 0 and 1 are reserved, 2 is the host.
const FIRST_CID: u32 = 3;

/// A socket device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vsock {
    /// CID of the guest, as [`cid`] checks.
    pub cid: u32,
}

impl Vsock {
    /// Validates the socket device of a spec.
    pub fn new(found: &mut Violations, wire: v1::VsockSpec) -> Self {
        let cid = match wire.cid {
            0 => DEFAULT_CID,
            cid => cid,
        };
        self::cid(found, "spec.vsock.cid", cid);
        Self { cid }
    }
}

/// Validates the CID of a guest, 3 to 4294967294: 4294967295 stands for any CID (VMADDR_CID_ANY).
pub fn cid(found: &mut Violations, field: &str, cid: u32) {
    if !(FIRST_CID..u32::MAX).contains(&cid) {
        found.add(field, "must be 3 to 4294967294");
    }
}
