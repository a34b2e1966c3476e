//! The root buses: buses 0 to 2 with up to 32 devices each, reached through ECAM and through ports
//! 0xCF8/0xCFC. All devices have one function, except the LPC bridge's.
//!
//! A *slot* is a bus and a device number in one: `bus << 5 | device`, the upper bits of a PCI
//! routing id. Each bus has its own host bridge in the ACPI namespace, and no bridge connects two
//! of them: every slot can be plugged independently, and its address never depends on other
//! functions. Device 0 of each bus is no slot; on bus 0 it is the host bridge that firmware looks
//! for. The chipset Q35 also has an LPC bridge, in a slot of its own, and a second window to the
//! configuration spaces that firmware places. Function 2 of the LPC bridge's device is the place of a
//! SATA controller, as on ICH9. Its number, [`SATA_SLOT`], follows those of the slots.
//!
//! [`PciRoot`] owns the map from slots to functions and the list of the BARs on the MMIO bus. The
//! two may differ for a moment: a write to a configuration space changes the registers and returns
//! [`Effect::Remap`]. Then the caller, without any lock, uses [`PciRoot::remap`] to update the bus.
//!
//! A guest may place a BAR anywhere. The BAR is on the bus only if it lies wholly within the
//! windows given to PCI and overlaps no other range; so it never shadows guest memory or another
//! device. Each later remap tries a refused BAR again.
//!
//! Functions are added and removed while vCPUs run. A removed function is off the bus at once, but
//! a vCPU may have looked it up before: its [`Seat`] records the removal under the function's lock;
//! then reads return ones and writes have no effect.
//!
//! Locks, in this order: `mapped`, then one function's. `slots` is held only for a lookup.

mod bridge;
mod mechanism;
mod seat;
mod state;

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering},
    },
};

pub use self::bridge::Chipset;
pub(super) use self::seat::BarDevice;
use self::{
    bridge::Bridge,
    mechanism::{Ecam, Ports},
    seat::{Seat, ZeroBar},
};
use super::{
    config::{BarKind, Window},
    function::{PciFunction, SharedFunction},
};
use crate::bus::{Bus, Effect, SharedDevice};

/// Number of root buses.
pub const BUSES: usize = 3;
/// Device numbers of a bus (PCI 3.0, 3.2.2.3.1).
pub const DEVICES: usize = 32;
/// Slots of all buses, those of the device numbers 0 included.
pub const SLOTS: usize = BUSES * DEVICES;
/// The number of the SATA controller at 00:1f.2.
pub const SATA_SLOT: u8 = 96;
const _: () = assert!(SATA_SLOT as usize == SLOTS);
/// Places of functions: the slots and that of the SATA controller.
const PLACES: usize = SLOTS + 1;
/// Bytes of ECAM: 1 MiB for each bus (PCI Express 5.0, 7.2.2).
pub const ECAM_SIZE: u64 = (BUSES as u64) << 20;
/// Bytes of the window that firmware places with PCIEXBAR: 256 buses.
const WINDOW_SIZE: u64 = 256 << 20;
/// First of the [`PORTS`] ports of the configuration mechanism.
pub const FIRST_PORT: u64 = 0xcf8;
/// Number of ports: CONFIG_ADDRESS and CONFIG_DATA.
pub const PORTS: u64 = 8;
/// The header type of a function, and its bit for a device with several functions.
const HEADER_TYPE: usize = 0x0e;
const MULTIFUNCTION: u8 = 1 << 7;

/// Guest-physical addresses that belong to PCI.
#[derive(Clone, Debug)]
pub struct PciWindows {
    /// Below 4 GiB.
    pub low: Range<u64>,
    /// Above the end of memory, where BARs are after power-on; empty if there is none.
    pub high: Range<u64>,
    /// All from the end of memory to the end of the address space, where a guest may put BARs: firmware has its own idea of where they
    /// belong. Holds `high`.
    pub reach: Range<u64>,
}

impl PciWindows {
    /// Returns a bus's part of the low and of the high window. Bus 0 has all of the low one,
    /// because only bus 0 has devices with 32-bit BARs, and the first half of the high one. The
    /// others have a quarter of the high one each. Both parts of a nonexistent bus are empty.
    pub fn of_bus(&self, bus: usize) -> (Range<u64>, Range<u64>) {
        let Range { start, end } = self.high;
        let quarter = end.saturating_sub(start) / 4;
        let at = |quarters: u64| start.saturating_add(quarter.saturating_mul(quarters));
        match bus {
            0 => (self.low.clone(), start..at(2)),
            1 => (0..0, at(2)..at(3)),
            2 => (0..0, at(3)..end),
            _ => (0..0, 0..0),
        }
    }

    /// Returns a bus's parts of `reach`, in order of addresses. Addresses outside `high` belong to
    /// bus 0, the only bus that firmware knows.
    pub fn reach_of_bus(&self, bus: usize) -> Vec<Range<u64>> {
        let (_, own) = self.of_bus(bus);
        let ranges = if bus == 0 {
            vec![self.reach.start..own.end, self.high.end..self.reach.end]
        } else {
            vec![own]
        };
        ranges.into_iter().filter(|range| !range.is_empty()).collect()
    }

    /// Returns the addresses of the BARs of a function in `slot` after power-on, by their indices.
    /// They depend only on the slot and the BARs, never on other functions.
    pub fn place(
        &self,
        slot: u8,
        bars: impl IntoIterator<Item = (usize, BarKind, u64)>,
    ) -> Result<Vec<(usize, u64)>, PciError> {
        let number = usize::from(slot);
        let (low, high) = self.of_bus(number / DEVICES);
        let (mut low, mut high) = (share(&low, number % DEVICES), share(&high, number % DEVICES));
        let placed = bars.into_iter().map(|(bar, kind, size)| {
            let address = match kind {
                BarKind::Memory32 => take(&mut low, size),
                BarKind::Memory64 => take(&mut high, size).or_else(|| take(&mut low, size)),
            };
            Ok((bar, address.ok_or(PciError::NoRoom { bar, size })?))
        });
        placed.collect()
    }
}

/// Reason why a device was not added.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PciError {
    /// Device 0 of a bus is no slot, 95 is the last slot.
    #[error("PCI slot {0} does not exist or is taken")]
    Slot(u8),
    /// A BAR is larger than a slot's share of the address space.
    #[error("BAR {bar} of {size:#x} bytes does not fit into the PCI windows")]
    NoRoom {
        /// Its index.
        bar: usize,
        /// Its size in bytes.
        size: u64,
    },
}

struct Mapping {
    slot: usize,
    bar: usize,
    window: Window,
}

/// Ranges on the MMIO bus.
#[derive(Default)]
struct Mapped {
    bars: Vec<Mapping>,
    /// Where BARs were of functions that were taken away from a driver.
    withdrawn: Vec<Window>,
    /// Where the window of the chipset Q35 is.
    window: Option<u64>,
}

/// See the module.
pub struct PciRoot {
    chipset: Chipset,
    slots: RwLock<[Option<Arc<Seat>>; PLACES]>,
    windows: PciWindows,
    mapped: Mutex<Mapped>,
    config_address: AtomicU32,
}

impl PciRoot {
    /// Buses with the host bridge of CloudHv alone.
    pub fn new(windows: PciWindows) -> Arc<Self> {
        Self::with_chipset(windows, Chipset::CloudHv)
    }

    /// Buses with the functions of `chipset` alone.
    pub fn with_chipset(windows: PciWindows, chipset: Chipset) -> Arc<Self> {
        let mut slots = [const { None }; PLACES];
        let mut put = |slot: usize, bridge| {
            if let Some(place) = slots.get_mut(slot) {
                let function: SharedFunction = Arc::new(Mutex::new(bridge));
                *place = Some(Seat::new(function));
            }
        };
        put(0, Bridge::host(chipset));
        if chipset == Chipset::Q35 {
            put(bridge::LPC_SLOT.into(), Bridge::lpc());
        }
        Arc::new(Self {
            chipset,
            slots: RwLock::new(slots),
            windows,
            mapped: Mutex::default(),
            config_address: AtomicU32::new(0),
        })
    }

    /// Puts a function into a slot and gives its BARs addresses ([`PciWindows::place`]).
    pub fn add(&self, slot: u8, function: SharedFunction) -> Result<(), PciError> {
        if is_slot(slot.into()) {
            self.put(slot, slot, function)
        } else {
            Err(PciError::Slot(slot))
        }
    }

    /// Puts a SATA controller beside the LPC bridge, whose share of the windows its BARs use, and whose device has
    /// several functions then (PCI 3.0, 6.2.1: header type).
    pub fn add_sata(&self, function: SharedFunction) -> Result<(), PciError> {
        let lpc = self.lpc_slot().and_then(|slot| self.seat(slot));
        let lpc = lpc.ok_or(PciError::Slot(SATA_SLOT))?;
        self.put(SATA_SLOT, bridge::LPC_SLOT, function)?;
        lock(&lpc.function)
            .config_mut()
            .add_registers(HEADER_TYPE, &[MULTIFUNCTION], &[]);
        Ok(())
    }

    /// Puts a function into a free place. Its BARs get addresses of the slot `share`.
    fn put(&self, slot: u8, share: u8, function: SharedFunction) -> Result<(), PciError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let Some(place @ None) = slots.get_mut(usize::from(slot)) else {
            return Err(PciError::Slot(slot));
        };
        {
            let mut function = lock(&function);
            let placed = self.windows.place(share, function.config().bars())?;
            for (bar, address) in placed {
                function.config_mut().place_bar(bar, address);
            }
        }
        *place = Some(Seat::new(function));
        Ok(())
    }

    /// Takes the function in a slot off its bus, with its BARs and notifications; says whether there was one.
    /// When it returns, no access reaches the function any more, and the slot is free.
    pub fn remove(&self, slot: u8, mmio: &Bus) -> bool {
        self.take_off(slot, mmio, false)
    }

    /// Like [`remove`](Self::remove), for a function whose driver is not prepared for the removal.
    /// The configuration space reads as ones, but the ranges of its BARs read as zeroes, until the
    /// guest maps other BARs there or is reset.
    pub fn remove_by_force(&self, slot: u8, mmio: &Bus) -> bool {
        self.take_off(slot, mmio, true)
    }

    fn take_off(&self, slot: u8, mmio: &Bus, by_force: bool) -> bool {
        let slot = usize::from(slot);
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let seat = {
            let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
            slots
                .get_mut(slot)
                .filter(|_| is_slot(slot))
                .and_then(Option::take)
        };
        let Some(seat) = seat else {
            return false;
        };
        let mut function = lock(&seat.function);
        seat.gone.store(true, Ordering::Relaxed);
        let Mapped { bars, withdrawn, .. } = &mut *mapped;
        bars.retain(|mapping| {
            if mapping.slot != slot {
                return true;
            }
            let Window { address, size } = mapping.window;
            function.bar_moved(mapping.bar, None);
            mmio.remove(address);
            if by_force && mmio.insert(address, size, Arc::new(Mutex::new(ZeroBar))).is_ok() {
                withdrawn.push(mapping.window);
            }
            false
        });
        true
    }

    /// Whether this very function is in the slot.
    pub fn holds(&self, slot: u8, function: &SharedFunction) -> bool {
        self.seat(slot.into())
            .is_some_and(|seat| Arc::ptr_eq(&seat.function, function))
    }

    /// Whether there is a function in the slot. There is none in a slot that does not exist.
    pub fn is_taken(&self, slot: u8) -> bool {
        self.seat(slot.into()).is_some()
    }

    /// ECAM, to be mapped with [`ECAM_SIZE`] bytes.
    pub fn ecam(self: &Arc<Self>) -> SharedDevice {
        Arc::new(Mutex::new(Ecam(Arc::clone(self))))
    }

    /// CONFIG_ADDRESS and CONFIG_DATA, to be mapped at port [`FIRST_PORT`] with [`PORTS`] ports.
    pub fn ports(self: &Arc<Self>) -> SharedDevice {
        Arc::new(Mutex::new(Ports(Arc::clone(self))))
    }

    /// Updates the MMIO bus to match the BARs. Call it after [`Effect::Remap`], without any lock,
    /// before the vCPU continues.
    pub fn remap(self: &Arc<Self>, mmio: &Bus) {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let seats = self.seats();
        let wanted: Vec<(Arc<Seat>, Mapping)> = seats
            .iter()
            .flat_map(|(slot, seat)| {
                let windows = lock(&seat.function).config().windows();
                let placed = windows.into_iter().enumerate();
                placed.filter_map(move |(bar, window)| {
                    Some((
                        Arc::clone(seat),
                        Mapping {
                            slot: *slot,
                            bar,
                            window: window?,
                        },
                    ))
                })
            })
            .collect();
        self.place_window(&mut mapped, mmio);
        let Mapped { bars, withdrawn, .. } = &mut *mapped;
        bars.retain(|old| {
            let stays = wanted.iter().any(|(_, new)| same(old, new));
            if !stays {
                if let Some((_, seat)) = seats.iter().find(|(slot, _)| *slot == old.slot) {
                    lock(&seat.function).bar_moved(old.bar, None);
                }
                mmio.remove(old.window.address);
            }
            stays
        });
        for (seat, new) in wanted {
            if bars.iter().any(|old| same(old, &new)) || !self.allows(new.window) {
                continue;
            }
            withdrawn.retain(|old| !overlap(*old, new.window) || !mmio.remove(old.address));
            if map(&seat, &new, mmio) {
                bars.push(new);
            }
        }
    }

    /// The buses and their functions' configuration to the state after power-on, with all vCPUs stopped and after the
    /// devices were reset.
    pub fn reset(self: &Arc<Self>, mmio: &Bus) {
        self.config_address.store(0, Ordering::Relaxed);
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        for window in mapped.withdrawn.drain(..) {
            mmio.remove(window.address);
        }
        drop(mapped);
        for (_, seat) in self.seats() {
            lock(&seat.function).reset();
        }
        self.remap(mmio);
    }

    /// The slot of the LPC bridge, if the chipset has one.
    fn lpc_slot(&self) -> Option<usize> {
        (self.chipset == Chipset::Q35).then_some(usize::from(bridge::LPC_SLOT))
    }

    /// Moves the window of the chipset Q35 to the address in PCIEXBAR. Where another device is, there is no window.
    fn place_window(self: &Arc<Self>, mapped: &mut Mapped, mmio: &Bus) {
        if self.chipset != Chipset::Q35 {
            return;
        }
        let bridge = self.seat(0);
        let wanted = bridge.and_then(|seat| bridge::window(lock(&seat.function).config()));
        if mapped.window == wanted {
            return;
        }
        if let Some(old) = mapped.window.take() {
            mmio.remove(old);
        }
        mapped.window = wanted.filter(|base| mmio.insert(*base, WINDOW_SIZE, self.ecam()).is_ok());
    }

    fn allows(&self, window: Window) -> bool {
        let Some(end) = window.address.checked_add(window.size) else {
            return false;
        };
        [&self.windows.low, &self.windows.reach]
            .iter()
            .any(|range| range.start <= window.address && end <= range.end)
    }

    fn seats(&self) -> Vec<(usize, Arc<Seat>)> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots
            .iter()
            .enumerate()
            .filter_map(|(slot, seat)| Some((slot, seat.clone()?)))
            .collect()
    }

    pub(super) fn seat(&self, slot: usize) -> Option<Arc<Seat>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.get(slot)?.clone()
    }

    fn read_config(&self, slot: usize, offset: usize, data: &mut [u8]) {
        let read = self
            .seat(slot)
            .and_then(|seat| seat.access(|function| function.read_config(offset, data)));
        if read.is_none() {
            data.fill(0xff);
        }
    }

    fn write_config(&self, slot: usize, offset: usize, data: &[u8]) -> Effect {
        let write = |function: &mut dyn PciFunction| {
            let before = function.config().windows();
            let effect = function.write_config(offset, data);
            if effect == Effect::None && function.config().windows() != before {
                Effect::Remap
            } else {
                effect
            }
        };
        self.seat(slot)
            .and_then(|seat| seat.access(write))
            .unwrap_or_default()
    }
}

/// Puts a BAR on the MMIO bus and notifies its function; returns whether there was room.
fn map(seat: &Arc<Seat>, mapping: &Mapping, mmio: &Bus) -> bool {
    let Window { address, size } = mapping.window;
    let device = Arc::new(Mutex::new(BarDevice {
        seat: Arc::clone(seat),
        bar: mapping.bar,
    }));
    let placed = mmio.insert(address, size, device).is_ok();
    if placed {
        lock(&seat.function).bar_moved(mapping.bar, Some(address));
    }
    placed
}

fn overlap(a: Window, b: Window) -> bool {
    let end = |window: Window| window.address.saturating_add(window.size);
    a.address < end(b) && b.address < end(a)
}

fn same(a: &Mapping, b: &Mapping) -> bool {
    (a.slot, a.bar, a.window) == (b.slot, b.bar, b.window)
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a number is that of a slot, in which functions come and go.
pub(super) fn is_slot(number: usize) -> bool {
    number < SLOTS && !number.is_multiple_of(DEVICES)
}

/// A device's part of its bus's window.
fn share(window: &Range<u64>, device: usize) -> Range<u64> {
    const PARTS: u64 = DEVICES as u64;
    let length = window.end.saturating_sub(window.start) / PARTS;
    let start = window.start.saturating_add(length.saturating_mul(device as u64));
    start..start.saturating_add(length)
}

/// Takes an aligned piece off the front.
fn take(range: &mut Range<u64>, size: u64) -> Option<u64> {
    let address = range.start.checked_next_multiple_of(size)?;
    let end = address.checked_add(size).filter(|end| *end <= range.end)?;
    range.start = end;
    Some(address)
}
