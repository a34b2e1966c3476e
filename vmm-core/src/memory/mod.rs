//! Guest-physical memory: where things are ([`layout`]) and what backs RAM ([`guest`]).

pub mod guest;
pub mod layout;

pub use guest::{Backing, GuestRam, RamError};
