//! Identity of the client of a connection.

use vmmd_objects::context::Initiator;

use crate::auth::{Bucket, Role};

/// The other end of one connection.
#[derive(Debug)]
pub struct Caller {
    /// Who it is.
    pub initiator: Initiator,
    /// Role from the certificate; `None` when the certificate has no role.
    pub role: Option<Role>,
    /// Where it is: an address, or a process of this node.
    pub address: String,
    /// How many calls it may make.
    pub bucket: Bucket,
}
