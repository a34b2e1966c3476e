//! A process that serves a device over vhost-user, as a thread: it knows guest memory by the table that it is sent only, and
//! completes each FUSE request with success. It is an implementation of its own of the messages.

use std::{
    fs::File,
    io::{Read, Write},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use vm_memory::{FileOffset, GuestAddress};
use vmm_base::{GuestMemory, thread::ThreadKind};

use crate::virtio::{
    chain::Chain,
    queue::{Queue, QueueState},
};

const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28;

/// Deliberate misbehaviour of the thread.
#[derive(Debug, Default)]
pub struct Mood {
    /// It takes no requests, and keeps the one that it has.
    pub stuck: AtomicBool,
    /// It keeps the next request that it takes, and completes those behind it.
    pub keeps_one: AtomicBool,
    /// It does not signal completions.
    pub silent: AtomicBool,
    /// Requests that it has completed.
    pub served: AtomicU64,
    /// It takes no state, and gives none.
    pub has_no_state: AtomicBool,
    /// The state that it gives away: the last one that it took, or its own.
    pub state: Mutex<Vec<u8>>,
}

/// One of them. Its process "ends" when the front end goes, or by [`kill`](Self::kill).
pub struct BackEnd {
    socket: UnixStream,
    thread: Option<JoinHandle<()>>,
    pub mood: Arc<Mood>,
}

impl BackEnd {
    /// With the socket for the front end.
    pub fn start() -> (Self, OwnedFd) {
        let (front, back) = UnixStream::pair().unwrap();
        let mood = Arc::new(Mood {
            state: Mutex::new(b"of the first".to_vec()),
            ..Mood::default()
        });
        let socket = back.try_clone().unwrap();
        let shared = Arc::clone(&mood);
        let thread = vmm_base::thread::spawn(ThreadKind::Delegate, "back-end", move || {
            Server {
                socket: back,
                features: 0,
                memory: None,
                rings: Default::default(),
                incoming: None,
                mood: shared,
            }
            .run();
        })
        .unwrap();
        let back_end = Self {
            socket,
            thread: Some(thread),
            mood,
        };
        (back_end, front.into())
    }

    /// The process ends at once.
    pub fn kill(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Default)]
struct Ring {
    state: QueueState,
    kick: Option<File>,
    call: Option<File>,
    error: Option<File>,
    queue: Option<Queue>,
}

struct Server {
    socket: UnixStream,
    features: u64,
    memory: Option<GuestMemory>,
    rings: [Ring; 2],
    /// A state that comes.
    incoming: Option<File>,
    mood: Arc<Mood>,
}

impl Server {
    fn run(mut self) {
        loop {
            let mut fds = vec![PollFd::new(&self.socket, PollFlags::IN)];
            let stuck = self.mood.stuck.load(Ordering::SeqCst);
            let live = self.rings.iter().enumerate();
            let live: Vec<usize> = live
                .filter(|(_, ring)| ring.queue.is_some() && !stuck)
                .map(|(index, _)| index)
                .collect();
            for index in &live {
                fds.push(PollFd::new(
                    self.rings[*index].kick.as_ref().unwrap(),
                    PollFlags::IN,
                ));
            }
            poll(&mut fds, None).unwrap();
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] && !self.obey() {
                return;
            }
            for (index, _) in live.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
                self.serve(*index);
            }
        }
    }

    fn serve(&mut self, index: usize) {
        let memory = self.memory.clone().unwrap();
        let ring = &mut self.rings[index];
        let Some(queue) = &mut ring.queue else { return };
        let _ = ring.kick.as_mut().unwrap().read(&mut [0; 8]);
        let mut chain = Chain::new();
        let served = (|| {
            loop {
                queue.disable_notification()?;
                while queue.pop(&mut chain)? {
                    if self.mood.keeps_one.swap(false, Ordering::SeqCst) {
                        continue;
                    }
                    let mut head = [0; 40];
                    let length = (chain.readable_len() as usize).min(40);
                    chain.read(&memory, 0, &mut head[..length]).unwrap();
                    let mut answer = [16_u32.to_le_bytes(), [0; 4]].concat();
                    answer.extend_from_slice(&head[8..16]);
                    let written = chain.writable_len().min(16);
                    chain.write(&memory, 0, &answer[..written as usize]).unwrap();
                    queue.add_used(chain.head(), written)?;
                    self.mood.served.fetch_add(1, Ordering::SeqCst);
                }
                if queue.needs_interrupt()? && !self.mood.silent.load(Ordering::SeqCst) {
                    ring.call
                        .as_mut()
                        .unwrap()
                        .write_all(&1_u64.to_le_bytes())
                        .unwrap();
                }
                if !queue.enable_notification()? {
                    return Ok::<_, crate::virtio::fault::RingError>(());
                }
            }
        })();
        if served.is_err() {
            ring.queue = None;
            ring.error
                .as_mut()
                .unwrap()
                .write_all(&1_u64.to_le_bytes())
                .unwrap();
        }
    }

    /// One message; false at the end.
    fn obey(&mut self) -> bool {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [std::io::IoSliceMut::new(&mut header)];
        match recvmsg(&self.socket, &mut into, &mut ancillary, RecvFlags::WAITALL) {
            Ok(received) if received.bytes == 12 => {}
            _ => return false,
        }
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let (request, flags, size) = (word(0), word(4), word(8) as usize);
        let mut body = vec![0; size];
        if self.socket.read_exact(&mut body).is_err() {
            return false;
        }
        let answer = self.carry_out(request, &body, fds);
        let needs = flags & 8 != 0;
        let body = match answer {
            Some(bytes) => bytes,
            None if needs => vec![0; 8],
            None => return true,
        };
        let mut reply = [request, 1 | 4, body.len() as u32].map(u32::to_le_bytes).concat();
        reply.extend(body);
        self.socket.write_all(&reply).is_ok()
    }

    fn carry_out(&mut self, request: u32, body: &[u8], fds: Vec<OwnedFd>) -> Option<Vec<u8>> {
        let long = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().unwrap());
        let short = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap());
        let fd = |fds: Vec<OwnedFd>| fds.into_iter().next().map(File::from);
        match request {
            1 => return Some(FEATURES.to_le_bytes().to_vec()),
            2 => self.features = long(0),
            3 | 16 => {}
            15 => return Some((1_u64 << 19 | 1 << 3 | 1).to_le_bytes().to_vec()),
            5 => {
                let regions = (0..short(0) as usize).zip(fds).map(|(index, fd)| {
                    let at = 8 + index * 32;
                    assert_eq!(long(at), long(at + 16));
                    let file = FileOffset::new(File::from(fd), long(at + 24));
                    (GuestAddress(long(at)), long(at + 8) as usize, Some(file))
                });
                self.memory = Some(GuestMemory::from_ranges_with_files(regions).unwrap());
            }
            8 => self.rings[short(0) as usize].state.size = short(4) as u16,
            9 => {
                let state = &mut self.rings[short(0) as usize].state;
                (state.desc_table, state.used_ring, state.avail_ring) = (long(8), long(16), long(24));
            }
            10 => self.rings[short(0) as usize].state.next_avail = short(4) as u16,
            11 => {
                let ring = &mut self.rings[short(0) as usize];
                let base = ring
                    .queue
                    .take()
                    .map_or(ring.state, |queue| queue.state())
                    .next_avail;
                return Some([short(0).to_le_bytes(), u32::from(base).to_le_bytes()].concat());
            }
            12 => self.rings[long(0) as usize].kick = fd(fds),
            13 => self.rings[long(0) as usize].call = fd(fds),
            14 => self.rings[long(0) as usize].error = fd(fds),
            18 => {
                let ring = &mut self.rings[short(0) as usize];
                let memory = self.memory.clone().unwrap();
                let event_idx = self.features & 1 << 29 != 0;
                let mut queue = Queue::new(&ring.state, 1024, event_idx, memory).unwrap();
                queue.go_on(Some(ring.state.next_avail)).unwrap();
                ring.queue = Some(queue);
            }
            // Its state goes through the pipe at once: a pipe takes more than it has.
            42 => {
                let mut pipe = fd(fds).unwrap();
                let state = &mut *self.mood.state.lock().unwrap();
                match short(0) {
                    0 => pipe.write_all(state).unwrap(),
                    // All of it comes before the next message, which asks whether it has worked.
                    _ => self.incoming = Some(pipe),
                }
                return Some(0x100_u64.to_le_bytes().to_vec());
            }
            43 => {
                if let Some(mut pipe) = self.incoming.take() {
                    let state = &mut *self.mood.state.lock().unwrap();
                    state.clear();
                    pipe.read_to_end(state).unwrap();
                }
                let refused = self.mood.has_no_state.load(Ordering::SeqCst);
                return Some(u64::from(refused).to_le_bytes().to_vec());
            }
            other => panic!("request {other}"),
        }
        None
    }
}

/// The front end's socket of a back end that is gone.
pub fn nobody() -> OwnedFd {
    let (front, _) = UnixStream::pair().unwrap();
    front.into()
}
