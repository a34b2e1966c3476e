#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::{
    config::{ConfigError, ConfigSpace},
    root::{ECAM_SIZE, FIRST_PORT, PORTS, lock},
    *,
};
use crate::bus::{Bus, BusDevice, Effect};

mod chipset;
mod removal;
mod saved;

const ECAM: u64 = 0xe800_0000;
const LOW: std::ops::Range<u64> = 0xc000_0000..0xe000_0000;
const HIGH: std::ops::Range<u64> = 0x10_0000_0000..0x20_0000_0000;
/// Where a guest may put BARs above 4 GiB.
const REACH: std::ops::Range<u64> = 0x2_0000_0000..0x100_0000_0000;
/// Another device's range inside the low window, such as an interrupt controller's.
const FOREIGN: u64 = 0xd000_0000;

/// Answers reads with its number; notes where its BARs are.
struct Card {
    config: ConfigSpace,
    number: u8,
    bars: [Option<u64>; 6],
    /// Other vCPUs use it while a BAR moves: for a moment it is on the bus and the card not told yet.
    busy: bool,
}

impl Card {
    fn shared(number: u8, bars: &[(usize, BarKind, u64)]) -> Arc<Mutex<Self>> {
        let header = Header {
            vendor: 0x1234,
            device: number.into(),
            ..Header::default()
        };
        let mut config = ConfigSpace::new(&header);
        for (index, kind, size) in bars {
            config.add_bar(*index, *kind, *size).unwrap();
        }
        Arc::new(Mutex::new(Self {
            config,
            number,
            bars: [None; 6],
            busy: false,
        }))
    }
}

impl PciFunction for Card {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }
    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
    }
    fn write_config(&mut self, offset: usize, data: &[u8]) -> Effect {
        self.config.write(offset, data);
        Effect::None
    }
    fn read_bar(&mut self, bar: usize, offset: u64, data: &mut [u8]) {
        assert!(offset + data.len() as u64 <= 1 << 20);
        assert!(self.busy || self.bars[bar].is_some());
        data.fill(self.number);
    }
    fn write_bar(&mut self, _bar: usize, _offset: u64, _data: &[u8]) -> Effect {
        Effect::None
    }
    fn bar_moved(&mut self, bar: usize, address: Option<u64>) {
        assert_ne!(self.bars[bar].is_some(), address.is_some(), "told twice");
        self.bars[bar] = address;
    }
    fn reset(&mut self) {
        self.config.reset();
    }
}

fn windows() -> PciWindows {
    PciWindows {
        low: LOW,
        high: HIGH,
        reach: REACH,
    }
}

struct Foreign;

impl BusDevice for Foreign {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0xee);
    }
    fn write(&mut self, _offset: u64, _data: &[u8]) -> Effect {
        Effect::None
    }
}

struct Machine {
    mmio: Bus,
    pio: Bus,
    root: Arc<PciRoot>,
}

impl Machine {
    fn new() -> Self {
        Self::over(PciRoot::new(windows()))
    }

    fn over(root: Arc<PciRoot>) -> Self {
        let (mmio, pio) = (Bus::new(), Bus::new());
        mmio.insert(ECAM, ECAM_SIZE, root.ecam()).unwrap();
        mmio.insert(FOREIGN, 0x1000, Arc::new(Mutex::new(Foreign)))
            .unwrap();
        pio.insert(FIRST_PORT, PORTS, root.ports()).unwrap();
        Self { mmio, pio, root }
    }

    fn read(&self, address: u64, width: usize) -> u64 {
        let mut data = [0; 8];
        self.mmio.read(address, &mut data[..width]);
        u64::from_le_bytes(data)
    }

    fn config(&self, slot: u64, register: u64) -> u32 {
        self.read(ECAM + (slot << 15) + register, 4) as u32
    }

    fn set_config(&self, slot: u64, register: u64, value: u32) -> Effect {
        let effect = self
            .mmio
            .write(ECAM + (slot << 15) + register, &value.to_le_bytes());
        if effect == Effect::Remap {
            self.root.remap(&self.mmio);
        }
        effect
    }

    fn bar64(&self, slot: u64) -> u64 {
        u64::from(self.config(slot, 0x10) & !0xf) | u64::from(self.config(slot, 0x14)) << 32
    }

    fn set_bar64(&self, slot: u64, address: u64) {
        let _effect = self.set_config(slot, 0x10, address as u32);
        let _effect = self.set_config(slot, 0x14, (address >> 32) as u32);
    }
}

const CARD: [(usize, BarKind, u64); 1] = [(0, BarKind::Memory64, 0x8000)];

fn with_cards(slots: &[u8]) -> (Machine, Vec<Arc<Mutex<Card>>>) {
    let machine = Machine::new();
    let cards: Vec<_> = slots.iter().map(|slot| Card::shared(*slot, &CARD)).collect();
    for (slot, card) in slots.iter().zip(&cards) {
        machine.root.add(*slot, card.clone()).unwrap();
        assert_eq!(machine.set_config((*slot).into(), 4, 2), Effect::Remap);
    }
    (machine, cards)
}

#[test]
fn the_host_bridge_is_there_and_empty_slots_functions_and_buses_read_as_ones() {
    let (machine, _cards) = with_cards(&[1]);
    assert_eq!(machine.config(0, 0), 0x0d57_8086);
    assert_eq!(machine.config(0, 8), 0x0600_0000);
    assert_eq!(machine.config(1, 0), 0x0001_1234);
    assert_eq!(machine.config(2, 0), u32::MAX);
    assert_eq!(machine.read(ECAM + (1 << 15) + (1 << 12), 4), 0xffff_ffff);
    assert_eq!(
        machine.read(ECAM + (1 << 15) + 0x100, 4),
        0xffff_ffff,
        "a conventional function has no extended configuration space"
    );
    assert_eq!(
        machine.read(ECAM + (1 << 15) + 0xfff, 8),
        u64::MAX,
        "over the end of a function"
    );
}

#[test]
fn the_ports_reach_the_same_registers_as_ecam() {
    let (machine, _cards) = with_cards(&[1]);
    let port = |port: u64, width: usize| {
        let mut data = [0; 4];
        machine.pio.read(port, &mut data[..width]);
        u32::from_le_bytes(data)
    };
    let _effect = machine.pio.write(0xcf8, &0x8000_0800_u32.to_le_bytes());
    assert_eq!(
        (port(0xcf8, 4), port(0xcfc, 4), port(0xcfe, 2), port(0xcfd, 1)),
        (0x8000_0800, 0x0001_1234, 1, 0x12)
    );
    for address in [
        0x0000_0800_u32,
        0x8001_0800,
        0x8003_0800,
        0x80ff_0800,
        0x8000_0900,
        0x8000_1000,
    ] {
        let _effect = machine.pio.write(0xcf8, &address.to_le_bytes());
        assert_eq!(port(0xcfc, 4), u32::MAX, "{address:#x}");
    }
    assert_eq!(machine.pio.write(0xcf8, &[0; 2]), Effect::None);
    assert_eq!(port(0xcf8, 4), 0x8000_1000, "changed by a short write");
    assert_eq!(port(0xcf9, 1), 0xff);
    let _effect = machine.pio.write(0xcf8, &0x8000_0804_u32.to_le_bytes());
    assert_eq!(machine.pio.write(0xcfc, &[0, 0]), Effect::Remap);
}

#[test]
fn bars_have_addresses_after_power_on_that_depend_on_the_slot_alone() {
    let (alone, _) = with_cards(&[5]);
    let slots = [1, 2, 5, 31, 33, 63, 65, 95];
    let (together, _) = with_cards(&slots);
    assert_eq!(alone.bar64(5), together.bar64(5));
    let mut seen: Vec<_> = slots
        .iter()
        .map(|slot| together.bar64(u64::from(*slot)))
        .collect();
    assert!(
        seen.iter()
            .all(|address| HIGH.contains(address) && address % 0x8000 == 0)
    );
    seen.dedup();
    assert_eq!(seen.len(), 8);
}

#[test]
fn a_device_of_another_bus_is_reached_in_both_ways_and_lies_in_its_bus_window() {
    let (machine, _cards) = with_cards(&[33, 95]);
    assert_eq!(
        (machine.config(33, 0), machine.config(95, 0)),
        (0x0021_1234, 0x005f_1234)
    );
    for absent in [1, 31, 32, 34, 64, 94] {
        assert_eq!(machine.config(absent, 0), u32::MAX, "{absent}");
    }
    for (address, expected) in [
        (0x8001_0800_u32, 0x0021_1234),
        (0x8002_f800, 0x005f_1234),
        (0x8000_0800, u32::MAX),
        (0x8001_0000, u32::MAX),
    ] {
        let _effect = machine.pio.write(0xcf8, &address.to_le_bytes());
        let mut data = [0; 4];
        machine.pio.read(0xcfc, &mut data);
        assert_eq!(u32::from_le_bytes(data), expected, "{address:#x}");
    }
    let windows = windows();
    for (slot, bus) in [(33, 1), (95, 2)] {
        let (low, high) = windows.of_bus(bus);
        assert!(low.is_empty() && high.contains(&machine.bar64(slot)));
        assert_eq!(u64::from(machine.config(slot, 0) >> 16), slot);
        assert_eq!(machine.read(machine.bar64(slot), 1), slot);
    }
}

#[test]
fn all_that_a_guest_may_use_is_one_bus_s_and_its_own_part_among_it() {
    let windows = windows();
    let mut all: Vec<_> = (0..4).flat_map(|bus| windows.reach_of_bus(bus)).collect();
    all.sort_by_key(|range| range.start);
    assert_eq!(all.first().unwrap().start, REACH.start);
    assert_eq!(all.last().unwrap().end, REACH.end);
    assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
    for bus in 0..3 {
        let (_, own) = windows.of_bus(bus);
        let holds = |range: &std::ops::Range<u64>| range.start <= own.start && own.end <= range.end;
        assert_eq!(
            windows
                .reach_of_bus(bus)
                .iter()
                .filter(|range| holds(range))
                .count(),
            1
        );
    }
    let none = PciWindows {
        low: LOW,
        high: 0..0,
        reach: 0..0,
    };
    assert!(none.reach_of_bus(0).is_empty());
}

#[test]
fn the_windows_of_the_buses_lie_in_the_machines_and_do_not_overlap() {
    let windows = windows();
    let (low, first) = windows.of_bus(0);
    let (second, third) = (windows.of_bus(1).1, windows.of_bus(2).1);
    assert_eq!((low, first.start, first.end), (LOW, HIGH.start, second.start));
    assert_eq!((second.end, third.end), (third.start, HIGH.end));
    assert_eq!(windows.of_bus(3), (0..0, 0..0));
}

#[test]
fn a_64_bit_bar_goes_below_4_gib_when_there_is_nothing_above_and_too_large_ones_are_refused() {
    let root = PciRoot::new(PciWindows {
        low: LOW,
        high: 0..0,
        reach: 0..0,
    });
    let card = Card::shared(1, &CARD);
    root.add(1, card.clone()).unwrap();
    lock(&card).config.write(4, &[2]);
    assert!(LOW.contains(&lock(&card).config.windows()[0].unwrap().address));
    let huge = Card::shared(2, &[(0, BarKind::Memory64, 1 << 40)]);
    assert_eq!(
        root.add(2, huge),
        Err(PciError::NoRoom {
            bar: 0,
            size: 1 << 40
        })
    );
    for slot in [0, 1, 32, 64, 96, 255] {
        assert_eq!(root.add(slot, Card::shared(1, &[])), Err(PciError::Slot(slot)));
    }
}

#[test]
fn sizing_a_bar_reads_its_size_and_leaves_no_trace() {
    let (machine, _cards) = with_cards(&[1]);
    let address = machine.bar64(1);
    let _effect = machine.set_config(1, 4, 0);
    machine.set_bar64(1, u64::MAX);
    assert_eq!(
        (machine.config(1, 0x10), machine.config(1, 0x14)),
        (0xffff_8004, 0xffff_ffff)
    );
    assert_eq!(
        (machine.config(1, 0x18), machine.config(1, 0x24)),
        (0, 0),
        "no such BAR"
    );
    machine.set_bar64(1, address);
    let _effect = machine.set_config(1, 4, 2);
    assert_eq!(machine.read(address, 4), 0x0101_0101);
}

#[test]
fn a_bar_moves_where_the_guest_says_and_answers_nowhere_else() {
    let (machine, cards) = with_cards(&[1]);
    let old = machine.bar64(1);
    let places = [REACH.start, HIGH.start, HIGH.end - 0x8000, REACH.end - 0x8000];
    for new in places.into_iter().chain([LOW.start, LOW.end - 0x8000]) {
        machine.set_bar64(1, new);
        assert_eq!(machine.read(new, 1), 1, "{new:#x}");
        assert_eq!(machine.read(new + 0x7fff, 1), 1);
        assert_eq!(machine.read(old, 1), 0xff);
        assert_eq!(lock(&cards[0]).bars[0], Some(new));
    }
    assert_eq!(machine.set_config(1, 4, 0), Effect::Remap);
    assert_eq!(machine.read(LOW.end - 0x8000, 1), 0xff);
    assert_eq!(lock(&cards[0]).bars[0], None);
    assert_eq!(
        machine.set_config(1, 0x10, 0x1234_5678),
        Effect::None,
        "not decoding: nothing to map"
    );
}

#[test]
fn a_bar_is_never_put_over_memory_or_another_device() {
    let (machine, cards) = with_cards(&[1, 2]);
    let other = machine.bar64(2);
    for hostile in [
        0,
        0x10_0000,
        ECAM,
        ECAM + 0x8000,
        0xfee0_0000,
        0x1_0000_0000,
        REACH.start - 0x8000,
        REACH.end,
        !0x7fff,
        LOW.end,
    ] {
        machine.set_bar64(1, hostile);
        assert_eq!(lock(&cards[0]).bars[0], None, "{hostile:#x}");
        assert_eq!(
            machine.config(1, 0),
            0x0001_1234,
            "ECAM is shadowed at {hostile:#x}"
        );
    }
    machine.set_bar64(1, FOREIGN);
    assert_eq!((lock(&cards[0]).bars[0], machine.read(FOREIGN, 1)), (None, 0xee));
    machine.set_bar64(1, other);
    assert_eq!((lock(&cards[0]).bars[0], machine.read(other, 1)), (None, 2));
    // It gets its place as soon as the other one leaves.
    assert_eq!(machine.set_config(2, 4, 0), Effect::Remap);
    assert_eq!(machine.read(other, 1), 1);
}

#[test]
fn a_reset_brings_the_first_addresses_back() {
    let (machine, cards) = with_cards(&[1]);
    let first = machine.bar64(1);
    machine.set_bar64(1, LOW.start);
    let _effect = machine.pio.write(0xcf8, &0x8000_0800_u32.to_le_bytes());
    machine.root.reset(&machine.mmio);
    assert_eq!((machine.bar64(1), lock(&cards[0]).bars[0]), (first, None));
    assert_eq!(machine.config(1, 4) & 0xffff, 0);
}

#[test]
fn bars_that_are_impossible_are_refused() {
    let mut config = ConfigSpace::new(&Header::default());
    for (index, kind, size) in [
        (6, BarKind::Memory32, 4096),
        (5, BarKind::Memory64, 4096),
        (0, BarKind::Memory32, 3000),
        (0, BarKind::Memory32, 8),
        (0, BarKind::Memory32, 1 << 32),
        (usize::MAX, BarKind::Memory32, 4096),
    ] {
        assert_eq!(config.add_bar(index, kind, size), Err(ConfigError::Bar(index)));
    }
    config.add_bar(0, BarKind::Memory64, 4096).unwrap();
    assert!(
        config.add_bar(1, BarKind::Memory32, 4096).is_err(),
        "the upper half"
    );
    config.add_bar(2, BarKind::Memory32, 4096).unwrap();
}

#[test]
fn capabilities_are_linked_and_end_where_the_space_does() {
    let mut config = ConfigSpace::new(&Header::default());
    assert_eq!(config.read_u16(0x34), 0);
    let first = config.add_capability(9, &[1, 2, 3], &[]).unwrap();
    let second = config.add_capability(0x11, &[4, 5], &[0, 0xf0]).unwrap();
    assert_eq!((config.read_u16(0x34), config.read_u16(6)), (0x40, 0x10));
    assert_eq!(
        (config.read_u16(first), config.read_u32(second)),
        (0x4809, 0x0504_0011)
    );
    config.write(0, &[0xff; 256]);
    assert_eq!(
        config.read_u32(second),
        0xf504_0011,
        "only what is writable was written"
    );
    while config.add_capability(9, &[0; 18], &[]).is_ok() {}
    assert_eq!(
        config.add_capability(9, &[0; 18], &[]),
        Err(ConfigError::Capability(18))
    );
}

proptest! {
    #[test]
    fn whatever_is_written_no_bar_leaves_the_windows_and_none_overlap(
        writes in prop::collection::vec(
            (1_u64..4, 0_u64..0x100, prop_oneof![any::<u32>(), (0_u32..0x40).prop_map(|page| 0xc000_0000 + page * 0x4000), 0_u32..32]),
            1..200,
        ),
    ) {
        let (machine, cards) = with_cards(&[1, 2, 3]);
        for (slot, register, value) in writes {
            let effect = machine.set_config(slot, register & !3, value);
            prop_assert!(matches!(effect, Effect::None | Effect::Remap));
            let mut placed: Vec<u64> = cards.iter().filter_map(|card| lock(card).bars[0]).collect();
            placed.sort_unstable();
            for address in &placed {
                let end = address + 0x8000;
                prop_assert!(LOW.contains(address) && end <= LOW.end || REACH.contains(address) && end <= REACH.end);
            }
            prop_assert!(placed.windows(2).all(|pair| pair[1] - pair[0] >= 0x8000));
            prop_assert_eq!(machine.read(FOREIGN, 1), 0xee);
            // Each card answers at its recorded address.
            for (number, card) in (1_u64..).zip(&cards) {
                let address = lock(card).bars[0];
                if let Some(address) = address {
                    prop_assert_eq!(machine.read(address + 0x100, 1), number);
                }
            }
        }
    }
}
