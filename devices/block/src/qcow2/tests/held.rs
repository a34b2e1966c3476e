//! While the host holds one request, which others are carried out.

use std::{
    sync::Arc,
    thread::{self, ScopedJoinHandle},
};

use super::support::{Guest, Recorder, assert_sound, image, open, overlay, report, try_open};
use crate::{Operation, qcow2::Below};

const CLUSTER: u64 = 4096;
/// Bytes of the disk that an L2 table is for.
const TABLE: u64 = CLUSTER / 8 * CLUSTER;
const SIZE: u64 = 4 * TABLE;
/// First byte of data that the host holds back.
const HELD: u8 = 0xee;

/// Returns the image's content if the host dies at this moment and no write is lost.
fn after_death(recorder: &Arc<Recorder>) -> Arc<Recorder> {
    let copy = Recorder::new(recorder.content());
    assert_eq!(report(&copy).corruptions, 0);
    copy
}

#[test]
fn while_the_data_of_new_clusters_is_written_all_else_goes_on() {
    let recorder = image(SIZE, CLUSTER as u32);
    let disk = open(&recorder);
    let (mut held, mut guest) = (Guest::new(&disk), Guest::new(&disk));
    guest.write(0, &[1; CLUSTER as usize]).unwrap();
    guest.write(2 * TABLE, &[2; 3 * CLUSTER as usize]).unwrap();
    guest.flush().unwrap();
    recorder.hold(HELD);
    thread::scope(|scope| {
        let writing = scope.spawn(|| held.write(5 * CLUSTER, &[HELD; 2 * CLUSTER as usize]));
        recorder.wait_for_held();

        // Reads return the old content without waiting.
        assert_eq!(
            guest.read(5 * CLUSTER, CLUSTER as usize).unwrap(),
            [0; CLUSTER as usize]
        );
        assert_eq!(guest.read(0, 512).unwrap(), [1; 512]);
        // In place, beside it in the same table.
        guest.write(512, &[3; 512]).unwrap();
        // New clusters in other tables, one of which is new too.
        guest
            .write(2 * TABLE + 8 * CLUSTER, &[4; CLUSTER as usize])
            .unwrap();
        guest.write(3 * TABLE + 1024, &[5; 512]).unwrap();
        let (offset, length) = (2 * TABLE, 3 * CLUSTER);
        guest.request(Operation::Discard { offset, length }, 0).unwrap();
        let unmap = false;
        let zeroes = Operation::WriteZeroes {
            offset: 2 * TABLE + 8 * CLUSTER,
            length: CLUSTER,
            unmap,
        };
        guest.request(zeroes, 0).unwrap();
        guest.flush().unwrap();
        guest.write(2 * TABLE, &[6; CLUSTER as usize]).unwrap();
        guest.flush().unwrap();

        let dead = after_death(&recorder);
        let survivor = open(&dead);
        let mut reader = Guest::new(&survivor);
        assert_eq!(
            reader.read(5 * CLUSTER, CLUSTER as usize).unwrap(),
            [0; CLUSTER as usize]
        );
        assert_eq!(reader.read(512, 512).unwrap(), [3; 512]);
        assert_eq!(reader.read(2 * TABLE, 512).unwrap(), [6; 512]);

        assert!(!writing.is_finished());
        recorder.let_go();
        writing.join().unwrap().unwrap();
    });
    assert_eq!(
        guest.read(5 * CLUSTER, 2 * CLUSTER as usize).unwrap(),
        [HELD; 2 * CLUSTER as usize]
    );
    assert_eq!(guest.read(3 * TABLE + 1024, 512).unwrap(), [5; 512]);
    assert_eq!(guest.read(2 * TABLE + 8 * CLUSTER, 512).unwrap(), [0; 512]);
    guest.flush().unwrap();
    let dead = after_death(&recorder);
    let survivor = open(&dead);
    let mut reader = Guest::new(&survivor);
    assert_eq!(
        reader.read(5 * CLUSTER, 2 * CLUSTER as usize).unwrap(),
        [HELD; 2 * CLUSTER as usize]
    );
    drop((held, guest, disk));
    assert_sound(&recorder);
}

#[test]
fn writes_to_parts_of_one_new_cluster_have_their_turns_and_none_is_lost() {
    let below = Recorder::new(vec![9; SIZE as usize]);
    let recorder = overlay(SIZE, CLUSTER as u32, "raw");
    let disk = try_open(&recorder, false, vec![Below::Raw(below)]).unwrap();
    let (mut first, mut second, mut guest) = (Guest::new(&disk), Guest::new(&disk), Guest::new(&disk));
    recorder.hold(HELD);
    thread::scope(|scope| {
        let one = scope.spawn(|| first.write(CLUSTER, &[HELD; 512]));
        recorder.wait_for_held();
        let two = scope.spawn(|| second.write(CLUSTER + 1024, &[7; 512]));
        // Both writes are under way; reads return the image below.
        assert_eq!(
            guest.read(CLUSTER, CLUSTER as usize).unwrap(),
            [9; CLUSTER as usize]
        );
        guest.flush().unwrap();
        recorder.let_go();
        one.join().unwrap().unwrap();
        two.join().unwrap().unwrap();
    });
    let data = guest.read(CLUSTER, CLUSTER as usize).unwrap();
    assert_eq!(data[..512], [HELD; 512]);
    assert_eq!(data[512..1024], [9; 512]);
    assert_eq!(data[1024..1536], [7; 512]);
    assert_eq!(data[1536..], [9; CLUSTER as usize - 1536]);
    drop((first, second, guest, disk));
    assert_sound(&recorder);
}

#[test]
fn a_discard_waits_for_those_who_use_its_range_and_for_nobody_else() {
    let recorder = image(SIZE, CLUSTER as u32);
    let disk = open(&recorder);
    let (mut held, mut clearing, mut guest) = (Guest::new(&disk), Guest::new(&disk), Guest::new(&disk));
    guest.write(0, &[HELD; 4 * CLUSTER as usize]).unwrap();
    guest.write(TABLE, &[1; 4 * CLUSTER as usize]).unwrap();
    guest.flush().unwrap();
    recorder.hold(HELD);
    thread::scope(|scope| {
        let reading: ScopedJoinHandle<'_, _> = scope.spawn(|| held.read(CLUSTER, 512));
        recorder.wait_for_held();
        let discarding = scope.spawn(|| {
            let (offset, length) = (0, 2 * CLUSTER);
            clearing.request(Operation::Discard { offset, length }, 0)
        });
        // Requests elsewhere continue while the discard waits and before: in place, in new
        // clusters, discards, flushes.
        for round in 0..50_u8 {
            let far = TABLE + u64::from(round) * CLUSTER;
            guest.write(2 * CLUSTER + 512, &[round; 512]).unwrap();
            guest.write(far, &[round; CLUSTER as usize]).unwrap();
            assert_eq!(guest.read(far, 512).unwrap(), [round; 512]);
            let (offset, length) = (far, CLUSTER);
            guest.request(Operation::Discard { offset, length }, 0).unwrap();
            guest.flush().unwrap();
        }
        assert!(!discarding.is_finished(), "it took a cluster that is being read");
        recorder.let_go();
        assert_eq!(reading.join().unwrap().unwrap(), [HELD; 512]);
        discarding.join().unwrap().unwrap();
    });
    assert_eq!(
        guest.read(0, 2 * CLUSTER as usize).unwrap(),
        [0; 2 * CLUSTER as usize]
    );
    assert_eq!(guest.read(3 * CLUSTER, 512).unwrap(), [HELD; 512]);
    drop((held, clearing, guest, disk));
    assert_sound(&recorder);
}

#[test]
fn a_write_to_new_clusters_that_fails_late_leaves_what_was_there() {
    let below = Recorder::new(vec![9; SIZE as usize]);
    let recorder = overlay(SIZE, CLUSTER as u32, "raw");
    let disk = try_open(&recorder, false, vec![Below::Raw(below)]).unwrap();
    let (mut held, mut guest) = (Guest::new(&disk), Guest::new(&disk));
    guest.write(0, &[1; CLUSTER as usize]).unwrap();
    recorder.hold(HELD);
    thread::scope(|scope| {
        let writing = scope.spawn(|| held.write(CLUSTER, &[HELD; 2 * CLUSTER as usize]));
        recorder.wait_for_held();
        // A commit comes between the allocation and the failure.
        guest.write(TABLE, &[2; CLUSTER as usize]).unwrap();
        guest.flush().unwrap();
        *recorder.limit.lock().unwrap() = Some(0);
        recorder.let_go();
        assert!(writing.join().unwrap().is_err());
    });
    *recorder.limit.lock().unwrap() = None;
    assert_eq!(guest.read(CLUSTER, 512).unwrap(), [9; 512]);
    // The clusters allocated for the failed write are reused.
    guest.write(CLUSTER, &[3; 2 * CLUSTER as usize]).unwrap();
    guest.flush().unwrap();
    assert_eq!(guest.read(2 * CLUSTER, 512).unwrap(), [3; 512]);
    assert_eq!(guest.read(TABLE, 512).unwrap(), [2; 512]);
    drop((held, guest, disk));
    assert_sound(&recorder);
}
