//! After a crash of the host at any point, the image is consistent and holds all flushed data.
//!
//! Model of a disk: everything written before the last sync is present. For later writes, each
//! sector holds any state that it went through.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proptest::{
    prelude::*,
    test_runner::{RngAlgorithm, TestRng},
};

use super::support::{Event, Guest, Recorder, apply, assert_sound, created, image, report, try_open};
use crate::{
    Image, Operation, Qcow2Image, SECTOR,
    qcow2::{
        Below,
        create::{CreateOptions, Preallocation},
    },
};

/// Operations of the guest; positions and lengths are in sectors.
#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64),
    StableWrite(u64, u64),
    Flush,
    Discard(u64, u64),
    Zero(u64, u64, bool),
    Grow,
}

const SECTORS: u64 = 1024;
const GROWN: u64 = 4096;

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..SECTORS - 128, 1..128_u64);
    prop_oneof![
        8 => range().prop_map(|(at, count)| Step::Write(at, count)),
        1 => range().prop_map(|(at, count)| Step::StableWrite(at, count)),
        2 => Just(Step::Flush),
        2 => range().prop_map(|(at, count)| Step::Discard(at, count)),
        2 => (range(), any::<bool>()).prop_map(|((at, count), unmap)| Step::Zero(at, count, unmap)),
        1 => Just(Step::Grow),
    ]
}

/// A completed step, and the range of the file's events around it.
pub(super) struct Done {
    pub start: usize,
    pub end: usize,
    pub what: What,
}

pub(super) enum What {
    /// Sectors and their new content: the number of a write, 0 for zeroes, `None` for any content.
    Changed(Vec<u64>, Option<u64>),
    Flushed,
}

/// Content of every word of the image below an overlay.
pub(super) const BELOW: u64 = 0xb0b0;

pub(super) fn open(recorder: &Arc<Recorder>, overlay: bool) -> Qcow2Image {
    let mut below = Vec::new();
    if overlay {
        let words = (0..SECTORS * SECTOR / 8).flat_map(|_| BELOW.to_le_bytes());
        below.push(Below::Raw(Recorder::new(words.collect())));
    }
    try_open(recorder, false, below).unwrap()
}

fn play(recorder: &Arc<Recorder>, steps: &[Step], overlay: bool) -> Vec<Done> {
    let disk = open(recorder, overlay);
    recorder.events.lock().unwrap().clear();
    let now = || recorder.events.lock().unwrap().len();
    let mut guest = Guest::new(&disk);
    let mut done = Vec::new();
    for (step, stamp) in steps.iter().zip(1..) {
        let start = now();
        let mut what = Vec::new();
        let mut changed = |at: u64, count: u64, value| {
            what.push(What::Changed((at..at + count).collect(), value));
            (at * SECTOR, count * SECTOR)
        };
        match *step {
            Step::Write(at, count) => {
                let (offset, _) = changed(at, count, Some(stamp));
                guest.write(offset, &pattern(stamp, count)).unwrap();
            }
            Step::StableWrite(at, count) => {
                let (offset, length) = changed(at, count, Some(stamp));
                guest.write(offset, &pattern(stamp, count)).unwrap();
                // The same again, as the data is in the guest's memory already.
                let stable = true;
                guest
                    .request(Operation::Write { offset, stable }, length as usize)
                    .unwrap();
                what.push(What::Flushed);
            }
            Step::Flush => {
                guest.flush().unwrap();
                what.push(What::Flushed);
            }
            Step::Discard(at, count) => {
                let (offset, length) = changed(at, count, None);
                guest.request(Operation::Discard { offset, length }, 0).unwrap();
            }
            Step::Zero(at, count, unmap) => {
                let (offset, length) = changed(at, count, Some(0));
                let zeroes = Operation::WriteZeroes {
                    offset,
                    length,
                    unmap,
                };
                guest.request(zeroes, 0).unwrap();
            }
            Step::Grow => disk.grow(Some(GROWN * SECTOR)).unwrap(),
        }
        let end = now();
        done.extend(what.into_iter().map(|what| Done { start, end, what }));
    }
    done
}

pub(super) fn pattern(stamp: u64, sectors: u64) -> Vec<u8> {
    (0..sectors * SECTOR / 8)
        .flat_map(|_| stamp.to_le_bytes())
        .collect()
}

/// Returns the allowed contents of sectors after a crash before event `at`: numbers of writes, 0 for
/// zeroes, `None` for any content. Untouched sectors are missing.
pub(super) fn allowed(done: &[Done], at: usize, first: u64) -> BTreeMap<u64, Option<BTreeSet<u64>>> {
    let mut sectors: BTreeMap<u64, Option<BTreeSet<u64>>> = BTreeMap::new();
    let mut current: BTreeMap<u64, Option<u64>> = BTreeMap::new();
    for done in done.iter().take_while(|done| done.start < at.max(1)) {
        match &done.what {
            What::Changed(changed, value) => {
                for sector in changed {
                    current.insert(*sector, *value);
                    let allowed = sectors.entry(*sector).or_insert_with(|| Some([first].into()));
                    match (value, allowed.as_mut()) {
                        (Some(value), Some(values)) => {
                            values.insert(*value);
                        }
                        _ => *allowed = None,
                    }
                }
            }
            What::Flushed if done.end <= at => {
                for (sector, value) in &current {
                    sectors.insert(*sector, value.map(|value| [value].into()));
                }
            }
            What::Flushed => {}
        }
    }
    sectors
}

pub(super) fn check(
    recorder: &Arc<Recorder>,
    allowed: &BTreeMap<u64, Option<BTreeSet<u64>>>,
    first: u64,
    when: &str,
) {
    let found = report(recorder);
    assert_eq!(found.corruptions, 0, "{when}: {found:?}");
    let disk = open(recorder, first != 0);
    let found = report(recorder);
    assert_eq!(
        (found.corruptions, found.leaks),
        (0, 0),
        "{when}, repaired: {found:?}"
    );
    let data = Guest::new(&disk).read(0, (SECTORS * SECTOR) as usize).unwrap();
    let untouched = Some([first].into());
    for (sector, content) in (0..).zip(data.chunks(SECTOR as usize)) {
        let Some(values) = allowed.get(&sector).unwrap_or(&untouched) else {
            continue;
        };
        let value = u64::from_le_bytes(content[..8].try_into().unwrap());
        assert!(
            values.contains(&value) && content == pattern(value, 1),
            "{when}: sector {sector} holds {value}, allowed are {values:?}"
        );
    }
    // It can be written to and stays consistent.
    let mut guest = Guest::new(&disk);
    guest.write(0, &[0xaa; 64 << 10]).unwrap();
    guest.flush().unwrap();
    assert_sound(recorder);
}

/// Returns a possible content of the disk after a crash before event `at`.
pub(super) fn crashed(before: &[u8], events: &[Event], at: usize, rng: &mut TestRng) -> Vec<u8> {
    let mut content = before.to_vec();
    let synced = events[..at]
        .iter()
        .rposition(|event| matches!(event, Event::Sync));
    let synced = synced.unwrap_or(0);
    for event in &events[..synced] {
        apply(&mut content, event);
    }
    // Each sector holds one of the states that it had since the last sync.
    let mut history: BTreeMap<u64, Vec<Vec<u8>>> = BTreeMap::new();
    let mut volatile = content.clone();
    for event in &events[synced..at] {
        apply(&mut volatile, event);
        let (offset, length) = match event {
            Event::Write(offset, data) => (*offset, data.len() as u64),
            Event::Punch(offset, length) => (*offset, *length),
            Event::Sync => continue,
        };
        for sector in offset / SECTOR..(offset + length).div_ceil(SECTOR) {
            let start = (sector * SECTOR) as usize;
            if start < volatile.len() {
                let end = volatile.len().min(start + SECTOR as usize);
                history
                    .entry(sector)
                    .or_default()
                    .push(volatile[start..end].to_vec());
            }
        }
    }
    for (sector, states) in history {
        let state = rng.next_u32() as usize % (states.len() + 1);
        if let Some(state) = state.checked_sub(1) {
            apply(
                &mut content,
                &Event::Write(sector * SECTOR, states[state].clone()),
            );
        }
    }
    content
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn whenever_the_host_dies_the_image_is_consistent_and_holds_what_was_flushed(
        steps in prop::collection::vec(step(), 1..60),
        cluster_bits in prop_oneof![Just(9_u32), Just(12), Just(16)],
        overlay: bool,
        seed in any::<[u8; 32]>(),
    ) {
        let recorder = created(CreateOptions {
            size: SECTORS * SECTOR,
            cluster_size: 1 << cluster_bits,
            preallocation: Preallocation::Off,
            backing: overlay.then_some("raw"),
        });
        let before = recorder.content();
        let done = play(&recorder, &steps, overlay);
        let events = recorder.events.lock().unwrap().clone();
        let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        for _ in 0..12 {
            let at = rng.next_u32() as usize % (events.len() + 1);
            let first = if overlay { BELOW } else { 0 };
            let dead = Recorder::new(crashed(&before, &events, at, &mut rng));
            check(&dead, &allowed(&done, at, first), first, &format!("crash at {at}"));
        }
    }
}

/// Clusters kept behind zeroes are not reused as long as the file assigns them to the zeroes.
#[test]
fn a_write_that_begins_before_kept_zeroes_gives_nothing_up_too_early() {
    let steps = [
        Step::Write(80, 16),
        Step::Flush,
        Step::Zero(80, 16, false),
        Step::Flush,
        Step::Write(72, 24),
        Step::Grow,
        Step::Flush,
    ];
    let recorder = image(SECTORS * SECTOR, 1 << 12);
    let before = recorder.content();
    let done = play(&recorder, &steps, false);
    let events = recorder.events.lock().unwrap().clone();
    let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    for at in 0..=events.len() {
        for _ in 0..16 {
            let dead = Recorder::new(crashed(&before, &events, at, &mut rng));
            check(&dead, &allowed(&done, at, 0), 0, &format!("crash at {at}"));
        }
    }
}
