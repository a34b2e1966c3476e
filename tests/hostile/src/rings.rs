//! Broken rings and descriptor chains (virtio 1.3, 2.7) on every queue of a device, each followed by a reset; at the
//! end one good request, which must be answered rightly.

use std::{
    io,
    time::{Duration, Instant},
};

use crate::{
    pci::{Function, Virtio},
    random::Random,
    sys::Mapping,
};

// virtio_pci_common_cfg (virtio 1.3, 4.1.4.3).
const DEVICE_FEATURE_SELECT: usize = 0;
const DEVICE_FEATURE: usize = 4;
const DRIVER_FEATURE_SELECT: usize = 8;
const DRIVER_FEATURE: usize = 12;
const NUM_QUEUES: usize = 18;
const DEVICE_STATUS: usize = 20;
const QUEUE_SELECT: usize = 22;
const QUEUE_SIZE: usize = 24;
const QUEUE_ENABLE: usize = 28;
const QUEUE_NOTIFY_OFF: usize = 30;
const QUEUE_DESC: usize = 32;
const QUEUE_DRIVER: usize = 40;
const QUEUE_DEVICE: usize = 48;

// Device status (2.1) and descriptor flags (2.7.5).
const ACKNOWLEDGE: u64 = 1;
const DRIVER: u64 = 2;
const DRIVER_OK: u64 = 4;
const FEATURES_OK: u64 = 8;
const NEEDS_RESET: u64 = 64;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const RING: u16 = 16;
// One page each, so that physical addresses are contiguous within.
const TABLE: usize = 0;
const AVAIL: usize = 0x1000;
const USED: usize = 0x2000;
const DATA: usize = 0x3000;
const SIDE: usize = 0x4000;
const MEMORY: usize = 0x5000;

const VIRTIO_BLK: u16 = 2;
const VIRTIO_RNG: u16 = 4;

/// A descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);

struct Device<'a> {
    common: &'a Mapping,
    notify: &'a Mapping,
    virtio: Virtio,
    memory: Mapping,
}

impl Device<'_> {
    fn get(&self, register: usize, width: usize) -> u64 {
        self.common.read(self.virtio.common.offset + register, width)
    }

    fn set(&self, register: usize, width: usize, value: u64) {
        self.common
            .write(self.virtio.common.offset + register, width, value);
    }

    fn physical(&self, offset: usize) -> io::Result<u64> {
        self.memory.physical(offset)
    }

    /// Resets the device and waits until it says so (4.1.4.3.1).
    fn reset(&self) -> io::Result<()> {
        self.set(DEVICE_STATUS, 1, 0);
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.get(DEVICE_STATUS, 1) != 0 {
            if Instant::now() > deadline {
                return Err(io::Error::other("the device does not finish its reset"));
            }
            std::thread::yield_now();
        }
        for offset in (0..MEMORY).step_by(8) {
            self.memory.write(offset, 8, 0);
        }
        Ok(())
    }

    /// Negotiates all that is offered of the ring features, up to FEATURES_OK.
    fn negotiate(&self) -> io::Result<()> {
        self.set(DEVICE_STATUS, 1, ACKNOWLEDGE | DRIVER);
        for (select, wanted) in [(0, 1 << 28), (1, 1)] {
            self.set(DEVICE_FEATURE_SELECT, 4, select);
            let offered = self.get(DEVICE_FEATURE, 4);
            self.set(DRIVER_FEATURE_SELECT, 4, select);
            self.set(DRIVER_FEATURE, 4, offered & wanted);
        }
        self.set(DEVICE_STATUS, 1, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        if self.get(DEVICE_STATUS, 1) & FEATURES_OK == 0 {
            return Err(io::Error::other("the device refuses good features"));
        }
        Ok(())
    }

    fn queue(&self, queue: u16, desc: u64, driver: u64, device: u64) {
        self.set(QUEUE_SELECT, 2, u64::from(queue));
        self.set(QUEUE_SIZE, 2, u64::from(RING));
        self.set(QUEUE_DESC, 8, desc);
        self.set(QUEUE_DRIVER, 8, driver);
        self.set(QUEUE_DEVICE, 8, device);
        self.set(QUEUE_ENABLE, 2, 1);
    }

    /// To DRIVER_OK with one good queue.
    fn start(&self, queue: u16) -> io::Result<()> {
        self.reset()?;
        self.negotiate()?;
        self.queue(
            queue,
            self.physical(TABLE)?,
            self.physical(AVAIL)?,
            self.physical(USED)?,
        );
        self.set(DEVICE_STATUS, 1, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        Ok(())
    }

    fn describe(&self, table: usize, index: u16, descriptor: Descriptor) {
        let at = table + usize::from(index) * 16;
        self.memory.write(at, 8, descriptor.0);
        self.memory.write(at + 8, 4, u64::from(descriptor.1));
        self.memory.write(at + 12, 2, u64::from(descriptor.2));
        self.memory.write(at + 14, 2, u64::from(descriptor.3));
    }

    /// Makes `heads` available, and `index` the avail ring's index.
    fn offer(&self, heads: &[u16], index: u16) {
        for (slot, head) in heads.iter().enumerate() {
            self.memory.write(AVAIL + 4 + slot * 2, 2, u64::from(*head));
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.memory.write(AVAIL + 2, 2, u64::from(index));
    }

    fn kick(&self, queue: u16) {
        self.set(QUEUE_SELECT, 2, u64::from(queue));
        let slot = usize::try_from(self.get(QUEUE_NOTIFY_OFF, 2)).unwrap_or(0);
        let at = self.virtio.notify.offset + slot * self.virtio.notify_multiplier;
        self.notify.write(at, 2, u64::from(queue));
    }

    /// Waits until `used` requests are answered or the device asks for a reset; false when neither comes in time.
    fn settled(&self, used: u16, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let answered = self.memory.read(USED + 2, 2) >= u64::from(used);
            if answered || self.get(DEVICE_STATUS, 1) & NEEDS_RESET != 0 {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            std::thread::yield_now();
        }
    }
}

fn with_device(function: &Function, act: impl FnOnce(&Device<'_>) -> io::Result<()>) -> io::Result<()> {
    function.enable()?;
    let virtio = function.virtio()?;
    let bars = function.bars()?;
    let bar = |number| {
        let found = bars
            .iter()
            .find(|(index, _)| *index == number)
            .map(|(_, bar)| bar);
        found.ok_or_else(|| io::Error::other(format!("no BAR {number}")))
    };
    let (common, notify) = (bar(virtio.common.bar)?, bar(virtio.notify.bar)?);
    act(&Device {
        common,
        notify,
        virtio,
        memory: Mapping::memory(MEMORY)?,
    })
}

/// Whether the device works after a reset.
pub fn check(function: &Function) -> io::Result<()> {
    with_device(function, |device| {
        works(device)?;
        device.reset()
    })
}

/// All of it.
pub fn attack(function: &Function) -> io::Result<()> {
    with_device(function, |device| {
        works(device)?;
        let queues = u16::try_from(device.get(NUM_QUEUES, 2)).unwrap_or(0);
        for queue in 0..queues {
            chains(device, queue)?;
            places(device, queue)?;
            storm(device, queue)?;
        }
        works(device)?;
        device.reset()?;
        println!("HOSTILE rings {} works after a reset", function.name);
        Ok(())
    })
}

/// One good request: reads the first sector of a disk, or entropy. A NIC must at least come up and go down.
fn works(device: &Device<'_>) -> io::Result<()> {
    device.start(0)?;
    let (data, answer) = (device.physical(DATA)?, device.physical(DATA)? + 0x800);
    match device.virtio.kind {
        VIRTIO_BLK => {
            // Header (type IN, sector 0) at SIDE; data; status 0xff until answered (5.2.6).
            device.memory.write(DATA + 0x800, 1, 0xff);
            device.describe(TABLE, 0, (device.physical(SIDE)?, 16, NEXT, 1));
            device.describe(TABLE, 1, (data, 512, NEXT | WRITE, 2));
            device.describe(TABLE, 2, (answer, 1, WRITE, 0));
        }
        VIRTIO_RNG => device.describe(TABLE, 0, (data, 64, WRITE, 0)),
        _ => return Ok(()),
    }
    device.offer(&[0], 1);
    device.kick(0);
    if !device.settled(1, Duration::from_secs(30)) || device.get(DEVICE_STATUS, 1) & NEEDS_RESET != 0 {
        return Err(io::Error::other("a good request is not answered after a reset"));
    }
    let length = device.memory.read(USED + 8, 4);
    match device.virtio.kind {
        VIRTIO_BLK if device.memory.read(DATA + 0x800, 1) != 0 || length != 513 => Err(io::Error::other(
            format!("a good read fails after a reset (used length {length})"),
        )),
        VIRTIO_RNG if length == 0 || length > 64 => Err(io::Error::other(format!(
            "a good request for 64 bytes of entropy gave {length}"
        ))),
        _ => Ok(()),
    }
}

/// Broken chains: contents of the table and of the side table, which serves as an indirect table.
fn broken(device: &Device<'_>) -> io::Result<Vec<(Vec<Descriptor>, Vec<Descriptor>)>> {
    let (data, side) = (device.physical(DATA)?, device.physical(SIDE)?);
    let far = 0x7fff_ffff_f000;
    Ok(vec![
        // Loops: onto itself, and over two.
        (vec![(data, 16, NEXT, 0)], vec![]),
        (vec![(data, 16, NEXT, 1), (data, 16, NEXT | WRITE, 0)], vec![]),
        // Next beyond the table.
        (vec![(data, 16, NEXT, RING)], vec![]),
        (vec![(data, 16, NEXT, u16::MAX)], vec![]),
        // Addresses outside memory, over its end, wrapping around, in the hole of the registers.
        (vec![(far, 16, NEXT, 1), (far, 512, WRITE, 0)], vec![]),
        (vec![(u64::MAX - 8, 512, WRITE, 0)], vec![]),
        (vec![(0xc000_0000 - 8, 512, WRITE, 0)], vec![]),
        (vec![(0xe800_0000, 4096, WRITE, 0)], vec![]),
        // Zero and huge lengths.
        (vec![(data, 0, 0, 0)], vec![]),
        (vec![(data, 0, NEXT, 1), (data, 0, WRITE, 0)], vec![]),
        (vec![(data, u32::MAX, WRITE, 0)], vec![]),
        (
            vec![(data, u32::MAX, NEXT | WRITE, 1), (data, u32::MAX, WRITE, 0)],
            vec![],
        ),
        // Wrong directions: readable only, writable only, readable after writable.
        (vec![(data, 64, 0, 0)], vec![]),
        (vec![(data, 64, WRITE, 0)], vec![]),
        (vec![(data, 64, WRITE | NEXT, 1), (data, 64, 0, 0)], vec![]),
        (
            vec![(data, 16, NEXT, 1), (data, 512, WRITE | NEXT, 2), (data, 1, 0, 0)],
            vec![],
        ),
        // A header cut short; no room for a status.
        (vec![(data, 3, NEXT, 1), (data, 1, WRITE, 0)], vec![]),
        (vec![(data, 16, NEXT, 1), (data, 512, 0, 0)], vec![]),
        // Indirect tables: odd length, empty, beyond memory, nested, with NEXT, with a loop, next beyond.
        (vec![(side, 17, INDIRECT, 0)], vec![(data, 16, 0, 0)]),
        (vec![(side, 0, INDIRECT, 0)], vec![]),
        (vec![(far, 32, INDIRECT, 0)], vec![]),
        (vec![(side, 16, INDIRECT, 0)], vec![(side, 16, INDIRECT, 0)]),
        (
            vec![(side, 16, INDIRECT | NEXT, 1), (data, 16, WRITE, 0)],
            vec![(data, 16, 0, 0)],
        ),
        (
            vec![(side, 32, INDIRECT, 0)],
            vec![(data, 16, NEXT, 1), (data, 16, NEXT, 0)],
        ),
        (vec![(side, 32, INDIRECT, 0)], vec![(data, 16, NEXT, 99)]),
        (vec![(side, u32::MAX - 15, INDIRECT, 0)], vec![(data, 16, 0, 0)]),
        (vec![(side, 16, INDIRECT | WRITE, 0)], vec![(data, 16, WRITE, 0)]),
        // Undefined flags.
        (vec![(data, 16, 0xfff8, 3)], vec![]),
    ])
}

fn chains(device: &Device<'_>, queue: u16) -> io::Result<()> {
    for (table, side) in broken(device)? {
        device.start(queue)?;
        for (index, descriptor) in (0u16..).zip(&table) {
            device.describe(TABLE, index, *descriptor);
        }
        for (index, descriptor) in (0u16..).zip(&side) {
            device.describe(SIDE, index, *descriptor);
        }
        device.offer(&[0], 1);
        device.kick(queue);
        // The result is irrelevant: a receive queue may keep a chain.
        device.settled(1, Duration::from_millis(20));
    }
    // Indices: a head beyond the table, an index that jumps too far, one that goes back, the same head many times.
    for (heads, index) in [
        (vec![RING], 1),
        (vec![u16::MAX], 1),
        (vec![0], RING + 1),
        (vec![0], u16::MAX),
        (vec![0; 16], RING),
    ] {
        device.start(queue)?;
        device.describe(TABLE, 0, (device.physical(DATA)?, 64, WRITE, 0));
        device.offer(&heads, index);
        device.kick(queue);
        device.settled(1, Duration::from_millis(20));
        device.offer(&[0], 0);
        device.kick(queue);
    }
    Ok(())
}

/// Rings in places where no ring can be, and sizes that no ring has.
fn places(device: &Device<'_>, queue: u16) -> io::Result<()> {
    let good = [
        device.physical(TABLE)?,
        device.physical(AVAIL)?,
        device.physical(USED)?,
    ];
    let bad = [
        1,
        u64::MAX,
        u64::MAX - 15,
        0xc000_0000 - 16,
        0xe800_0000,
        0x7fff_ffff_f000,
        0xfee0_0000,
    ];
    for which in 0..3 {
        for place in bad {
            let mut at = good;
            if let Some(address) = at.get_mut(which) {
                *address = place;
            }
            device.reset()?;
            device.negotiate()?;
            device.queue(queue, at[0], at[1], at[2]);
            device.set(DEVICE_STATUS, 1, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
            device.describe(TABLE, 0, (device.physical(DATA)?, 64, WRITE, 0));
            device.offer(&[0], 1);
            device.kick(queue);
            device.settled(1, Duration::from_millis(5));
        }
    }
    for size in [0, 3, RING + 1, u16::MAX] {
        device.reset()?;
        device.negotiate()?;
        device.queue(queue, good[0], good[1], good[2]);
        device.set(QUEUE_SIZE, 2, u64::from(size));
        device.set(DEVICE_STATUS, 1, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        device.offer(&[0], 1);
        device.kick(queue);
    }
    Ok(())
}

/// Kicks without end while the ring is rewritten at random, with resets in between.
fn storm(device: &Device<'_>, queue: u16) -> io::Result<()> {
    let mut random = Random::new(0x7374_6f72 + u64::from(queue));
    let data = device.physical(DATA)?;
    for _ in 0..8 {
        device.start(queue)?;
        for _ in 0..200 {
            let index = u16::try_from(random.next() % u64::from(RING)).unwrap_or(0);
            let address = if random.next().is_multiple_of(2) {
                data
            } else {
                random.nasty()
            };
            #[allow(clippy::cast_possible_truncation, reason = "any bits will do")]
            let (length, flags, next) = (
                random.nasty() as u32,
                random.next() as u16 & 7,
                random.next() as u16 % (RING + 2),
            );
            device.describe(TABLE, index, (address, length, flags, next));
            #[allow(clippy::cast_possible_truncation, reason = "any bits will do")]
            device.offer(&[random.next() as u16 % (RING + 1)], random.nasty() as u16);
            device.kick(queue);
        }
        device.set(QUEUE_SELECT, 2, random.nasty());
        device.set(QUEUE_ENABLE, 2, random.nasty());
    }
    Ok(())
}
