//! In-memory image that records all changes, and requests on it.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress};
use vmm_base::{GuestMemory, ram::Segment, sys::Iovecs};

use super::super::{
    Below, Qcow2Image, check,
    create::{self, CreateOptions, Preallocation},
    header::Header,
    medium::Medium,
};
use crate::{Image, OpenError, Operation, Request, engine::Engine};

/// Recorded change of a [`Recorder`].
#[derive(Debug, Clone)]
pub enum Event {
    Write(u64, Vec<u8>),
    Punch(u64, u64),
    Sync,
}

/// A file in memory.
#[derive(Debug, Default)]
pub struct Recorder {
    content: Mutex<Vec<u8>>,
    pub events: Mutex<Vec<Event>>,
    /// Fails writes that would make it longer than this.
    pub limit: Mutex<Option<u64>>,
    /// Fails the next sync.
    pub fails_once: AtomicBool,
    /// The guest's reads and writes of data that begins with this byte wait until there is none.
    held: Mutex<Option<u8>>,
    /// How many wait.
    waiting: Mutex<usize>,
    changed: Condvar,
}

impl Recorder {
    pub fn new(content: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            content: Mutex::new(content),
            ..Self::default()
        })
    }

    pub fn content(&self) -> Vec<u8> {
        self.content.lock().unwrap().clone()
    }

    /// Changes it behind everybody's back.
    pub fn patch(&self, offset: u64, data: &[u8]) {
        apply(
            &mut self.content.lock().unwrap(),
            &Event::Write(offset, data.to_vec()),
        );
    }

    /// From now on the guest's reads and writes of data that begins with `byte` wait.
    pub fn hold(&self, byte: u8) {
        *self.held.lock().unwrap() = Some(byte);
    }

    /// Waits until one does.
    pub fn wait_for_held(&self) {
        let waiting = self.waiting.lock().unwrap();
        let limit = Duration::from_secs(60);
        let (_waiting, timeout) = self
            .changed
            .wait_timeout_while(waiting, limit, |waiting| *waiting == 0)
            .unwrap();
        assert!(!timeout.timed_out(), "nothing is held");
    }

    /// Lets the held writers continue.
    pub fn let_go(&self) {
        *self.held.lock().unwrap() = None;
        drop(self.waiting.lock().unwrap());
        self.changed.notify_all();
    }

    fn pass(&self, data: &[u8]) {
        let mut waiting = self.waiting.lock().unwrap();
        let is_held = || {
            data.first()
                .is_some_and(|byte| *self.held.lock().unwrap() == Some(*byte))
        };
        if is_held() {
            *waiting += 1;
            self.changed.notify_all();
            let mut waiting = self.changed.wait_while(waiting, |_| is_held()).unwrap();
            *waiting -= 1;
        }
    }

    fn record(&self, event: Event) {
        apply(&mut self.content.lock().unwrap(), &event);
        self.events.lock().unwrap().push(event);
    }
}

/// Applies a recorded change to `content`.
pub fn apply(content: &mut Vec<u8>, event: &Event) {
    match event {
        Event::Write(offset, data) => {
            let offset = *offset as usize;
            let end = offset + data.len();
            if content.len() < end {
                content.resize(end, 0);
            }
            content[offset..end].copy_from_slice(data);
        }
        Event::Punch(offset, length) => {
            let end = content.len().min((offset + length) as usize);
            if (*offset as usize) < end {
                content[*offset as usize..end].fill(0);
            }
        }
        Event::Sync => {}
    }
}

impl Medium for Recorder {
    fn size(&self) -> io::Result<u64> {
        Ok(self.content.lock().unwrap().len() as u64)
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let content = self.content.lock().unwrap();
        let rest = content.get(offset as usize..).unwrap_or_default();
        let count = rest.len().min(data.len());
        data[..count].copy_from_slice(&rest[..count]);
        data[count..].fill(0);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let limit = self.limit.lock().unwrap().unwrap_or(u64::MAX);
        if offset + data.len() as u64 > limit {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.record(Event::Write(offset, data.to_vec()));
        Ok(())
    }

    fn read_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        let mut data = vec![0; buffers.len()];
        self.read_at(&mut data, offset)?;
        self.pass(&data);
        buffers.put(&data);
        Ok(())
    }

    fn write_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        let mut data = vec![0; buffers.len()];
        buffers.take(&mut data);
        self.pass(&data);
        self.write_at(&data, offset)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.record(Event::Punch(offset, length));
        Ok(())
    }

    fn allocate_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.write_at(&vec![0; length as usize], offset)
    }

    fn sync(&self) -> io::Result<()> {
        if self.fails_once.swap(false, Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.events.lock().unwrap().push(Event::Sync);
        Ok(())
    }
}

/// A new image in memory.
pub fn image(size: u64, cluster_size: u32) -> Arc<Recorder> {
    created(CreateOptions {
        size,
        cluster_size,
        preallocation: Preallocation::Off,
        backing: None,
    })
}

/// A new image in memory above another one of that format.
pub fn overlay(size: u64, cluster_size: u32, backing: &'static str) -> Arc<Recorder> {
    created(CreateOptions {
        size,
        cluster_size,
        preallocation: Preallocation::Off,
        backing: Some(backing),
    })
}

/// A new image in memory.
pub fn created(options: CreateOptions) -> Arc<Recorder> {
    let recorder = Recorder::new(Vec::new());
    let medium = Arc::clone(&recorder) as Arc<dyn Medium>;
    create::create_on(&medium, options, |length| {
        recorder.content.lock().unwrap().resize(length as usize, 0);
        Ok(())
    })
    .unwrap();
    recorder
}

/// Returns the report of our own checker.
pub fn report(recorder: &Recorder) -> check::Report {
    let header = Header::read(recorder).unwrap().unwrap();
    check::inspect(recorder, &header).unwrap().unwrap().report
}

pub fn assert_sound(recorder: &Recorder) {
    let found = report(recorder);
    assert_eq!((found.corruptions, found.leaks), (0, 0), "{found:?}");
}

pub fn open(recorder: &Arc<Recorder>) -> Qcow2Image {
    try_open(recorder, false, Vec::new()).unwrap()
}

pub fn try_open(
    recorder: &Arc<Recorder>,
    read_only: bool,
    below: Vec<Below>,
) -> Result<Qcow2Image, OpenError> {
    Qcow2Image::open_on(Arc::clone(recorder) as Arc<dyn Medium>, read_only, below)
}

/// A guest with one engine, which does one request after another.
pub struct Guest {
    memory: Arc<GuestMemory>,
    pub engine: Box<dyn Engine>,
}

const MEMORY: usize = 8 << 20;

impl Guest {
    pub fn new(image: &Qcow2Image) -> Self {
        Self {
            memory: Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap()),
            engine: image.engine().unwrap(),
        }
    }

    /// Begins a request on the first `length` bytes of memory.
    pub fn submit(&mut self, token: u32, operation: Operation, length: usize) {
        let mut buffers = Iovecs::new(Arc::clone(&self.memory));
        if length > 0 {
            let segment = Segment {
                address: GuestAddress(0),
                length: length as u32,
            };
            buffers.append(&[segment], 0, length as u32).unwrap();
        }
        self.engine.submit(Request {
            token,
            operation,
            buffers: Box::new(buffers),
        });
    }

    /// Takes all that was submitted, which succeeds.
    pub fn take_all(&mut self) {
        let late = Instant::now() + Duration::from_secs(60);
        while self.engine.in_flight() > 0 {
            assert!(Instant::now() < late, "it takes longer than a minute");
            self.engine.wait(late).unwrap();
            while let Some(completion) = self.engine.completed() {
                completion.result.unwrap();
            }
        }
    }

    pub fn request(&mut self, operation: Operation, length: usize) -> io::Result<()> {
        self.submit(7, operation, length);
        self.engine.commit().unwrap();
        self.engine
            .wait(Instant::now() + Duration::from_secs(60))
            .unwrap();
        let completion = self.engine.completed().expect("it takes longer than a minute");
        assert_eq!(completion.token, 7);
        completion.result
    }

    pub fn read(&mut self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        self.request(Operation::Read { offset }, length)?;
        let mut data = vec![0; length];
        self.memory.read_slice(&mut data, GuestAddress(0)).unwrap();
        Ok(data)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.memory.write_slice(data, GuestAddress(0)).unwrap();
        self.request(
            Operation::Write {
                offset,
                stable: false,
            },
            data.len(),
        )
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.request(Operation::Flush, 0)
    }
}
