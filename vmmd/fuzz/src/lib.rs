//! Functions that the fuzz targets call. Each takes any bytes and panics when vmmd does harm with them.

pub use vmmd::fuzzing::{agent_answers, launcher_messages, peer_messages, snapshot_archive};
pub use vmmd_network::netd::fuzzing::{dhcp_client, dhcp6_client, dns_query, metadata_request, name_servers, router_solicitations};
