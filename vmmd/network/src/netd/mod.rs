//! DHCP (RFC 2131), DNS (RFC 1035), router advertisements (RFC 4861) and metadata for the VMs of a network.
//!
//! The daemon assigns the addresses of NICs; a helper only answers clients. Each network has a
//! helper process ([`server`]) with sockets on the bridge and no rights. It reads a [`Table`] that
//! the daemon writes. A helper therefore continues when the daemon is killed or replaced.

mod confine;
mod dhcp;
mod dhcp6;
mod dns;
mod forward;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod metadata;
mod ra;
pub mod report;
pub mod server;
mod special;
mod streams;
mod table;

pub use dhcp6::open as open_dhcp6;
pub use ra::open as open_routers;
pub use table::{DhcpOption, Host, Ipv4, Ipv6, Route4, Route6, Table};

#[cfg(test)]
pub(crate) mod tests {
    pub use super::dhcp::tests::table;
}
