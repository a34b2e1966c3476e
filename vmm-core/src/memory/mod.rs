//! Guest-physical memory: where things are ([`layout`]) and what backs RAM ([`guest`]).

pub mod guest;
pub mod layout;
mod load;

pub use guest::{Backing, GuestRam, RamError};
pub use load::{LoadError, load_file};
