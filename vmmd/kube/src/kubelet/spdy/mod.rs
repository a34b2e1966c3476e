//! The server's side of SPDY/3.1 (draft-mbelshe-httpbis-spdy-00), as far as `kubectl` needs it of a
//! node.
//!
//! [`session`] turns the bytes of a client into events, without any I/O; [`connection`] moves bytes
//! and events over a connection. The other side is Kubernetes' httpstream over moby/spdystream, and
//! their behavior beside the draft counts:
//!
//! - There is no flow control: spdystream sends no WINDOW_UPDATE and reads none. So the server
//!   waits for none. Only the connection holds back a sender: it is not read while received data
//!   waits to be taken. As in spdystream, one stream without a reader holds up the others.
//! - The client takes data on a stream only after the SYN_REPLY.
//! - A stream with a number that is not above all others is reset, and the session continues:
//!   clients may send two of them in the wrong order.
//! - Pings are answered at any time. The server sends none.
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
