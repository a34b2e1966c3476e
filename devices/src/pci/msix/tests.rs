#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::sync::{
    Mutex,
    atomic::{AtomicU64, AtomicUsize},
};

use super::*;
use crate::{
    state::{Change, refuses},
    virtio::testing::MockMsi,
};

const ENABLED: u16 = 1 << 15;
const MASK_ALL: u16 = 1 << 14;

/// A table whose vector n sends the data n, all unmasked, MSI-X enabled.
fn open_table(msi: &MockMsi, count: usize) -> Msix {
    let mut msix = Msix::new(msi, count).unwrap();
    msix.set_bus_master(true);
    for vector in 0..count as u64 {
        msix.write_table(vector * 16, &0xfee0_0000_u64.to_le_bytes());
        msix.write_table(vector * 16 + 8, &vector.to_le_bytes());
    }
    msix.write_message_control(ENABLED);
    msix
}

fn word(msix: &Msix, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    msix.read_table(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

fn pending(msix: &Msix) -> u64 {
    let mut bytes = [0; 8];
    msix.read_pba(0, &mut bytes);
    u64::from_le_bytes(bytes)
}

#[test]
fn an_open_vector_sends_its_message_and_one_that_does_not_exist_says_so() {
    let msi = MockMsi::default();
    let msix = open_table(&msi, 3);
    assert!(msix.vectors().raise(2));
    assert_eq!((msi.count(0), msi.count(1), msi.count(2)), (0, 0, 1));
    assert!(!msix.vectors().raise(3));
    assert!(!msix.vectors().raise(0xffff));
}

#[test]
fn what_is_raised_while_the_function_is_no_bus_master_is_pending_and_sent_once_when_it_is_one() {
    let msi = MockMsi::default();
    let mut msix = open_table(&msi, 2);
    msix.set_bus_master(false);
    for _ in 0..3 {
        assert!(msix.vectors().raise(0));
    }
    // Neither unmasking nor enabling sends it.
    msix.write_table(12, &1_u32.to_le_bytes());
    msix.write_table(12, &0_u32.to_le_bytes());
    assert_eq!((msi.count(0), pending(&msix)), (0, 1));
    msix.set_bus_master(true);
    assert_eq!((msi.count(0), pending(&msix)), (1, 0));
    msix.reset();
    msix.write_table(12, &0_u32.to_le_bytes());
    msix.write_message_control(ENABLED);
    assert!(msix.vectors().raise(0));
    assert_eq!((msi.count(0), pending(&msix)), (1, 1), "a reset ends it");
}

#[test]
fn what_is_raised_while_masked_is_pending_and_sent_once_when_unmasked() {
    let msi = MockMsi::default();
    let mut msix = open_table(&msi, 2);
    msix.write_table(12, &1_u32.to_le_bytes());
    for _ in 0..3 {
        assert!(msix.vectors().raise(0));
    }
    assert_eq!((msi.count(0), pending(&msix)), (0, 1));
    msix.write_table(12, &0_u32.to_le_bytes());
    assert_eq!((msi.count(0), pending(&msix)), (1, 0));
}

#[test]
fn the_function_mask_holds_all_vectors_and_keeps_their_own_masks() {
    let msi = MockMsi::default();
    let mut msix = open_table(&msi, 3);
    msix.write_table(16 + 12, &1_u32.to_le_bytes());
    msix.write_message_control(ENABLED | MASK_ALL);
    for vector in 0..3 {
        msix.vectors().raise(vector);
    }
    assert_eq!(pending(&msix), 0b111);
    msix.write_message_control(ENABLED);
    assert_eq!(
        (msi.count(0), msi.count(1), msi.count(2), pending(&msix)),
        (1, 0, 1, 0b010)
    );
}

#[test]
fn nothing_is_sent_or_kept_while_msix_is_disabled() {
    let msi = MockMsi::default();
    let mut msix = open_table(&msi, 1);
    msix.write_message_control(0);
    assert!(!msix.vectors().raise(0));
    msix.write_message_control(ENABLED);
    assert_eq!((msi.count(0), pending(&msix)), (0, 0));
}

#[test]
fn a_message_changed_while_open_is_used_from_then_on() {
    let msi = MockMsi::default();
    let mut msix = open_table(&msi, 1);
    msix.write_table(8, &77_u32.to_le_bytes());
    msix.vectors().raise(0);
    assert_eq!((msi.count(0), msi.count(77)), (0, 1));
}

#[test]
fn the_table_takes_aligned_words_only_and_keeps_reserved_bits_clear() {
    let msi = MockMsi::default();
    let mut msix = Msix::new(&msi, 2).unwrap();
    msix.write_table(0, &u64::MAX.to_le_bytes());
    msix.write_table(8, &u64::MAX.to_le_bytes());
    assert_eq!(
        [0, 4, 8, 12].map(|offset| word(&msix, offset)),
        [!3, u32::MAX, u32::MAX, 1]
    );
    for (offset, length) in [(0, 1), (0, 2), (2, 4), (4, 8), (1, 3), (32, 4), (1 << 40, 8)] {
        msix.write_table(offset, &[0; 8][..length]);
        let mut data = [0; 8];
        msix.read_table(offset, &mut data[..length]);
        assert!(
            data[..length].iter().all(|byte| *byte == 0xff),
            "{offset} {length}"
        );
    }
    assert_eq!(word(&msix, 0), !3);
    assert_eq!(word(&msix, 16 + 12), 1, "masked after power-on");
}

#[test]
fn a_reset_masks_all_and_forgets() {
    let msi = MockMsi::default();
    let mut msix = open_table(&msi, 2);
    msix.write_message_control(ENABLED | MASK_ALL);
    msix.vectors().raise(0);
    msix.reset();
    assert_eq!(
        (
            msix.message_control(),
            pending(&msix),
            word(&msix, 0),
            word(&msix, 12)
        ),
        (1, 0, 0, 1)
    );
}

/// Drops triggers while disconnected, as KVM does without an irqfd.
#[derive(Default)]
struct Lossy {
    connected: Mutex<Option<MsiMessage>>,
    sent: AtomicUsize,
}

impl MsiVector for Lossy {
    fn connect(&self, message: Option<MsiMessage>) -> io::Result<()> {
        *self.connected.lock().unwrap() = message;
        Ok(())
    }

    fn trigger(&self) {
        // Room for the other side to disconnect it first.
        std::thread::yield_now();
        if self.connected.lock().unwrap().is_some() {
            self.sent.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn event(&self) -> Option<&EventFd> {
        None
    }
}

struct Lone(Arc<Lossy>);

impl MsiController for Lone {
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>> {
        let vector: Arc<Lossy> = Arc::clone(&self.0);
        Ok(vector)
    }
}

#[test]
fn no_interrupt_is_lost_to_masking_at_the_same_time() {
    const ROUNDS: u64 = 20_000;
    let vector = Arc::new(Lossy::default());
    let mut msix = Msix::new(&Lone(Arc::clone(&vector)), 1).unwrap();
    msix.set_bus_master(true);
    msix.write_table(12, &0_u32.to_le_bytes());
    msix.write_message_control(ENABLED);
    let vectors = Arc::clone(msix.vectors());
    let raised = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let raiser = scope.spawn(|| {
            // The driver's answer to each interrupt is what lets the next one be raised: a lost one hangs here.
            for round in 1..=ROUNDS {
                let before = vector.sent.load(Ordering::SeqCst);
                assert!(vectors.raise(0));
                raised.store(round, Ordering::SeqCst);
                let start = std::time::Instant::now();
                while vector.sent.load(Ordering::SeqCst) == before {
                    assert!(
                        start.elapsed() < crate::virtio::testing::PATIENCE,
                        "lost in round {round}"
                    );
                    std::hint::spin_loop();
                }
            }
        });
        while !raiser.is_finished() {
            msix.write_table(12, &1_u32.to_le_bytes());
            std::thread::yield_now();
            let before = vector.sent.load(Ordering::SeqCst);
            msix.write_table(12, &0_u32.to_le_bytes());
            // Stays unmasked until a message was sent: no other event would send a pending one.
            while vector.sent.load(Ordering::SeqCst) == before && !raiser.is_finished() {
                std::hint::spin_loop();
            }
        }
    });
    assert_eq!(raised.load(Ordering::SeqCst), ROUNDS);
}

#[test]
fn a_restored_table_sends_what_was_pending_once_and_only_when_the_function_is_a_bus_master() {
    let msi = MockMsi::default();
    let mut saved = open_table(&msi, 3);
    // Masked, with another message than the others.
    saved.write_table(16 + 8, &0x77_u32.to_le_bytes());
    saved.write_table(16 + 12, &1_u32.to_le_bytes());
    assert!(saved.vectors().raise(1));
    saved.set_bus_master(false);
    assert!(saved.vectors().raise(2));
    let state = saved.save();
    drop(saved);

    let msi = MockMsi::default();
    let mut msix = Msix::new(&msi, 3).unwrap();
    msix.restore(&state, ENABLED).unwrap();
    assert_eq!(msix.save(), state);
    assert_eq!((pending(&msix), word(&msix, 16 + 8)), (0b110, 0x77));
    let sent = |msi: &MockMsi| (msi.count(0), msi.count(2), msi.count(0x77));
    assert_eq!(sent(&msi), (0, 0, 0));
    msix.set_bus_master(true);
    assert_eq!((sent(&msi), pending(&msix)), ((0, 1, 0), 0b010));
    assert!(msix.vectors().raise(0));
    msix.write_table(16 + 12, &0_u32.to_le_bytes());
    assert_eq!((sent(&msi), pending(&msix)), ((1, 1, 1), 0));
}

#[test]
fn a_saved_table_that_the_function_can_not_have_is_refused_and_changes_nothing() {
    let msi = MockMsi::default();
    let good = open_table(&msi, 2).save();
    let changes: [Change<message::Msix>; 4] = [
        ("msix.entries", |saved| saved.entries.truncate(1)),
        ("msix.entries", |saved| saved.entries.push(saved.entries[0])),
        ("msix.entries.address", |saved| saved.entries[1].address |= 2),
        ("msix.entries.control", |saved| saved.entries[1].control = 2),
    ];
    refuses(&good, &changes, |saved| {
        let mut msix = Msix::new(&msi, 2).unwrap();
        let fresh = msix.save();
        let result = msix.restore(saved, ENABLED);
        assert_eq!(msix.save(), fresh);
        result
    });
}
