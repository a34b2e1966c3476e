//! The machine's disks: their descriptors are held as the real one does, and their requests are numbers only.

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use vmm_protocol::vmm::{
    AttachDisk, ChangeMedium, DetachDisk, Disk, DiskDetached, DiskStats, DiskStatsReply, Error, ErrorKind,
    ImageFormat, MachineStats, OperationStats, ResizeDisk, SetRateLimit, VcpuStats, event,
    response::Result as Outcome, set_rate_limit::Target,
};

use crate::{guest::Guest, nics, shares};

/// A disk and the images below it.
pub struct Plugged {
    pub wire: Disk,
    pub image: File,
    /// Kept open.
    _below: Vec<OwnedFd>,
    capacity: u64,
    bytes_per_second: u64,
}

impl Plugged {
    /// Takes the disk's descriptors out of the received ones.
    pub fn new(wire: Disk, fds: &mut [Option<OwnedFd>]) -> Self {
        let mut take = |index: u32| fds[index as usize].take().unwrap();
        let image = match wire.empty {
            true => File::open("/dev/null").unwrap(),
            false => File::from(take(wire.fd)),
        };
        let below = wire.backing.iter().map(|image| take(image.fd)).collect();
        let capacity = capacity(&image, wire.format());
        Self {
            bytes_per_second: wire.rate_limit.map_or(0, |limit| limit.bytes_per_second),
            image,
            _below: below,
            capacity,
            wire,
        }
    }

    /// `throttled` contains the disk's limit of bytes per second, for the tests.
    fn stats(&self) -> DiskStats {
        DiskStats {
            name: self.wire.name.clone(),
            capacity_bytes: self.capacity,
            read: Some(OperationStats {
                requests: 1,
                bytes: 512,
                total_ns: 1000,
                latency_us_log2: vec![0, 1],
                ..Default::default()
            }),
            throttled: self.bytes_per_second,
            ..Default::default()
        }
    }
}

fn capacity(image: &File, format: ImageFormat) -> u64 {
    if format != ImageFormat::Qcow2 {
        return rustix::fs::seek(image, rustix::fs::SeekFrom::End(0)).unwrap();
    }
    // The descriptor may be one for direct I/O.
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    image.read_at(&mut page.0, 0).unwrap();
    u64::from_be_bytes(page.0[24..32].try_into().unwrap())
}

/// `mock.attach`: `image`, `inuse`: refused; `hang`: not plugged in, nothing comes back; `lost`: plugged in, nothing
/// comes back. `mock.bad=NAME`: this disk alone is refused.
pub fn attach(guest: &Guest, request: AttachDisk, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let how = guest.option("mock.attach");
    match how.as_deref() {
        Some("image") => return refuse(ErrorKind::Image, "the image is no good"),
        Some("inuse") => return refuse(ErrorKind::InUse, "the image is locked by somebody else"),
        Some("hang") => return None,
        _ => {}
    }
    let wire = request.disk.unwrap();
    if guest.option("mock.bad").as_deref() == Some(wire.name.as_str()) {
        return refuse(ErrorKind::Image, "the image is no good");
    }
    let clash = |plugged: &Plugged| plugged.wire.name == wire.name || plugged.wire.pci_slot == wire.pci_slot;
    if guest.disks().iter().any(clash) {
        return refuse(ErrorKind::Invalid, "the name or the slot is taken");
    }
    let mut fds: Vec<_> = fds.into_iter().map(Some).collect();
    guest.disks().push(Plugged::new(wire, &mut fds));
    (how.as_deref() != Some("lost")).then(|| Outcome::Status(guest.status()))
}

/// A guest keeps the medium of a drive with the serial `locked`.
pub fn change_medium(guest: &Guest, request: ChangeMedium, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let wire = request.disk.as_ref().unwrap();
    if wire.serial == "locked" && !request.force {
        return refuse(ErrorKind::State, "the guest prevents the removal of the medium");
    }
    let mut fds: Vec<_> = fds.into_iter().map(Some).collect();
    let medium = Plugged::new(request.disk.unwrap(), &mut fds);
    let mut disks = guest.disks();
    let drive = disks
        .iter_mut()
        .find(|plugged| plugged.wire.name == medium.wire.name);
    *drive.unwrap() = medium;
    drop(disks);
    Some(Outcome::Status(guest.status()))
}

/// `mock.eject=ignore`: the guest does nothing, until `eject NAME` is typed. `hang`: nothing comes back.
pub fn detach(guest: &Guest, request: &DetachDisk) -> Option<Outcome> {
    let how = guest.option("mock.eject");
    if how.as_deref() == Some("hang") {
        return None;
    }
    if !guest
        .disks()
        .iter()
        .any(|plugged| plugged.wire.name == request.name)
    {
        return refuse(ErrorKind::NotFound, "there is no such disk");
    }
    let paused = guest.status().state() == vmm_protocol::vmm::State::Paused;
    if request.force || (how.is_none() && !paused) {
        eject(guest, &request.name, request.force);
    }
    Some(Outcome::Status(guest.status()))
}

/// The guest gives a disk back, or loses it.
pub fn eject(guest: &Guest, name: &str, forced: bool) {
    let mut disks = guest.disks();
    let before = disks.len();
    disks.retain(|plugged| plugged.wire.name != name);
    let found = disks.len() < before;
    drop(disks);
    if found && guest.option("mock.event").is_none() {
        guest.tell(event::Kind::DiskDetached(DiskDetached {
            name: name.into(),
            forced,
        }));
    }
}

pub fn resize(guest: &Guest, request: &ResizeDisk) -> Option<Outcome> {
    let mut disks = guest.disks();
    let Some(plugged) = disks.iter_mut().find(|plugged| plugged.wire.name == request.name) else {
        return refuse(ErrorKind::NotFound, "there is no such disk");
    };
    if request.capacity_bytes == 0 {
        plugged.capacity = capacity(&plugged.image, plugged.wire.format());
        return Some(Outcome::Status(guest.status()));
    }
    if request.capacity_bytes < plugged.capacity {
        return refuse(ErrorKind::Invalid, "smaller than it is");
    }
    if plugged.wire.format() != ImageFormat::Qcow2 {
        plugged.image.set_len(request.capacity_bytes).unwrap();
    }
    plugged.capacity = request.capacity_bytes;
    drop(disks);
    Some(Outcome::Status(guest.status()))
}

/// `mock.limit=refuse`.
pub fn limit(guest: &Guest, request: &SetRateLimit) -> Option<Outcome> {
    if guest.option("mock.limit").is_some() {
        return refuse(ErrorKind::Internal, "no limit today");
    }
    let rate = request.limit.unwrap_or_default().bytes_per_second;
    for plugged in guest.disks().iter_mut() {
        let meant = match request.target.as_ref().unwrap() {
            Target::Disk(name) => plugged.wire.name == *name,
            Target::Group(name) => plugged.wire.rate_group == *name,
        };
        if meant {
            plugged.bytes_per_second = rate;
        }
    }
    Some(Outcome::Status(guest.status()))
}

/// `mock.stats=refuse`: as a `vmm` that is older than this request; `hang`: nothing comes back.
pub fn stats(guest: &Guest) -> Option<Outcome> {
    match guest.option("mock.stats").as_deref() {
        Some("refuse") => return refuse(ErrorKind::Invalid, "unknown request"),
        Some("hang") => return None,
        _ => {}
    }
    let disks = guest.disks().iter().map(Plugged::stats).collect();
    Some(Outcome::DiskStats(DiskStatsReply { disks }))
}

/// As [`stats`], with numbers that tests know.
pub fn machine_stats(guest: &Guest) -> Option<Outcome> {
    match guest.option("mock.stats").as_deref() {
        Some("refuse") => return refuse(ErrorKind::Invalid, "unknown request"),
        Some("hang") => return None,
        _ => {}
    }
    let exits = [("exits", 1000), ("io_exits", 400), ("halt_exits", 7)];
    Some(Outcome::MachineStats(MachineStats {
        vcpus: vec![VcpuStats {
            index: 0,
            time_ns: 2_500_000_000,
            wait_ns: 250_000_000,
            thread: None,
        }],
        exits: exits.map(|(name, count)| (name.to_owned(), count)).into(),
        nics: nics::stats(guest),
        balloon: None,
        disks: guest.disks().iter().map(Plugged::stats).collect(),
        shares: shares::stats(guest),
    }))
}

fn refuse(kind: ErrorKind, message: &str) -> Option<Outcome> {
    Some(Outcome::Error(Error {
        message: message.into(),
        kind: kind.into(),
    }))
}
