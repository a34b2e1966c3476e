//! The API over TCP: always TLS with certificates on both sides. The handshake verifies client
//! certificates against the configured CAs (chain, time, purpose). The identity in the certificate
//! becomes the connection's [`crate::auth::Caller`].
//!
//! [`Certificates`] holds the configuration for new connections, and reloads it when the files
//! change. Sessions are never resumed, so that each connection has its certificate checked.

mod certificates;
mod identity;
mod watch;

pub use certificates::{ALPN, Certificates, Peer};
pub use identity::{common_name, identify, is_for_servers, valid_until};
pub use watch::{reload, watch};
