//! Virtual machines: a table of them, an actor for each, and what brings one up, watches it and takes it down.

mod actor;
pub mod admission;
pub mod change;
pub mod clients;
mod create;
mod describe;
pub mod ending;
pub mod files;
mod instance;
pub mod limits;
mod link;
mod log_guard;
pub mod machine;
mod policy;
pub mod process;
pub mod reconcile;
mod start;
mod supervisor;
pub mod table;
mod unusable;

pub use actor::{Answer, Command, DiskRequest, Life, Purpose, Reply, Update, public_stats};
pub use create::{create, create_as};
pub use log_guard::LogGuard;
pub use process::Process;
pub use start::{Restore, refused, store_failure};
