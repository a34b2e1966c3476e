//! Authorization. Each connection has a [`Caller`] with identity and role. [`Guard`] precedes all
//! services. A call passes when the [`rule`] of its method admits the caller's role; a method
//! without a rule is refused. [`Guard`] also writes the [`audit`] log and limits slow and greedy
//! clients. [`Handshakes`] and [`Places`] bound connections.

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
