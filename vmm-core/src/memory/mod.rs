//! Guest-physical memory: where things are ([`layout`]) and what backs RAM ([`guest`]).

pub mod guest;
pub mod huge;
pub mod layout;
mod load;
pub mod locate;
mod mapping;
mod populate;
mod reclaim;
mod replaced;

pub use guest::{Backing, GuestRam, RamError};
pub use load::{LoadError, load_file};
pub(crate) use populate::in_parallel;
pub use reclaim::RamReclaim;
