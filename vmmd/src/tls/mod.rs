//! The API over TCP: TLS with certificates on both sides, and nothing else. Client certificates are verified against the
//! configured CAs (chain, time, purpose) in the handshake; what the certificate says of its owner becomes the
//! connection's [`crate::auth::Caller`].
//!
//! [`Certificates`] holds what new connections use, and changes it when the files change. Sessions are never resumed, so
//! that a certificate is looked at for each connection.

mod certificates;
mod identity;
mod watch;

pub use certificates::{ALPN, Certificates, Peer};
pub use identity::{common_name, identify, is_for_servers, valid_until};
pub use watch::{reload, watch};
