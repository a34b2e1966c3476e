//! What of vmmd answers guests: the files of the helper that need no daemon.

#[allow(dead_code, reason = "the helper's process uses the rest")]
#[path = "../../src/network/managed/helper"]
mod helper {
    mod dhcp;
    mod dns;
    mod forward;
    pub mod fuzzing;
    mod ra;
    mod table;

    pub use table::{Host, Ipv6, Table};
}

pub use helper::fuzzing::{dhcp_client, dns_query, name_servers, router_solicitations};
