//! The server's side of SPDY/3.1 (draft-mbelshe-httpbis-spdy-00), as far as `kubectl` needs it of a node.
//!
//! [`session`] makes events of the bytes of a client, without any I/O; [`connection`] moves bytes and events over a connection. The other side is
//! Kubernetes' httpstream over moby/spdystream, and what these do beside the draft counts:
//!
//! - There is no flow control: spdystream sends no WINDOW_UPDATE and reads none. So none is waited for. What holds back a sender is the
//!   connection, which is not read while what it has brought waits to be taken; as there, one stream that nobody reads holds up the others.
//! - Data on a stream is taken by the client only after the SYN_REPLY.
//! - A stream with a number that is not above all others is reset, and the session goes on: clients may send two of them the wrong way round.
//! - Pings are answered whenever they come. None are sent.
//!
//! All is bounded: see the constants.

mod connection;
pub mod dictionary;
mod frame;
#[cfg(test)]
mod fuzzing;
mod headers;
mod session;
#[cfg(test)]
mod testing;

pub use self::connection::{Acceptor, Closed, Ended, Input, Output, Stream, run};
