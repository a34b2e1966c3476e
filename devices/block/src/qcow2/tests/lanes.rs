//! Threads of several guests at once, each with its own parts of the disk, some of them in shared
//! clusters. Each thread reads its own writes. After a crash of the host at any point, the image is
//! consistent and holds the flushed data of each thread.

use std::{collections::BTreeMap, thread};

use proptest::{
    prelude::*,
    test_runner::{RngAlgorithm, TestRng},
};

use super::{
    crash::{BELOW, Done, What, allowed, check, crashed, open, pattern},
    support::{Guest, Recorder, created},
};
use crate::{
    Operation, SECTOR,
    qcow2::create::{CreateOptions, Preallocation},
};

const SECTORS: u64 = 1024;
const LANES: u64 = 3;

/// Operations of a lane. Numbers are taken modulo the lane's number of items.
#[derive(Debug, Clone)]
enum Step {
    /// A sector of a cluster that all write to.
    WriteShared(u64),
    /// A part of a cluster of its own: sectors before it, and behind it.
    Write(u64, u64, u64),
    Discard(u64),
    Zero(u64, bool),
    Flush,
    Read(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let number = || 0..SECTORS;
    prop_oneof![
        6 => number().prop_map(Step::WriteShared),
        4 => (number(), number(), number()).prop_map(|(cluster, skip, leave)| Step::Write(cluster, skip, leave)),
        2 => number().prop_map(Step::Discard),
        2 => (number(), any::<bool>()).prop_map(|(cluster, unmap)| Step::Zero(cluster, unmap)),
        2 => Just(Step::Flush),
        4 => number().prop_map(Step::Read),
    ]
}

/// Sectors of a cluster; every second cluster is shared by all lanes.
struct Lane {
    number: u64,
    /// In sectors.
    cluster: u64,
}

impl Lane {
    fn own_clusters(&self) -> Vec<u64> {
        let mine = |cluster: &u64| cluster % 2 == 1 && cluster / 2 % LANES == self.number;
        (0..SECTORS / self.cluster).filter(mine).collect()
    }

    fn own_shared_sectors(&self) -> Vec<u64> {
        let mine = |sector: &u64| (sector / self.cluster).is_multiple_of(2) && sector % LANES == self.number;
        (0..SECTORS).filter(mine).collect()
    }

    fn play(&self, recorder: &Recorder, guest: &mut Guest, steps: &[Step], first: u64) -> Vec<Done> {
        let (own, shared) = (self.own_clusters(), self.own_shared_sectors());
        let pick = |list: &[u64], number: u64| list[number as usize % list.len()];
        let now = || recorder.events.lock().unwrap().len();
        let mut model: BTreeMap<u64, Option<u64>> = BTreeMap::new();
        let mut done = Vec::new();
        for (step, number) in steps.iter().zip(1..) {
            let stamp = number * LANES + self.number + 1;
            let start = now();
            let what = match *step {
                Step::WriteShared(sector) => {
                    let sector = pick(&shared, sector);
                    guest.write(sector * SECTOR, &pattern(stamp, 1)).unwrap();
                    What::Changed(vec![sector], Some(stamp))
                }
                Step::Write(cluster, skip, leave) => {
                    let skip = skip % self.cluster;
                    let count = self.cluster - skip - leave % (self.cluster - skip);
                    let sector = pick(&own, cluster) * self.cluster + skip;
                    guest.write(sector * SECTOR, &pattern(stamp, count)).unwrap();
                    What::Changed((sector..sector + count).collect(), Some(stamp))
                }
                Step::Discard(cluster) => {
                    let sector = pick(&own, cluster) * self.cluster;
                    let (offset, length) = (sector * SECTOR, self.cluster * SECTOR);
                    guest.request(Operation::Discard { offset, length }, 0).unwrap();
                    What::Changed((sector..sector + self.cluster).collect(), None)
                }
                Step::Zero(cluster, unmap) => {
                    let sector = pick(&own, cluster) * self.cluster;
                    let zeroes = Operation::WriteZeroes {
                        offset: sector * SECTOR,
                        length: self.cluster * SECTOR,
                        unmap,
                    };
                    guest.request(zeroes, 0).unwrap();
                    What::Changed((sector..sector + self.cluster).collect(), Some(0))
                }
                Step::Flush => {
                    guest.flush().unwrap();
                    What::Flushed
                }
                Step::Read(sector) => {
                    let sector = if sector.is_multiple_of(2) {
                        pick(&shared, sector)
                    } else {
                        pick(&own, sector) * self.cluster
                    };
                    let data = guest.read(sector * SECTOR, SECTOR as usize).unwrap();
                    if let Some(expected) = model.get(&sector).copied().unwrap_or(Some(first)) {
                        assert_eq!(data, pattern(expected, 1), "sector {sector}");
                    }
                    continue;
                }
            };
            if let What::Changed(sectors, value) = &what {
                model.extend(sectors.iter().map(|sector| (*sector, *value)));
            }
            done.push(Done {
                start,
                end: now(),
                what,
            });
        }
        done
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn lanes_that_run_at_once_lose_nothing_and_survive_a_crash_at_any_time(
        steps in prop::collection::vec(prop::collection::vec(step(), 1..80), LANES as usize),
        cluster_bits in prop_oneof![Just(9_u32), Just(12), Just(14)],
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
        let first = if overlay { BELOW } else { 0 };
        let disk = open(&recorder, overlay);
        recorder.events.lock().unwrap().clear();
        let done: Vec<Vec<Done>> = thread::scope(|scope| {
            let lanes: Vec<_> = (0..).zip(&steps).map(|(number, steps)| {
                let mut guest = Guest::new(&disk);
                let lane = Lane { number, cluster: (1 << cluster_bits) / SECTOR };
                let recorder = &recorder;
                scope.spawn(move || lane.play(recorder, &mut guest, steps, first))
            }).collect();
            lanes.into_iter().map(|lane| lane.join().unwrap()).collect()
        });
        let events = recorder.events.lock().unwrap().clone();
        let of_all = |at| done.iter().flat_map(|done| allowed(done, at, first)).collect();
        let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        for _ in 0..12 {
            let at = rng.next_u32() as usize % (events.len() + 1);
            let dead = Recorder::new(crashed(&before, &events, at, &mut rng));
            check(&dead, &of_all(at), first, &format!("crash at {at} of {}", events.len()));
        }
        // The end of the image commits all.
        drop(disk);
        let last: BTreeMap<_, _> = done.iter().flat_map(|done| {
            let mut last = BTreeMap::new();
            for done in done {
                if let What::Changed(sectors, value) = &done.what {
                    last.extend(sectors.iter().map(|sector| (*sector, value.map(|value| [value].into()))));
                }
            }
            last
        }).collect();
        check(&recorder, &last, first, "at the end");
    }
}
