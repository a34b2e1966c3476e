//! Parts of vmmd that answer guests and other daemons: the files that depend on nothing else in
//! vmmd.

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

#[allow(dead_code, reason = "the daemon uses the rest")]
#[path = "../../src/disk/moved"]
mod disk {
    #[path = "coming.rs"]
    pub mod moved;
}

#[allow(dead_code, reason = "the daemon uses the rest")]
#[path = "../../src/migration"]
mod migration {
    pub mod fuzzing;
    mod heard;
}

#[allow(dead_code, reason = "the daemon uses the rest")]
#[path = "../../src/snapshot"]
mod snapshot {
    mod archive;
    pub mod fuzzing;
}

#[allow(dead_code, reason = "the daemon uses the rest")]
#[path = "../../src/failure"]
mod failure {
    mod refusal;

    pub use refusal::{Failure, Kind};
}

#[allow(dead_code, reason = "the daemon uses the rest")]
#[path = "../../src/text.rs"]
mod text;

pub use helper::fuzzing::{dhcp_client, dns_query, name_servers, router_solicitations};
pub use migration::fuzzing::peer_messages;
pub use snapshot::fuzzing::snapshot_archive;
