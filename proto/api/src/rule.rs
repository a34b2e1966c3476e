//! Rules of the methods of the public API: those in `vmmd/v1/rule.proto`, as tables and traits.

use prost::Message;

use crate::v1;
pub use crate::v1::{MethodEffect, Role};

/// The rule of one method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MethodRule {
    /// `vmmd.v1.VmService/GetVm`: the path of the call without the first slash.
    pub method: &'static str,
    /// The least role that may call it; never [`Role::Unspecified`].
    pub role: Role,
    /// The least role that may call it with an update mask that names only fields which this role may change; [`Self::role`] where
    /// masks make no difference.
    pub masked_role: Role,
    /// Whether another node's daemon may call it.
    pub peers: bool,
    /// Whether the agent of a cluster may call it, regardless of its update mask.
    pub agents: bool,
    /// Effect of the call; never [`MethodEffect::Unspecified`].
    pub effect: MethodEffect,
    /// Kind of the thing that the call is about: `vm`, `disk`, `operation`, `node`; empty when it is about no single one.
    pub kind: &'static str,
    /// Field numbers from the request to the name of that thing; empty when there is only one of its kind.
    pub name: &'static [u32],
    /// Whether the client sends a stream of messages.
    pub client_streams: bool,
    /// Whether the daemon sends a stream of messages.
    pub server_streams: bool,
}

/// A request that changes something, and that is carried out once, however often it is sent with the same id.
pub trait Mutation: Message + Clone + Default + Send + 'static {
    /// Name of its method, without the service.
    const METHOD: &'static str;

    /// Given by the client; empty when it gave none.
    fn request_id(&self) -> &str;

    /// Gives it an id, or with an empty one takes it away.
    fn set_request_id(&mut self, id: String);

    /// Conditions on the object that the request changes; `None` if the client sets none, or if the
    /// request changes no existing object.
    fn preconditions(&self) -> Option<&v1::Preconditions>;

    /// Whether the request is only validated, without a change.
    fn dry_run(&self) -> bool;
}

include!(concat!(env!("OUT_DIR"), "/rules.rs"));
