//! The protocol of swtpm: commands and responses of the TPM on the data channel, and requests on the
//! control channel (`include/swtpm/tpm_ioctl.h` of swtpm; all numbers are big-endian).

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_base::sys::event::event_fd;
use vmm_sys_util::eventfd::EventFd;

use super::crb::{self, BUFFER_BYTES, HEADER};

/// Longest time of a command. Linux waits 5 minutes for the longest, the creation of a key, which swtpm
/// does within some seconds.
const COMMAND_TIME: Duration = Duration::from_secs(120);
/// Longest time of a request on the control channel.
const CONTROL_TIME: Duration = Duration::from_secs(30);
/// Largest part of the state, in bytes. With all of its 128 KiB of non-volatile memory in use, that of
/// libtpms has less than 200 KiB.
pub(super) const MAX_BLOB: usize = 1 << 20;
/// Bytes of one write. A socket with room has room for as many, so the write does not block.
const PIECE: usize = 4096;

/// Requests.
const CMD_INIT: u32 = 0x02;
const CMD_GET_STATEBLOB: u32 = 0x0c;
const CMD_SET_STATEBLOB: u32 = 0x0d;
const CMD_STOP: u32 = 0x0e;
const CMD_SET_BUFFERSIZE: u32 = 0x11;
/// Flag of CMD_INIT: the volatile state is deleted after it was read.
const DELETE_VOLATILE: u32 = 1;
/// Results of requests (TCG 1.2 main specification, part 2, 16): done, and there is no such state.
const TPM_SUCCESS: u32 = 0;
const TPM_RETRY: u32 = 0x800;

/// Parts of the state of a TPM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blob {
    Permanent = 1,
    Volatile = 2,
    SaveState = 3,
}

/// Waits until the socket has one of `events` or has lost its other end. `stop` ends the wait with an error.
fn wait_for(
    socket: BorrowedFd<'_>,
    events: PollFlags,
    deadline: Instant,
    stop: Option<&EventFd>,
) -> io::Result<()> {
    let stop = stop.map(event_fd);
    let mut polled = vec![PollFd::new(&socket, events)];
    polled.extend(stop.as_ref().map(|stop| PollFd::new(stop, PollFlags::IN)));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut polled, timeout.as_ref()) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "swtpm does not answer")),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    match polled.first().is_some_and(|socket| socket.revents().is_empty()) {
        true => Err(io::Error::new(io::ErrorKind::Interrupted, "the VM ends")),
        false => Ok(()),
    }
}

fn deadline(after: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(after).unwrap_or(now)
}

fn has_ended() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "swtpm has ended")
}

fn wrong_answer(what: &str) -> io::Error {
    let message = format!("swtpm gives an invalid answer: {what}");
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// Reads until `bytes` has this length.
fn read_to(
    socket: BorrowedFd<'_>,
    bytes: &mut Vec<u8>,
    length: usize,
    deadline: Instant,
    stop: Option<&EventFd>,
) -> io::Result<()> {
    while bytes.len() < length {
        wait_for(socket, PollFlags::IN, deadline, stop)?;
        let mut buffer = [0; PIECE];
        let most = length.saturating_sub(bytes.len()).min(PIECE);
        let buffer = buffer.get_mut(..most).unwrap_or_default();
        match rustix::io::retry_on_intr(|| rustix::io::read(socket, &mut *buffer)) {
            Ok(0) | Err(rustix::io::Errno::CONNRESET) => return Err(has_ended()),
            Ok(count) => bytes.extend(buffer.iter().take(count)),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn write_all(socket: BorrowedFd<'_>, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    for piece in bytes.chunks(PIECE) {
        wait_for(socket, PollFlags::OUT, deadline, None)?;
        match rustix::io::retry_on_intr(|| rustix::io::write(socket, piece)) {
            Ok(count) if count == piece.len() => {}
            Ok(_) => return Err(wrong_answer("a part of a request is left")),
            Err(rustix::io::Errno::PIPE) => return Err(has_ended()),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// The control channel.
pub(super) struct Control {
    socket: OwnedFd,
}

impl Control {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Sends a request and reads an answer of `length` bytes. The first number is the result.
    fn request(
        &self,
        name: &str,
        code: u32,
        numbers: &[u32],
        data: &[u8],
        length: usize,
    ) -> io::Result<Answer> {
        let deadline = deadline(CONTROL_TIME);
        let mut request = code.to_be_bytes().to_vec();
        for number in numbers {
            request.extend(number.to_be_bytes());
        }
        request.extend_from_slice(data);
        let answer = write_all(self.socket.as_fd(), &request, deadline)
            .and_then(|()| self.read(length, deadline))
            .map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
        Ok(Answer {
            name: name.to_owned(),
            bytes: answer,
        })
    }

    fn read(&self, length: usize, deadline: Instant) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        read_to(self.socket.as_fd(), &mut bytes, length, deadline, None)?;
        Ok(bytes)
    }

    /// Switches the TPM on, or off and on again. Afterwards it waits for TPM2_Startup.
    pub(super) fn power_on(&self) -> io::Result<()> {
        self.power_off()?;
        self.init(0)
    }

    /// Switches the TPM off.
    pub(super) fn power_off(&self) -> io::Result<()> {
        self.request("switch the TPM off", CMD_STOP, &[], &[], 4)?.done()
    }

    /// Switches on a TPM that has got its state by [`Self::set_blob`].
    pub(super) fn resume(&self) -> io::Result<()> {
        self.init(DELETE_VOLATILE)
    }

    fn init(&self, flags: u32) -> io::Result<()> {
        let size = BUFFER_BYTES;
        let answer = self.request(
            "set the size of the TPM's buffer",
            CMD_SET_BUFFERSIZE,
            &[size],
            &[],
            16,
        )?;
        answer.done()?;
        if answer.number(1) > size {
            return Err(wrong_answer("its buffer is larger than the CRB's"));
        }
        self.request("switch the TPM on", CMD_INIT, &[flags], &[], 4)?
            .done()
    }

    /// A part of the state of a TPM that is switched on; empty if there is none.
    pub(super) fn blob(&self, blob: Blob) -> io::Result<Vec<u8>> {
        let numbers = [0, blob as u32, 0];
        let answer = self.request("read the TPM's state", CMD_GET_STATEBLOB, &numbers, &[], 16)?;
        if answer.number(0) == TPM_RETRY {
            return Ok(Vec::new());
        }
        answer.done()?;
        let length = usize::try_from(answer.number(3)).unwrap_or(usize::MAX);
        if length > MAX_BLOB || answer.number(2) != answer.number(3) {
            return Err(wrong_answer("a state of unsupported length"));
        }
        self.read(length, deadline(CONTROL_TIME))
    }

    /// Gives a TPM that is switched off a part of its state, unless the part is empty.
    pub(super) fn set_blob(&self, blob: Blob, content: &[u8]) -> io::Result<()> {
        if content.is_empty() {
            return Ok(());
        }
        let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let numbers = [0, blob as u32, length];
        self.request("load the TPM's state", CMD_SET_STATEBLOB, &numbers, content, 4)?
            .done()
    }
}

/// An answer on the control channel.
struct Answer {
    name: String,
    bytes: Vec<u8>,
}

impl Answer {
    /// The number at this position; 0 behind the end.
    fn number(&self, index: usize) -> u32 {
        let (numbers, _) = self.bytes.as_chunks();
        numbers.get(index).copied().map_or(0, u32::from_be_bytes)
    }

    fn done(&self) -> io::Result<()> {
        match self.number(0) {
            TPM_SUCCESS => Ok(()),
            code => Err(io::Error::other(format!(
                "{}: swtpm refuses it: {code:#x}",
                self.name
            ))),
        }
    }
}

/// End of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Stop,
    Woken,
}

/// The data channel, of a worker that ends with `stop`.
pub(super) struct Data {
    socket: OwnedFd,
    stop: EventFd,
}

impl Data {
    pub(super) fn new(socket: OwnedFd, stop: EventFd) -> Self {
        Self { socket, stop }
    }

    /// Waits for the end of the worker, or for `wake`. An error if swtpm sends data without a command, or ends; only with
    /// `watches_data`.
    pub(super) fn wait(&self, wake: BorrowedFd<'_>, watches_data: bool) -> io::Result<Wait> {
        let stop = event_fd(&self.stop);
        let mut polled = [
            PollFd::new(&stop, PollFlags::IN),
            PollFd::new(&wake, PollFlags::IN),
            PollFd::new(&self.socket, PollFlags::IN),
        ];
        let count = if watches_data { 3 } else { 2 };
        loop {
            let polled = polled.get_mut(..count).unwrap_or_default();
            match poll(polled, None) {
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Ok(Wait::Stop),
                Ok(_) => break,
            }
        }
        let is_ready = |index: usize| polled.get(index).is_some_and(|fd| !fd.revents().is_empty());
        match (is_ready(0), is_ready(2)) {
            (true, _) => Ok(Wait::Stop),
            (false, false) => Ok(Wait::Woken),
            (false, true) => {
                read_to(self.socket.as_fd(), &mut Vec::new(), 1, Instant::now(), None)?;
                Err(wrong_answer("data without a command"))
            }
        }
    }

    /// Has swtpm carry out a command.
    pub(super) fn exchange(&self, command: &[u8]) -> io::Result<Vec<u8>> {
        let deadline = deadline(COMMAND_TIME);
        // swtpm reads a command at once, so it is written at once.
        write_all(self.socket.as_fd(), command, deadline)?;
        let mut answer = Vec::new();
        let (socket, stop) = (self.socket.as_fd(), Some(&self.stop));
        read_to(socket, &mut answer, HEADER, deadline, stop)?;
        let length = crb::length(&answer).ok_or_else(|| wrong_answer("a response of unsupported length"))?;
        read_to(socket, &mut answer, length, deadline, stop)?;
        Ok(answer)
    }
}
