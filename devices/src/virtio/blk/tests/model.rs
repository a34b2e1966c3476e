//! Random requests in random layouts, compared with a model of the disk: answers, content, and kept
//! requests after errors.

use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::super::{
    BlkOptions, OnError,
    harness::{Harness, host},
};
use super::{
    DISCARD, FLUSH, GET_ID, IN, IOERR, OK, OUT, UNSUPP, WRITE_ZEROES, options,
    rings::{Ask, Rings},
};

const CAPACITY: u64 = 64 * 512;
/// FLUSH, DISCARD, WRITE_ZEROES, EVENT_IDX and VERSION_1.
const FEATURES: u64 = 1 << 9 | 1 << 13 | 1 << 14 | 1 << 29 | 1 << 32;

#[derive(Clone, Debug)]
enum Step {
    Request(Ask),
    /// So many of the host's next transfers fail.
    Fail(usize),
    Pause,
    Reset,
}

fn sector() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0_u64..70, 1 => any::<u64>(), 1 => u64::MAX / 512 - 2..=u64::MAX / 512]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![8 => (0_usize..9).prop_map(|n| n * 512), 1 => (0_usize..3).prop_map(|n| n * 4096), 1 => 0_usize..2000]
}

fn range() -> impl Strategy<Value = Vec<u8>> {
    let sectors = prop_oneof![8 => 0_u32..20, 1 => any::<u32>()];
    let flags = prop_oneof![6 => Just(0_u32), 4 => Just(1), 1 => any::<u32>()];
    (sector(), sectors, flags).prop_map(|(sector, sectors, flags)| {
        [
            &sector.to_le_bytes()[..],
            &sectors.to_le_bytes(),
            &flags.to_le_bytes(),
        ]
        .concat()
    })
}

fn ask() -> impl Strategy<Value = Ask> {
    let data = (any::<u8>(), length()).prop_map(|(seed, length)| super::pattern(seed, length));
    let ranges = || {
        (prop::collection::vec(range(), 0..4), 0_usize..20)
            .prop_map(|(ranges, odd)| [ranges.concat(), vec![0; if odd == 0 { 5 } else { 0 }]].concat())
    };
    let none = || Just(Vec::new());
    let body = prop_oneof![
        5 => (Just(IN), none().boxed(), length().boxed()),
        5 => (Just(OUT), data.boxed(), Just(0).boxed()),
        2 => (Just(FLUSH), none().boxed(), Just(0).boxed()),
        1 => (Just(GET_ID), none().boxed(), (0_usize..40).boxed()),
        2 => (Just(DISCARD), ranges().boxed(), Just(0).boxed()),
        3 => (Just(WRITE_ZEROES), ranges().boxed(), Just(0).boxed()),
        1 => (Just(77), none().boxed(), length().boxed()),
    ];
    let cuts = || prop::collection::vec(any::<usize>(), 0..5);
    let short = prop_oneof![30 => Just(0_usize), 1 => 1_usize..=16];
    (body, sector(), (cuts(), cuts()), short).prop_map(|((kind, outgoing, incoming), sector, cuts, short)| {
        Ask {
            kind,
            sector,
            outgoing: if short > 0 { Vec::new() } else { outgoing },
            incoming,
            cuts,
            short,
        }
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        20 => ask().prop_map(Step::Request),
        2 => (0_usize..4).prop_map(Step::Fail),
        2 => Just(Step::Pause),
        1 => Just(Step::Reset),
    ];
    prop::collection::vec(step, 1..60)
}

/// Minimal implementation of the specification.
struct Model {
    content: Vec<u8>,
    block: u64,
    read_only: bool,
    hold: bool,
    failures: usize,
    /// Requests that failed, with the transfers that are left of them, and flushes that wait.
    failed: Vec<(u16, Vec<Transfer>)>,
    flushes: Vec<u16>,
}

#[derive(Clone, Debug)]
enum Transfer {
    Read(usize, usize),
    Write(usize, Vec<u8>),
    Zero(usize, usize),
}

impl Model {
    fn place(&self, sector: u64, length: u64) -> Option<usize> {
        let offset = sector.checked_mul(512)?;
        let fits = offset.checked_add(length)? <= CAPACITY;
        let whole = offset.is_multiple_of(self.block) && length.is_multiple_of(self.block);
        (fits && whole).then(|| usize::try_from(offset).unwrap())
    }

    /// The transfers that a request comes down to, or its answer.
    fn plan(&self, ask: &Ask) -> Result<Vec<Transfer>, u8> {
        if ask.short > 0 {
            return Err(IOERR);
        }
        match ask.kind {
            IN => match self.place(ask.sector, ask.incoming as u64) {
                Some(at) => Ok(vec![Transfer::Read(at, ask.incoming)]),
                None => Err(IOERR),
            },
            OUT => match self.place(ask.sector, ask.outgoing.len() as u64) {
                Some(at) if !self.read_only => Ok(vec![Transfer::Write(at, ask.outgoing.clone())]),
                _ => Err(IOERR),
            },
            GET_ID => Err(OK),
            DISCARD | WRITE_ZEROES if self.read_only => Err(IOERR),
            DISCARD | WRITE_ZEROES => self.ranges(ask),
            _ => Err(UNSUPP),
        }
    }

    fn ranges(&self, ask: &Ask) -> Result<Vec<Transfer>, u8> {
        if ask.outgoing.is_empty() || !ask.outgoing.len().is_multiple_of(16) {
            return Err(IOERR);
        }
        let mut transfers = Vec::new();
        for range in ask.outgoing.chunks(16) {
            let sector = u64::from_le_bytes(range[..8].try_into().unwrap());
            let sectors = u32::from_le_bytes(range[8..12].try_into().unwrap());
            let flags = u32::from_le_bytes(range[12..].try_into().unwrap());
            if flags > 1 || flags == 1 && ask.kind == DISCARD {
                return Err(UNSUPP);
            }
            let length = u64::from(sectors) * 512;
            let at = self.place(sector, length).ok_or(IOERR)?;
            transfers.push(Transfer::Zero(at, usize::try_from(length).unwrap()));
        }
        Ok(transfers)
    }

    /// Executes the transfers until one fails. Returns the data read, or the remaining transfers.
    fn transfer(&mut self, transfers: &[Transfer]) -> Result<Vec<u8>, Vec<Transfer>> {
        let mut read = Vec::new();
        for (index, transfer) in transfers.iter().enumerate() {
            let (at, length) = match transfer {
                Transfer::Read(at, length) | Transfer::Zero(at, length) => (*at, *length),
                Transfer::Write(at, data) => (*at, data.len()),
            };
            if length == 0 {
                continue;
            }
            if self.failures > 0 {
                self.failures -= 1;
                return Err(transfers[index..].to_vec());
            }
            let place = &mut self.content[at..at + length];
            match transfer {
                Transfer::Read(..) => read = place.to_vec(),
                Transfer::Write(_, data) => place.copy_from_slice(data),
                Transfer::Zero(..) => place.fill(0),
            }
        }
        Ok(read)
    }

    fn is_settled(&self) -> bool {
        let reads = |(_, left): &(u16, Vec<Transfer>)| matches!(left[..], [Transfer::Read(..)]);
        self.failed.iter().all(reads)
    }

    /// Returns the answers to a new request: head, status and data.
    fn request(&mut self, head: u16, ask: &Ask) -> Vec<(u16, u8, Vec<u8>)> {
        if ask.short == 0 && ask.kind == FLUSH {
            if self.is_settled() {
                return vec![(head, OK, Vec::new())];
            }
            self.flushes.push(head);
            return Vec::new();
        }
        match self.plan(ask) {
            Err(status) => vec![(head, status, Vec::new())],
            Ok(transfers) => match self.transfer(&transfers) {
                Ok(data) => vec![(head, OK, data)],
                Err(left) if self.hold => {
                    self.failed.push((head, left));
                    Vec::new()
                }
                Err(_) => vec![(head, IOERR, Vec::new())],
            },
        }
    }

    /// Returns the answers when the device continues.
    fn resume(&mut self) -> Vec<(u16, u8, Vec<u8>)> {
        let mut answers = Vec::new();
        for (head, transfers) in std::mem::take(&mut self.failed) {
            match self.transfer(&transfers) {
                Ok(data) => answers.push((head, OK, data)),
                Err(left) => self.failed.push((head, left)),
            }
        }
        if self.is_settled() {
            answers.extend(self.flushes.drain(..).map(|head| (head, OK, Vec::new())));
        }
        answers
    }
}

fn check(
    mut expected: Vec<(u16, u8, Vec<u8>)>,
    mut answers: Vec<(u16, u8, Vec<u8>)>,
) -> Result<(), TestCaseError> {
    expected.sort();
    answers.sort();
    prop_assert_eq!(expected.len(), answers.len(), "{:?} {:?}", expected, answers);
    for ((head, status, data), (head_got, status_got, data_got)) in expected.into_iter().zip(answers) {
        prop_assert_eq!((head, status), (head_got, status_got));
        // Only a successful read defines the content of its buffers.
        if !data.is_empty() {
            prop_assert!(data == data_got, "the data of {head} is wrong");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn one_queue_agrees_with_a_model_disk_whatever_fails(
        steps in steps(),
        large_blocks in prop::bool::weighted(0.2),
        read_only in prop::bool::weighted(0.1),
        hold: bool,
        eager: bool,
        shy: bool,
    ) {
        let block = if large_blocks { 4096 } else { 512 };
        let mut host = host(CAPACITY, read_only, block);
        host.eager = eager;
        host.shy = shy;
        // One after the other: else requests that are done again could overtake each other.
        host.depth = 1;
        let options = BlkOptions {
            logical_block: block,
            on_error: if hold { OnError::Hold } else { OnError::Report },
            ..options()
        };
        let mut rings = Rings::new(Harness::new(host, options, FEATURES));
        let mut model = Model {
            content: vec![0; usize::try_from(CAPACITY).unwrap()],
            block: block.into(),
            read_only,
            hold,
            failures: 0,
            failed: Vec::new(),
            flushes: Vec::new(),
        };
        for step in steps {
            match step {
                Step::Request(ask) => {
                    let Some(head) = rings.offer(&ask) else { continue };
                    rings.harness.kick();
                    rings.harness.finish_all();
                    check(model.request(head, &ask), rings.answers())?;
                }
                Step::Fail(count) => {
                    model.failures = count;
                    rings.harness.host.lock().unwrap().failures = count;
                }
                Step::Pause => {
                    rings.harness.pause_and_resume();
                    rings.harness.finish_all();
                    check(model.resume(), rings.answers())?;
                }
                Step::Reset => {
                    rings.harness.reset();
                    model.failed.clear();
                    model.flushes.clear();
                    let harness = rings.harness;
                    rings = Rings::new(harness);
                }
            }
            let stats = rings.harness.control.stats();
            prop_assert_eq!(stats.held as usize, model.failed.len() + model.flushes.len());
            prop_assert_eq!(stats.in_flight, stats.held);
            prop_assert_eq!(stats.waiting, 0);
        }
        let mut content = vec![0; model.content.len()];
        rings.harness.host.lock().unwrap().file.read_exact_at(&mut content, 0).unwrap();
        prop_assert!(content == model.content, "the content differs");
    }
}
