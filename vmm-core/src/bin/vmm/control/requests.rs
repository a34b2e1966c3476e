//! Requests of clients: answered by this thread, or passed on to the driver.

use std::{
    fmt::{self, Write as _},
    os::fd::OwnedFd,
};

use tracing::{debug, info};
use vmm_core::lifecycle::{Answer, Input, Request, Token};
use vmm_protocol::{
    vmm::{ErrorKind, HelloReply, Message, message::Kind, request::Op},
    wire,
};

use super::{Server, error};

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
        let Some(op) = request.op else {
            return self.respond(token, error(ErrorKind::Invalid, "unknown request".to_owned()));
        };
        if !request.trace_id.is_empty() {
            info!(trace_id = request.trace_id, op = name(&op), "asked");
        }
        match op {
            Op::Hello(hello) => return self.hello(token, hello.major),
            _ if !connection.greeted => {
                return self.refuse(token, ErrorKind::State, "Hello comes first".to_owned());
            }
            Op::GetStatus(_) => {
                let status = self.status.clone();
                return self.respond(token, Answer::Status(status));
            }
            _ => {}
        }
        if connection.under_way >= MAX_UNDER_WAY {
            let many = format!("{MAX_UNDER_WAY} requests are under way already");
            return self.respond(token, error(ErrorKind::Resources, many));
        }
        connection.under_way += 1;
        let request = Request { op, fds };
        let _ = self.inputs.send(Input::Request(token, Box::new(request)));
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

/// The name of an operation in the protocol: the first word of its debug format.
fn name(op: &Op) -> String {
    struct FirstWord(String);

    impl fmt::Write for FirstWord {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let word = text.split('(').next().unwrap_or_default();
            self.0.push_str(word);
            // The error ends the formatting.
            if word.len() < text.len() {
                Err(fmt::Error)
            } else {
                Ok(())
            }
        }
    }

    let mut word = FirstWord(String::new());
    let _ended = write!(word, "{op:?}");
    word.0
}

#[cfg(test)]
mod tests {
    use vmm_protocol::vmm::{GetDiskStats, SetBalloon};

    use super::*;

    #[test]
    fn operations_have_the_names_of_the_protocol() {
        assert_eq!(name(&Op::GetDiskStats(GetDiskStats {})), "GetDiskStats");
        assert_eq!(
            name(&Op::SetBalloon(SetBalloon { target_bytes: 1 })),
            "SetBalloon"
        );
    }
}
