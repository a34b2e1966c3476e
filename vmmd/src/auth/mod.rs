//! Who may do what. Each connection has a [`Caller`]: who is at its other end, and in which role. [`Guard`] is in front of
//! all services and lets a call through when the [`rule`] of its method admits the caller's role; what has no rule is
//! refused. It also writes the [`audit`] log and keeps slow and greedy clients in their bounds.
//! [`Handshakes`] and [`Places`] bound connections.

pub mod audit;
mod body;
mod bucket;
mod caller;
mod guard;
mod handshakes;
mod object;
mod role;
pub mod rule;
mod share;

pub use audit::Audit;
pub use bucket::Bucket;
pub use caller::Caller;
pub use guard::{Bounds, Guard, require};
pub use handshakes::Handshakes;
pub use role::{Rank, Role};
pub use rule::MAX_OFFER;
pub use share::{Place, Places, Turns};
