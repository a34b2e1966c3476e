//! A client of SPDY over TLS, as far as the tests need one.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::Arc,
};

use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};

/// Frames. The crate is a program, so the test includes the file.
#[path = "../src/kubelet/spdy"]
mod parts {
    mod dictionary;
    pub mod testing;
}

pub use self::parts::testing::Client;

/// A session with the agent.
pub struct Session {
    tls: StreamOwned<ClientConnection, TcpStream>,
    frames: Client,
    next: u32,
    replied: BTreeSet<u32>,
    /// Received data of each stream.
    data: BTreeMap<u32, Vec<u8>>,
    ended: BTreeSet<u32>,
    reset: BTreeSet<u32>,
}

impl Session {
    /// With these lines of headers; the whole answer when the connection is not upgraded.
    pub fn begin(port: u16, config: ClientConfig, path: &str, headers: &[&str]) -> Result<Self, String> {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let name = ServerName::try_from("node").unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut tls = StreamOwned::new(connection, stream);
        let headers = headers.join("\r\n");
        let request = format!("POST {path} HTTP/1.1\r\nhost: node\r\ncontent-length: 0\r\n{headers}\r\n\r\n");
        tls.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            tls.read_exact(&mut byte).unwrap();
            answer.extend(byte);
        }
        let mut answer = String::from_utf8(answer).unwrap();
        if !answer.starts_with("HTTP/1.1 101") {
            let length = answer
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
            tls.read_exact(&mut body).unwrap();
            answer.push_str(std::str::from_utf8(&body).unwrap());
            return Err(answer);
        }
        assert!(answer.contains("upgrade: SPDY/3.1\r\n"), "{answer}");
        Ok(Self {
            tls,
            frames: Client::new(),
            next: 1,
            replied: BTreeSet::new(),
            data: BTreeMap::new(),
            ended: BTreeSet::new(),
            reset: BTreeSet::new(),
        })
    }

    /// Opens a stream and waits until the agent has taken or reset it.
    pub fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
        let stream = self.next;
        self.next += 2;
        let frame = self.frames.open(stream, headers);
        self.send(&frame);
        while !self.replied.contains(&stream) && !self.reset.contains(&stream) {
            assert!(self.receive(), "the agent has closed the connection");
        }
        stream
    }

    pub fn send(&mut self, frame: &[u8]) {
        self.tls.write_all(frame).unwrap();
    }

    pub fn write(&mut self, stream: u32, bytes: &[u8]) {
        self.send(&Client::data(stream, false, bytes));
    }

    pub fn finish(&mut self, stream: u32) {
        self.send(&Client::data(stream, true, b""));
    }

    /// Reads a frame; false when the agent has closed the connection.
    pub fn receive(&mut self) -> bool {
        let mut head = [0; 8];
        if self.tls.read_exact(&mut head).is_err() {
            return false;
        }
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        self.tls.read_exact(&mut payload).unwrap();
        if head[0] & 0x80 == 0 {
            let stream = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
            assert!(self.replied.contains(&stream), "data before the reply");
            self.data.entry(stream).or_default().extend(payload);
            if head[4] & 1 != 0 {
                self.ended.insert(stream);
            }
            return true;
        }
        let stream = u32::from_be_bytes([payload[0], payload[1], payload[2], payload[3]]);
        match head[3] {
            2 => {
                self.replied.insert(stream);
            }
            3 => {
                self.reset.insert(stream);
            }
            6 | 7 => {}
            other => panic!("a frame of kind {other}"),
        }
        true
    }

    /// Data received on a stream so far.
    pub fn data(&self, stream: u32) -> String {
        let data = self.data.get(&stream).cloned().unwrap_or_default();
        String::from_utf8_lossy(&data).into_owned()
    }

    /// Waits until this has come on a stream.
    pub fn expect(&mut self, stream: u32, text: &str) {
        while !self.data(stream).contains(text) {
            assert!(self.receive(), "no {text:?} in {:?}", self.data(stream));
        }
    }

    /// Waits until the agent has ended a stream; returns its data.
    pub fn end(&mut self, stream: u32) -> Vec<u8> {
        while !self.ended.contains(&stream) {
            assert!(self.receive(), "the agent has closed the connection");
        }
        self.data.remove(&stream).unwrap_or_default()
    }

    pub fn was_reset(&self, stream: u32) -> bool {
        self.reset.contains(&stream)
    }
}
