//! The source's end of the stream.

use std::{
    fs::File,
    io::{self, Write},
    time::{Duration, Instant},
};

use devices::virtio::blk::Mirror;
use prost::Message as _;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_base::GuestMemory;
use vmm_protocol::state::{self, MachineHeader, Section, SnapshotInfo};

use super::BootFiles;
use super::format::{Kind, MAGIC, MAX_BODY_BYTES, VERSION, frame};
use crate::snapshot::{
    SnapshotError,
    format::{Layout, OWN_ID, PAGE_BYTES},
    memory,
    saving::{GoOn, Sink, Written},
};

/// How long nothing may be sent while there is nothing but zeroes: the other side waits for longer.
const QUIET: Duration = Duration::from_secs(5);

/// Frames are gathered up to so many bytes. A frame of one page would cost a system call, and wake the relay of the stream.
const GATHERED: usize = 64 << 10;

/// A disk that goes along.
#[derive(Debug)]
pub struct Mirrored {
    /// Its name.
    pub name: String,
    /// Content of the disk, and the changes by its guest.
    pub mirror: Mirror,
}

/// Sends a machine. The socket has a time limit for sends (`SO_SNDTIMEO`). Each time that the limit
/// passes, the sender checks for cancellation.
#[derive(Debug)]
pub struct Sender {
    socket: File,
    layout: Layout,
    /// The ranges were sent.
    begun: bool,
    pub(super) frames: u64,
    /// Bytes of pages that were sent.
    memory: u64,
    /// Bytes of disks that were sent.
    pub(super) blocks: u64,
    /// Frames that were not sent yet.
    gathered: Vec<u8>,
    /// All bytes that were sent.
    sent: u64,
    /// When bytes were sent last.
    wrote: Instant,
    /// How long nothing may be sent.
    pub(super) quiet: Duration,
    pub(super) disks: Vec<Mirrored>,
    /// To be sent first.
    header: Option<MachineHeader>,
    /// To be sent next.
    boot: Option<BootFiles>,
}

impl Sender {
    /// Sends a machine with `memory` and `disks` to `socket`.
    pub fn new(socket: File, memory: &GuestMemory, disks: Vec<Mirrored>) -> Self {
        let regions = memory.iter();
        let layout = Layout::new(regions.map(|region| (region.start_addr().0, region.len())));
        Self {
            socket,
            layout,
            begun: false,
            frames: 0,
            memory: 0,
            blocks: 0,
            gathered: Vec::with_capacity(GATHERED),
            sent: 0,
            wrote: Instant::now(),
            quiet: QUIET,
            disks,
            header: None,
            boot: None,
        }
    }

    /// Sends this header first.
    pub fn with_header(self, header: MachineHeader) -> Self {
        Self {
            header: Some(header),
            ..self
        }
    }

    /// Sends these boot files, too.
    pub fn with_boot(self, boot: BootFiles) -> Self {
        Self {
            boot: Some(boot),
            ..self
        }
    }

    pub(super) fn begin(&mut self, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        self.gathered.extend(MAGIC);
        self.gathered.extend(VERSION.to_le_bytes());
        let ranges = self.layout.message(0).encode_to_vec();
        self.frame(Kind::Memory, &[&ranges], go_on)?;
        if let Some(header) = self.header.take() {
            self.frame(Kind::Header, &[&header.encode_to_vec()], go_on)?;
            self.send(go_on)?;
        }
        match self.boot.take() {
            Some(boot) => self.boot(&boot, go_on),
            None => Ok(()),
        }
    }

    /// Sends a frame: at once if it is long or the stream was quiet for a while, else together with later frames.
    pub(super) fn frame(&mut self, kind: Kind, body: &[&[u8]], go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        self.gathered.extend(frame(kind, body));
        for part in body {
            if self.gathered.len().saturating_add(part.len()) > GATHERED {
                self.send(go_on)?;
            }
            if part.len() > GATHERED {
                self.write(part, go_on)?;
            } else {
                self.gathered.extend_from_slice(part);
            }
        }
        self.frames = self.frames.saturating_add(1);
        if self.is_quiet() {
            self.send(go_on)?;
        }
        Ok(())
    }

    /// Sends the gathered frames.
    pub(super) fn send(&mut self, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        let mut gathered = std::mem::take(&mut self.gathered);
        let sent = self.write(&gathered, go_on);
        gathered.clear();
        self.gathered = gathered;
        sent
    }

    /// Whether the other side is to hear something, so that it does not take the silence for a broken connection.
    pub(super) fn is_quiet(&self) -> bool {
        self.wrote.elapsed() >= self.quiet
    }

    fn write(&mut self, mut bytes: &[u8], go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        while !bytes.is_empty() {
            go_on()?;
            match self.socket.write(bytes) {
                Ok(0) => return Err(SnapshotError::writing(io::ErrorKind::WriteZero.into())),
                Ok(sent) => {
                    self.sent = self.sent.saturating_add(sent as u64);
                    self.wrote = Instant::now();
                    bytes = bytes.get(sent..).unwrap_or_default();
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(SnapshotError::writing(error)),
            }
        }
        Ok(())
    }

    /// Sends whole pages that lie side by side; pages of zeroes too when `again`, since they may have held something before.
    fn put(
        &mut self,
        address: u64,
        contents: &[u8],
        again: bool,
        go_on: GoOn<'_>,
    ) -> Result<(), SnapshotError> {
        let mut pages = contents.chunks(PAGE_BYTES).peekable();
        let mut start = 0_usize;
        while let Some(first) = pages.next() {
            let zeroes = memory::is_zero(first);
            let mut end = start.saturating_add(first.len());
            while let Some(page) = pages.next_if(|page| memory::is_zero(page) == zeroes) {
                end = end.saturating_add(page.len());
            }
            let run = contents.get(start..end).unwrap_or_default();
            let at = address.saturating_add(start as u64).to_le_bytes();
            if !zeroes {
                self.frame(Kind::Pages, &[&at, run], go_on)?;
                self.memory = self.memory.saturating_add(run.len() as u64);
            } else if again {
                self.frame(Kind::Zeroes, &[&at, &(run.len() as u64).to_le_bytes()], go_on)?;
            } else if self.is_quiet() {
                self.frame(Kind::Zeroes, &[&at, &(first.len() as u64).to_le_bytes()], go_on)?;
            }
            start = end;
        }
        Ok(())
    }
}

impl Sink for Sender {
    fn everything(&mut self, memory: &GuestMemory, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        self.begin(go_on)?;
        let mut buffer = Vec::new();
        for part in self.layout.clone().ranges {
            for (start, length) in memory::pieces(part.length) {
                let address = part.address.saturating_add(start);
                memory::read(memory, address, length, &mut buffer)?;
                self.put(address, &buffer, false, go_on)?;
            }
        }
        self.send(go_on)
    }

    fn pages(
        &mut self,
        memory: &GuestMemory,
        addresses: Vec<u64>,
        go_on: GoOn<'_>,
    ) -> Result<(), SnapshotError> {
        let mut buffer = Vec::new();
        for (address, length) in memory::runs(addresses) {
            memory::read(memory, address, length, &mut buffer)?;
            self.put(address, &buffer, true, go_on)?;
        }
        self.send(go_on)
    }

    fn contents(&mut self, address: u64, contents: &[u8], go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        self.put(address, contents, true, go_on)
    }

    fn disks(&mut self, tell: &dyn Fn(u64, u64), go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        self.all_disks(tell, go_on)?;
        self.send(go_on)
    }

    fn disk_changes(&mut self, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        self.changes(go_on)?;
        self.send(go_on)
    }

    fn changed_on_disks(&self) -> u64 {
        self.disks.iter().map(|disk| disk.mirror.changed()).sum()
    }

    fn written(&self) -> Written {
        Written {
            memory: self.memory,
            disks: self.blocks,
        }
    }

    fn finish(
        mut self: Box<Self>,
        info: &SnapshotInfo,
        machine: state::Machine,
        go_on: GoOn<'_>,
    ) -> Result<u64, SnapshotError> {
        let info = Section::new(OWN_ID, info);
        for section in std::iter::once(info).chain(machine.sections) {
            let message = section.encode_to_vec();
            let mut rest = message.as_slice();
            while let Some((part, behind)) = rest.split_at_checked(MAX_BODY_BYTES)
                && !behind.is_empty()
            {
                self.frame(Kind::Part, &[part], go_on)?;
                rest = behind;
            }
            self.frame(Kind::Section, &[rest], go_on)?;
        }
        let frames = self.frames.to_le_bytes();
        self.frame(Kind::End, &[&frames], go_on)?;
        self.send(go_on)?;
        Ok(self.sent)
    }
}
