//! The gRPC API on a UNIX socket: thin services over the table of VMs.

mod connection;
mod console;
mod cursor;
mod disk;
mod error;
mod event;
mod filter;
mod list;
mod mask;
mod node;
mod operation;
mod server;
mod vm;
mod watch;

pub use server::{Socket, serve};
