//! Requests of clients: answered by this thread, or passed on to the driver.

use std::os::fd::OwnedFd;

use tracing::{debug, info};
use vmm_core::lifecycle::{Input, Request, Token};
use vmm_protocol::{
    vmm::{ErrorKind, HelloReply, Message, message::Kind, request::Op, response::Result as Answer},
    wire,
};

use super::{Server, disk, error, snapshot, trace};

/// Unanswered requests of one connection.
pub(super) const MAX_UNDER_WAY: usize = 16;
/// Features of this program beyond the first version of the protocol.
const FEATURES: [&str; 11] = [
    "disk-hotplug",
    "disk-resize",
    "disk-limits",
    "disk-stats",
    "machine-stats",
    "shares",
    "snapshots",
    "migration",
    "console-events",
    "nic-hotplug",
    "share-hotplug",
];

impl Server {
    pub(super) fn take(&mut self, number: u64, message: Message, fds: Vec<OwnedFd>) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let Some(Kind::Request(request)) = message.kind else {
            debug!(number, "a client sent something else than a request");
            connection.closing = true;
            return self.settle(number, Ok(()));
        };
        let token = Token {
            connection: number,
            request: request.id,
        };
        if let Some(op) = request.op.as_ref().filter(|_| !request.trace_id.is_empty()) {
            info!(trace_id = request.trace_id, op = trace::name(op), "asked");
        }
        let request = match request.op {
            Some(Op::Hello(hello)) => return self.hello(token, hello.major),
            _ if !connection.greeted => {
                return self.refuse(token, ErrorKind::State, "Hello comes first".to_owned());
            }
            Some(Op::GetStatus(_)) => {
                let status = self.status.clone();
                return self.respond(token, Answer::Status(status));
            }
            Some(Op::Boot(boot)) => match boot.machine {
                Some(spec) => Request::Boot {
                    spec: Box::new(spec),
                    fds,
                    paused: boot.paused,
                    restore: boot.restore,
                },
                None => {
                    let missing = "Boot without a machine".to_owned();
                    return self.respond(token, error(ErrorKind::Invalid, missing));
                }
            },
            Some(Op::Pause(_)) => Request::Pause,
            Some(Op::Resume(_)) => Request::Resume,
            Some(Op::PowerButton(_)) => Request::PowerButton,
            Some(Op::ResetMachine(_)) => Request::Reset,
            Some(Op::Stop(_)) => Request::Stop,
            Some(Op::Release(release)) => Request::Release {
                give_up: release.give_up,
            },
            Some(Op::UnlockDisks(_)) => Request::UnlockDisks,
            Some(Op::Send(send)) => match snapshot::send_request(&send, fds) {
                Ok(request) => request,
                Err(missing) => return self.respond(token, error(ErrorKind::Invalid, missing.to_owned())),
            },
            Some(Op::Save(save)) => match snapshot::request(save, fds) {
                Ok(request) => request,
                Err(missing) => return self.respond(token, error(ErrorKind::Invalid, missing.to_owned())),
            },
            Some(op) => match disk::request(op, fds) {
                Ok(request) => request,
                Err(missing) => return self.respond(token, error(ErrorKind::Invalid, missing.to_owned())),
            },
            None => {
                let unknown = "unknown request".to_owned();
                return self.respond(token, error(ErrorKind::Invalid, unknown));
            }
        };
        if connection.under_way >= MAX_UNDER_WAY {
            let many = format!("{MAX_UNDER_WAY} requests are under way already");
            return self.respond(token, error(ErrorKind::Resources, many));
        }
        connection.under_way += 1;
        let _ = self.inputs.send(Input::Request(token, request));
    }

    fn hello(&mut self, token: Token, major: u32) {
        if major != wire::MAJOR {
            let message = format!(
                "protocol version {major} is not served, this is {}.{}",
                wire::MAJOR,
                wire::MINOR
            );
            return self.refuse(token, ErrorKind::Invalid, message);
        }
        if let Some(connection) = self.connections.get_mut(&token.connection) {
            connection.greeted = true;
        }
        self.first_hello = None;
        let reply = HelloReply {
            major: wire::MAJOR,
            minor: wire::MINOR,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            features: FEATURES
                .iter()
                .chain(&self.sandbox)
                .map(|&name| name.to_owned())
                .collect(),
            status: Some(self.status.clone()),
            pid: std::process::id(),
        };
        self.respond(token, Answer::Hello(reply));
    }

    /// Answers with an error and closes the connection.
    fn refuse(&mut self, token: Token, kind: ErrorKind, message: String) {
        if let Some(connection) = self.connections.get_mut(&token.connection) {
            connection.closing = true;
        }
        self.respond(token, error(kind, message));
    }
}
