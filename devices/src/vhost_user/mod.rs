//! The front end of a vhost-user connection: a device's requests to the process that serves its
//! queues ("Vhost-user Protocol", QEMU's docs/interop/vhost-user.rst).
//!
//! The peer is another process and is trusted only with guest memory: each answer is bounded in
//! length and in time, and an invalid answer makes the connection unusable. The functions here
//! neither create sockets nor set options of them.

mod message;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    pipe::{PipeFlags, pipe_with},
};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use self::message::{FLAG_NEED_REPLY, HEADER, Header, Request};
pub use self::message::{PROTOCOL_FEATURES, RingAddresses};
use vmm_base::{GuestMemory, sys::event::event_fd};
use vmm_sys_util::eventfd::EventFd;

/// Time of a back end for all answers of one operation. A VM's pause, start or stop may wait for it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most regions of memory in one table (the protocol's limit without CONFIGURE_MEM_SLOTS).
const MAX_REGIONS: usize = 8;
/// Protocol feature: requests can be acknowledged (REPLY_ACK).
const REPLY_ACK: u64 = 1 << 3;
/// Protocol feature: several queues (MQ).
const MULTI_QUEUE: u64 = 1;
/// Protocol feature: a back end that is stopped gives its state away, or takes another one's (DEVICE_STATE).
const DEVICE_STATE: u64 = 1 << 19;
/// Longest state in bytes: a section of a snapshot has to hold it.
const MAX_STATE: usize = 7 << 19;
/// How long the transfer of a state may take: of each file that the driver knows, its path is looked up.
const STATE_PATIENCE: Duration = Duration::from_secs(30);
/// Minimum number of bytes that a writable pipe takes without a wait (PIPE_BUF, pipe(7)).
const PIPE_BUF: usize = 4096;

/// Which way a state goes ("Transfer direction").
#[derive(Clone, Copy)]
#[repr(u32)]
enum Direction {
    Save = 0,
    Load = 1,
}

/// The eventfds of a ring.
#[derive(Clone, Copy)]
pub struct RingEvents<'a> {
    /// The driver's notifications.
    pub kick: &'a EventFd,
    /// Interrupts for the driver.
    pub call: &'a EventFd,
    /// The back end found the ring corrupt.
    pub error: &'a EventFd,
}

/// A connection to a back end. After an error it is of no use any more.
#[derive(Debug)]
pub struct FrontEnd {
    socket: OwnedFd,
    /// Features offered by the back end.
    features: u64,
    /// Requests are acknowledged.
    acknowledged: bool,
    /// Its state can be saved.
    has_state: bool,
    /// A ring whose base was asked for and has not come yet.
    stopping: Option<u32>,
}

impl FrontEnd {
    /// Greets the back end behind a connected UNIX stream socket, and becomes its owner. The back end must answer by
    /// `deadline`, which is that of the whole operation ([`deadline`]).
    pub fn new(socket: OwnedFd, deadline: Instant) -> io::Result<Self> {
        let mut front = Self {
            socket,
            features: 0,
            acknowledged: false,
            has_state: false,
            stopping: None,
        };
        front.features = front.number(Request::GetFeatures, deadline)?;
        if front.features & PROTOCOL_FEATURES != 0 {
            let offered = front.number(Request::GetProtocolFeatures, deadline)?;
            let taken = offered & (REPLY_ACK | MULTI_QUEUE | DEVICE_STATE);
            front.set(Request::SetProtocolFeatures, &taken.to_le_bytes(), &[], deadline)?;
            front.acknowledged = taken & REPLY_ACK != 0;
            front.has_state = taken & DEVICE_STATE != 0;
        }
        front.set(Request::SetOwner, &[], &[], deadline)?;
        Ok(front)
    }

    /// The features that the back end offers.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether a ring is being stopped: see [`stop_ring`](Self::stop_ring).
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_some()
    }

    /// Accepts the features that the driver has accepted; all of them must be on offer.
    pub fn set_features(&mut self, accepted: u64, deadline: Instant) -> io::Result<()> {
        if accepted & !self.features != 0 {
            return Err(io::Error::other(
                "the back end lacks a feature that the driver uses",
            ));
        }
        let features = accepted | self.features & PROTOCOL_FEATURES;
        self.set(Request::SetFeatures, &features.to_le_bytes(), &[], deadline)
    }

    /// Hands guest memory over, which has to be shared: each region is a piece of a file. Addresses of rings are
    /// guest-physical ones: they are used for "user addresses" too, which the back end only translates.
    pub fn set_memory(&mut self, memory: &GuestMemory, deadline: Instant) -> io::Result<()> {
        let mut regions = Vec::new();
        let mut files: Vec<BorrowedFd<'_>> = Vec::new();
        for region in memory.iter() {
            let file = region
                .file_offset()
                .ok_or_else(|| io::Error::other("guest memory is not shared"))?;
            let start = region.start_addr().0;
            regions.push([start, region.len(), start, file.start()]);
            files.push(file.file().as_fd());
        }
        if regions.len() > MAX_REGIONS {
            return Err(io::Error::other("guest memory has too many regions"));
        }
        let count = u32::try_from(regions.len()).unwrap_or(0);
        let mut body = [count.to_le_bytes(), [0; 4]].concat();
        body.extend(regions.iter().flatten().flat_map(|word| word.to_le_bytes()));
        self.set(Request::SetMemTable, &body, &files, deadline)
    }

    /// Sets a ring up, from the available entry `base` on, and starts it.
    pub fn start_ring(
        &mut self,
        index: u32,
        base: u16,
        addresses: &RingAddresses,
        events: &RingEvents<'_>,
        deadline: Instant,
    ) -> io::Result<()> {
        let features = self.features;
        let mut set = |request, body: &[u8], fds: &[BorrowedFd<'_>]| self.set(request, body, fds, deadline);
        let state = |value: u32| [index.to_le_bytes(), value.to_le_bytes()].concat();
        set(Request::SetVringNum, &state(addresses.size.into()), &[])?;
        set(Request::SetVringAddr, &addresses.body(index), &[])?;
        set(Request::SetVringBase, &state(base.into()), &[])?;
        let number = u64::from(index).to_le_bytes();
        set(Request::SetVringErr, &number, &[event_fd(events.error)])?;
        set(Request::SetVringCall, &number, &[event_fd(events.call)])?;
        set(Request::SetVringKick, &number, &[event_fd(events.kick)])?;
        if features & PROTOCOL_FEATURES != 0 {
            set(Request::SetVringEnable, &state(1), &[])?;
        }
        Ok(())
    }

    /// Gives a ring another eventfd for its interrupts.
    pub fn set_call(&mut self, index: u32, call: &EventFd, deadline: Instant) -> io::Result<()> {
        self.set(
            Request::SetVringCall,
            &u64::from(index).to_le_bytes(),
            &[event_fd(call)],
            deadline,
        )
    }

    /// Stops a ring: the back end ends its current request and returns the index of the next
    /// available entry. `None` if the stop has not completed by `deadline`: the ring is still being
    /// stopped, and another call continues the wait.
    pub fn stop_ring(&mut self, index: u32, deadline: Instant) -> io::Result<Option<u16>> {
        match self.stopping {
            None => {
                let body = [index.to_le_bytes(), [0; 4]].concat();
                self.send(Request::GetVringBase, 0, &body, &[], deadline)?;
                self.stopping = Some(index);
            }
            Some(other) if other != index => {
                return Err(io::Error::other("another ring is being stopped"));
            }
            Some(_) => {}
        }
        if !wait(&self.socket, PollFlags::IN, deadline)? {
            return Ok(None);
        }
        let reply: [u8; 8] = self.reply(Request::GetVringBase, deadline)?;
        self.stopping = None;
        let [a, b, c, d, base @ ..] = reply;
        let base = u16::try_from(u32::from_le_bytes(base));
        match base {
            Ok(base) if u32::from_le_bytes([a, b, c, d]) == index => Ok(Some(base)),
            _ => Err(io::Error::other("the back end's answer is not of this ring")),
        }
    }

    /// The state of the back end, in its own format: at most 3.5 MiB. All rings are stopped.
    pub fn save_state(&self) -> io::Result<Vec<u8>> {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC)?;
        let deadline = after(STATE_PATIENCE);
        self.transfer(Direction::Save, &to, deadline)?;
        // Its end is then the end of the state.
        drop(to);
        let mut state = Vec::new();
        let mut piece = vec![0; 16 * PIPE_BUF];
        loop {
            let count = read(&from, &mut piece, deadline)?;
            if count == 0 {
                break;
            }
            state.extend_from_slice(piece.get(..count).unwrap_or_default());
            if state.len() > MAX_STATE {
                return Err(io::Error::other(
                    "its process's state is too large, since the guest knows so many files: let it forget those that it does not use",
                ));
            }
        }
        self.check_state(deadline).map(|()| state)
    }

    /// Gives the back end a state that another one of its kind has saved. No ring is started yet.
    pub fn load_state(&self, mut state: &[u8]) -> io::Result<()> {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC)?;
        let deadline = after(STATE_PATIENCE);
        self.transfer(Direction::Load, &from, deadline)?;
        drop(from);
        while !state.is_empty() {
            if !wait(&to, PollFlags::OUT, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let piece = state.get(..PIPE_BUF).unwrap_or(state);
            let count = rustix::io::write(&to, piece)?;
            state = state.get(count..).unwrap_or_default();
        }
        drop(to);
        self.check_state(deadline)
    }

    /// Hands the back end's end of a pipe over, through which its state goes.
    fn transfer(&self, direction: Direction, pipe: &OwnedFd, deadline: Instant) -> io::Result<()> {
        if !self.has_state {
            return Err(io::Error::other("the back end can't save its state"));
        }
        // In the only phase that there is: it is stopped.
        let body = [(direction as u32).to_le_bytes(), [0; 4]].concat();
        let pipe = [pipe.as_fd()];
        self.send(Request::SetDeviceStateFd, 0, &body, &pipe, deadline)?;
        // Bit 8: no other descriptor comes back ("Back-end message: SET_DEVICE_STATE_FD").
        match u64::from_le_bytes(self.reply(Request::SetDeviceStateFd, deadline)?) {
            0x100 => Ok(()),
            _ => Err(io::Error::other("the back end refused to transfer its state")),
        }
    }

    /// Asks whether the transfer has worked, which is over by `deadline`.
    fn check_state(&self, deadline: Instant) -> io::Result<()> {
        self.send(Request::CheckDeviceState, 0, &[], &[], deadline)?;
        if !wait(&self.socket, PollFlags::IN, deadline)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match u64::from_le_bytes(self.reply(Request::CheckDeviceState, deadline)?) {
            0 => Ok(()),
            _ => Err(io::Error::other("the back end could not transfer its state")),
        }
    }

    /// Sends a request, and waits for its acknowledgement where there are any.
    fn set(
        &mut self,
        request: Request,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        let flags = if self.acknowledged { FLAG_NEED_REPLY } else { 0 };
        self.send(request, flags, body, fds, deadline)?;
        if !self.acknowledged {
            return Ok(());
        }
        match u64::from_le_bytes(self.reply(request, deadline)?) {
            0 => Ok(()),
            _ => Err(io::Error::other(format!("the back end refused {request:?}"))),
        }
    }

    fn number(&mut self, request: Request, deadline: Instant) -> io::Result<u64> {
        self.send(request, 0, &[], &[], deadline)?;
        Ok(u64::from_le_bytes(self.reply(request, deadline)?))
    }

    fn send(
        &self,
        request: Request,
        flags: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        let mut bytes = Header::new(request, flags, body.len()).bytes().to_vec();
        bytes.extend_from_slice(body);
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_REGIONS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("too many descriptors for a message"));
        }
        if !wait(&self.socket, PollFlags::OUT, deadline)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sendmsg(&self.socket, &[io::IoSlice::new(&bytes)], &mut ancillary, flags)?;
        if sent == bytes.len() {
            return Ok(());
        }
        Err(io::Error::other("the back end does not read its requests"))
    }

    /// The body of the answer to `request`, which has to have this length.
    fn reply<const N: usize>(&self, request: Request, deadline: Instant) -> io::Result<[u8; N]> {
        let mut header = [0; HEADER];
        self.read(&mut header, deadline)?;
        if !Header::from(header).answers(request, N) {
            return Err(io::Error::other(format!(
                "the back end's answer to {request:?} is none"
            )));
        }
        let mut body = [0; N];
        self.read(&mut body, deadline)?;
        Ok(body)
    }

    fn read(&self, mut into: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !into.is_empty() {
            let count = read(&self.socket, into, deadline)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            into = std::mem::take(&mut into).get_mut(count..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Reads what there is, waiting for it until `deadline`; 0 at the end.
fn read(from: &OwnedFd, into: &mut [u8], deadline: Instant) -> io::Result<usize> {
    loop {
        if !wait(from, PollFlags::IN, deadline)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match rustix::io::read(from, &mut *into) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Whether it is ready by `deadline`.
fn wait(fd: &OwnedFd, what: PollFlags, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(fd, what)];
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(ready) => return Ok(ready > 0),
        }
    }
}

impl AsFd for FrontEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl std::os::fd::AsRawFd for FrontEnd {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.socket.as_raw_fd()
    }
}

/// The time by which the back end must have answered all requests of an operation that begins now.
pub fn deadline() -> Instant {
    after(PATIENCE)
}

fn after(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time).unwrap_or(now)
}

#[cfg(test)]
mod tests;
