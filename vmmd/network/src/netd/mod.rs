//! DHCP (RFC 2131), DNS (RFC 1035) and router advertisements (RFC 4861) for the VMs of a network.
//!
//! The daemon decides which NIC has which address; a helper only tells. A helper is a process of its own for each network
//! ([`server`]) with sockets on the bridge and no rights, and reads a [`Table`] that the daemon writes. So it goes on when the
//! daemon is killed or exchanged.

mod confine;
mod dhcp;
mod dns;
mod forward;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod ra;
pub mod server;
mod table;

pub use ra::open as open_routers;
pub use table::{Host, Ipv6, Table};

#[cfg(test)]
pub(crate) mod tests {
    pub use super::dhcp::tests::table;
}
