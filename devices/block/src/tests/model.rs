//! Engines against a disk in memory.

use std::{collections::HashMap, ops::Range, sync::Arc, time::Instant};

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::{GuestMemory, ram::Segment, sys::Iovecs};

use super::{PATIENCE, Setup, late};
use crate::{Completion, Engine, Operation, Request, SECTOR};

/// The disk's size.
pub(crate) const SECTORS: u64 = 2048;
/// Largest request.
const MAX_SECTORS: u64 = 256;
/// Guest memory of a request: the largest one, with gaps.
const ROOM: u64 = 512 << 10;
const SLOTS: u64 = 32;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Read(Place),
    Write { place: Place, stable: bool },
    Flush,
    Discard(u64, u64),
    Zero { at: u64, count: u64, unmap: bool },
    Commit,
    Settle,
}

/// Sectors, and how guest memory for them is cut.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    at: u64,
    count: u64,
    /// Where in guest memory it begins, and how long the pieces are, in turn.
    shift: u64,
    cuts: Vec<u32>,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    let count = prop_oneof![4 => 1..17_u64, 2 => Just(8), 1 => 1..=MAX_SECTORS];
    let at = prop_oneof![2 => 0..SECTORS, 1 => (0..SECTORS / 8).prop_map(|block| block * 8)];
    (at, count).prop_map(|(at, count)| (at, count.min(SECTORS - at)))
}

fn place(aligned: bool) -> impl Strategy<Value = Place> {
    let cuts = if aligned {
        prop::collection::vec((1_u32..20).prop_map(|n| n * 512), 1..5).boxed()
    } else {
        prop::collection::vec(prop_oneof![1_u32..3000, Just(4096), Just(512)], 1..5).boxed()
    };
    let shift = if aligned {
        Just(0).boxed()
    } else {
        (0..5000_u64).boxed()
    };
    (range(), shift, cuts).prop_map(|((at, count), shift, cuts)| Place {
        at,
        count,
        shift,
        cuts,
    })
}

/// How often a property of engines is checked.
pub(crate) fn cases() -> ProptestConfig {
    ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Some steps; `aligned` buffers could go to a disk as they are.
pub(crate) fn steps(aligned: bool) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (place(aligned), any::<bool>()).prop_map(|(place, stable)| Step::Write { place, stable }),
        8 => place(aligned).prop_map(Step::Read),
        1 => Just(Step::Flush),
        1 => range().prop_map(|(at, count)| Step::Discard(at, count)),
        2 => (range(), any::<bool>()).prop_map(|((at, count), unmap)| Step::Zero { at, count, unmap }),
        4 => Just(Step::Commit),
        1 => Just(Step::Settle),
    ];
    prop::collection::vec(step, 1..120)
}

struct UnderWay {
    /// Sectors that it changes or reads.
    sectors: Range<u64>,
    changes: bool,
    /// Expected bytes of a read, where known.
    expected: Vec<Option<u8>>,
    pieces: Vec<Segment>,
}

struct Model {
    engine: Box<dyn Engine>,
    memory: Arc<GuestMemory>,
    /// By byte; `None` when anything may be there.
    disk: Vec<Option<u8>>,
    under_way: HashMap<u32, UnderWay>,
    free: Vec<u32>,
    seed: u8,
}

/// Carries the steps out on a new engine and checks all that can be seen.
pub(super) fn run(setup: &Setup, steps: Vec<Step>) {
    run_on(setup.engine(), steps, || setup.content());
}

/// The same with any engine of an image that holds zeroes; `content` returns the final content.
pub(crate) fn run_on(engine: Box<dyn Engine>, steps: Vec<Step>, content: impl FnOnce() -> Vec<u8>) {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), (ROOM * SLOTS) as usize)]).unwrap();
    let mut model = Model {
        engine,
        memory: Arc::new(memory),
        disk: vec![Some(0); (SECTORS * SECTOR) as usize],
        under_way: HashMap::new(),
        free: (0..SLOTS as u32).collect(),
        seed: 1,
    };
    for step in steps {
        model.step(step);
    }
    model.submit(Operation::Flush, 0..0, false, Vec::new());
    model.settle();
    let content = content();
    assert_eq!(content.len(), model.disk.len(), "the image's size changed");
    for (at, (found, expected)) in content.iter().zip(&model.disk).enumerate() {
        assert!(
            expected.is_none_or(|expected| expected == *found),
            "byte {at} of the file is {found}, not {expected:?}"
        );
    }
}

impl Model {
    fn step(&mut self, step: Step) {
        match step {
            Step::Read(place) => {
                let sectors = place.at..place.at + place.count;
                self.wait_for_others(&sectors, false);
                let pieces = self.pieces(&place);
                self.submit(
                    Operation::Read {
                        offset: place.at * SECTOR,
                    },
                    sectors,
                    false,
                    pieces,
                );
            }
            Step::Write { place, stable } => {
                let sectors = place.at..place.at + place.count;
                self.wait_for_others(&sectors, true);
                let pieces = self.pieces(&place);
                self.seed = self.seed.wrapping_mul(5).wrapping_add(1);
                let mut byte = self.seed;
                let mut next = (place.at * SECTOR) as usize;
                for piece in &pieces {
                    let data: Vec<u8> = (0..piece.length)
                        .map(|_| {
                            byte = byte.wrapping_mul(13).wrapping_add(7);
                            byte
                        })
                        .collect();
                    self.memory.write_slice(&data, piece.address).unwrap();
                    for byte in data {
                        self.disk[next] = Some(byte);
                        next += 1;
                    }
                }
                let offset = place.at * SECTOR;
                self.submit(Operation::Write { offset, stable }, sectors, true, pieces);
            }
            Step::Flush => self.submit(Operation::Flush, 0..0, false, Vec::new()),
            Step::Discard(at, count) => {
                let sectors = at..at + count;
                self.wait_for_others(&sectors, true);
                self.disk[bytes(&sectors)].fill(None);
                let (offset, length) = (at * SECTOR, count * SECTOR);
                self.submit(Operation::Discard { offset, length }, sectors, true, Vec::new());
            }
            Step::Zero { at, count, unmap } => {
                let sectors = at..at + count;
                self.wait_for_others(&sectors, true);
                self.disk[bytes(&sectors)].fill(Some(0));
                let operation = Operation::WriteZeroes {
                    offset: at * SECTOR,
                    length: count * SECTOR,
                    unmap,
                };
                self.submit(operation, sectors, true, Vec::new());
            }
            Step::Commit => {
                self.engine.commit().unwrap();
                self.reap();
            }
            Step::Settle => self.settle(),
        }
    }

    fn pieces(&mut self, place: &Place) -> Vec<Segment> {
        while self.free.is_empty() {
            self.wait();
        }
        let slot = u64::from(*self.free.last().unwrap());
        let (mut address, mut left) = (slot * ROOM + place.shift, place.count * SECTOR);
        let mut pieces = Vec::new();
        // As many as a driver may use; the rest in one.
        for cut in place.cuts.iter().cycle().take(200) {
            let length = left.min(u64::from(*cut));
            if length == 0 {
                break;
            }
            pieces.push(Segment {
                address: GuestAddress(address),
                length: length as u32,
            });
            // Not adjacent, but as aligned as before.
            address += length + 512;
            left -= length;
        }
        if left > 0 {
            pieces.push(Segment {
                address: GuestAddress(address),
                length: left as u32,
            });
        }
        pieces
    }

    fn submit(&mut self, operation: Operation, sectors: Range<u64>, changes: bool, pieces: Vec<Segment>) {
        while self.free.is_empty() {
            self.wait();
        }
        let token = self.free.pop().unwrap();
        let mut buffers = Iovecs::new(Arc::clone(&self.memory));
        let length = pieces.iter().map(|piece| piece.length).sum();
        buffers.append(&pieces, 0, length).unwrap();
        let expected = match operation {
            Operation::Read { .. } => self.disk[bytes(&sectors)].to_vec(),
            _ => Vec::new(),
        };
        let under_way = UnderWay {
            sectors,
            changes,
            expected,
            pieces,
        };
        self.under_way.insert(token, under_way);
        self.engine.submit(Request {
            token,
            operation,
            buffers: Box::new(buffers),
        });
        assert_eq!(self.engine.in_flight(), self.under_way.len());
    }

    /// Requests that touch the same sectors, of which one changes them, are not under way together.
    fn wait_for_others(&mut self, sectors: &Range<u64>, changes: bool) {
        while self.under_way.values().any(|other| {
            (changes || other.changes)
                && other.sectors.start < sectors.end
                && sectors.start < other.sectors.end
        }) {
            self.wait();
        }
    }

    fn settle(&mut self) {
        while !self.under_way.is_empty() {
            self.wait();
        }
        assert_eq!(self.engine.in_flight(), 0);
        self.engine.wait(Instant::now()).unwrap();
    }

    fn wait(&mut self) {
        self.engine.commit().unwrap();
        let before = self.under_way.len();
        let deadline = late();
        self.engine.wait(deadline).unwrap();
        self.reap();
        assert!(self.under_way.len() < before, "nothing completed in {PATIENCE:?}");
    }

    fn reap(&mut self) {
        while let Some(completion) = self.engine.at_hand().or_else(|| self.engine.completed()) {
            self.check(completion);
        }
        assert_eq!(self.engine.in_flight(), self.under_way.len());
    }

    fn check(&mut self, completion: Completion) {
        let Completion { token, result, .. } = completion;
        let UnderWay { expected, pieces, .. } = self.under_way.remove(&token).expect("completed twice");
        self.free.push(token);
        result.unwrap();
        let mut expected = expected.into_iter();
        if expected.len() == 0 {
            return;
        }
        for piece in pieces {
            let mut data = vec![0; piece.length as usize];
            self.memory.read_slice(&mut data, piece.address).unwrap();
            for byte in data {
                let expected = expected.next().unwrap();
                assert!(
                    expected.is_none_or(|expected| expected == byte),
                    "read {byte}, not {expected:?}"
                );
            }
        }
    }
}

fn bytes(sectors: &Range<u64>) -> Range<usize> {
    (sectors.start * SECTOR) as usize..(sectors.end * SECTOR) as usize
}
