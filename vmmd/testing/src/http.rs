//! A web server on 127.0.0.1 that answers, cuts and lies as a test has it, one connection after the other.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex, mpsc},
    thread,
};

/// How a server treats a connection whose request's head, in lower case, it has read.
pub type Turn = Box<dyn Fn(&str, &mut TcpStream) + Send>;

/// Treats its nth connection by the nth turn, and the rest by the last turn.
pub struct Server {
    /// "http://127.0.0.1:…"
    pub address: String,
    /// The heads of the requests, in lower case.
    pub requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub fn start(turns: Vec<Turn>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&requests);
        thread::spawn(move || {
            for number in 0.. {
                let Ok((mut stream, _)) = listener.accept() else {
                    return;
                };
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count > 0) {
                    head.push(byte[0]);
                }
                let head = String::from_utf8_lossy(&head).to_lowercase();
                seen.lock().unwrap().push(head.clone());
                turns[number.min(turns.len() - 1)](&head, &mut stream);
            }
        });
        Self { address, requests }
    }
}

/// From which byte on a request wants the file.
pub fn start(head: &str) -> Option<usize> {
    let (_, rest) = head.split_once("range: bytes=")?;
    rest.split('-').next()?.parse().ok()
}

/// Sends the requested part of the file with the tag `tag` (`ETag`), but at most `most` bytes of
/// it.
pub fn part(content: &Arc<Vec<u8>>, tag: &'static str, most: usize) -> Turn {
    let content = Arc::clone(content);
    Box::new(move |head, stream| {
        let same = head.contains(&format!("if-range: \"{tag}\""));
        let start = start(head).filter(|_| same).unwrap_or(0);
        let status = match start {
            0 => "200 OK\r\n".to_owned(),
            start => format!(
                "206 Partial Content\r\nContent-Range: bytes {start}-{}/{}\r\n",
                content.len() - 1,
                content.len()
            ),
        };
        let rest = &content[start..];
        let _ = write!(
            stream,
            "HTTP/1.1 {status}ETag: \"{tag}\"\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            rest.len()
        );
        let _ = stream.write_all(&rest[..rest.len().min(most)]);
    })
}

/// Holds the connection after the turn, until the sender signals the end or the test ends.
pub fn held(turn: Turn) -> (Turn, mpsc::Sender<()>) {
    let (go, may_go) = mpsc::channel();
    let turn: Turn = Box::new(move |head, stream| {
        turn(head, stream);
        let _ = may_go.recv();
    });
    (turn, go)
}
