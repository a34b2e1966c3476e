//! The gRPC API on a UNIX socket and over TCP: thin services over the registries.

mod ask;
mod authority;
mod connection;
mod console;
mod cursor;
mod disk;
mod event;
mod exec;
mod filter;
mod guest_file;
mod health;
mod image;
mod logs;
mod mask;
mod migration;
mod network;
mod node;
mod objects;
mod operation;
mod period;
mod pod;
mod port_forward;
mod relay;
mod server;
mod snapshot;
mod socket;
mod tcp;
mod update;
mod vm;
mod vnc;
mod vsock;
mod watch_node;

pub use connection::Connection;
pub use server::serve;
pub use socket::{ACCEPT_PAUSE, Socket};
pub use tcp::Listener;
