//! One port: the state that its driver knows, its client, and the messages that the driver has yet
//! to get.

use std::{io, os::unix::net::UnixListener};

use rustix::{
    io::Errno,
    net::{SocketFlags, accept_with},
};

use super::{
    Channel,
    protocol::{Control, event},
};
use crate::{state::message, virtio::stream::Stream};

/// A client. After it has closed its end, earlier input is still delivered.
#[derive(Debug)]
pub(super) struct Client {
    pub stream: Stream,
    /// The guest's program has closed the port. The connection ends when all output is written.
    pub finishing: bool,
}

/// Messages that wait for buffers of the driver. The latest state replaces older ones, so a driver
/// that takes no messages has no list that grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Messages {
    pub add: bool,
    pub name: bool,
    pub open: bool,
}

pub(super) struct Port {
    pub name: String,
    pub listener: Option<UnixListener>,
    pub client: Option<Client>,
    /// The driver uses the port.
    pub ready: bool,
    /// A program of the guest has the port open.
    pub open: bool,
    /// Buffers for input are available, or the driver will notify.
    pub takes_input: bool,
    /// Output that waits for the client, from `written` on.
    pub output: Vec<u8>,
    pub written: usize,
    pub messages: Messages,
}

impl Port {
    pub fn new(channel: Channel) -> io::Result<Self> {
        if let Some(listener) = &channel.listener {
            listener.set_nonblocking(true)?;
        }
        Ok(Self {
            name: channel.name,
            listener: channel.listener,
            client: None,
            ready: false,
            open: false,
            takes_input: false,
            output: Vec::new(),
            written: 0,
            messages: Messages::default(),
        })
    }

    /// The next message for the driver, which is taken off the list.
    pub fn next_message(&mut self, id: u32) -> Option<Vec<u8>> {
        let control = |event, value| Control { id, event, value };
        let messages = &mut self.messages;
        if std::mem::take(&mut messages.add) {
            Some(control(event::DEVICE_ADD, 1).encode(""))
        } else if std::mem::take(&mut messages.name) {
            Some(control(event::PORT_NAME, 1).encode(&self.name))
        } else if std::mem::take(&mut messages.open) {
            Some(control(event::PORT_OPEN, 1).encode(""))
        } else {
            None
        }
    }

    /// Takes a connection that waits, in place of an older one. Says whether there was one.
    pub fn accept(&mut self) -> io::Result<bool> {
        let Some(listener) = &self.listener else {
            return Ok(false);
        };
        match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(stream) => {
                self.disconnect();
                self.client = Some(Client {
                    stream: Stream::new(stream),
                    finishing: false,
                });
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Ends the connection of the client. Output that waits for the client is dropped.
    pub fn disconnect(&mut self) {
        self.output = Vec::new();
        self.written = 0;
        self.client = None;
    }

    /// Writes what waits, as far as the client takes it. Without a client it is dropped. A client
    /// whose connection is broken is disconnected.
    pub fn flush(&mut self) {
        while let Some(client) = self.client.as_mut() {
            let waiting = self.output.get(self.written..).unwrap_or_default();
            if waiting.is_empty() {
                break;
            }
            match rustix::io::write(&client.stream, waiting) {
                Ok(0) => self.disconnect(),
                Ok(count) => self.written = self.written.saturating_add(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.disconnect(),
            }
        }
        // Memory for a large buffer is not kept.
        self.output = Vec::new();
        self.written = 0;
        if self.client.as_ref().is_some_and(|client| client.finishing) {
            self.disconnect();
        }
    }

    /// A program of the guest has opened the port, or closed it.
    pub fn set_open(&mut self, open: bool) {
        let was_open = std::mem::replace(&mut self.open, open);
        if let Some(client) = self.client.as_mut().filter(|_| was_open && !open) {
            client.finishing = true;
            self.flush();
        }
    }

    /// The driver is gone, and with it the guest's program.
    pub fn reset(&mut self) {
        self.ready = false;
        self.open = false;
        self.disconnect();
        self.messages = Messages::default();
    }

    /// Reads input of the client.
    pub fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        match &self.client {
            Some(client) => Ok(rustix::io::read(&client.stream, space)?),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// State that the driver knows. Output is not a part of the state: its client does not move
    /// with the guest.
    pub fn save(&self) -> message::VirtioChannelPort {
        message::VirtioChannelPort {
            ready: self.ready,
            open: self.open,
            add: self.messages.add,
            name: self.messages.name,
            tell_open: self.messages.open,
        }
    }

    /// Clients connect again.
    pub fn restore(&mut self, saved: &message::VirtioChannelPort) {
        self.ready = saved.ready;
        self.open = saved.open;
        self.messages = Messages {
            add: saved.add,
            name: saved.name,
            open: saved.tell_open,
        };
    }
}
