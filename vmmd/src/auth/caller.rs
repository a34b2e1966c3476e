//! Who is at the other end of a connection.

use vmmd_objects::context::Initiator;

use crate::auth::{Bucket, Role};

/// The other end of one connection.
#[derive(Debug)]
pub struct Caller {
    /// Who it is.
    pub initiator: Initiator,
    /// What it may do; `None` when its certificate gives it no role.
    pub role: Option<Role>,
    /// Where it is: an address, or a process of this node.
    pub address: String,
    /// How many calls it may make.
    pub bucket: Bucket,
}
