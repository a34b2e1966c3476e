//! A node that loses its power keeps what guests had flushed: every write that was confirmed by a FLUSH is in the image, whatever
//! becomes of the others.

use rstest::rstest;
use vmmd_tests::{Case, power};

#[rstest]
fn what_a_guest_has_flushed_survives_a_loss_of_power(#[values(1, 4)] queues: u32) {
    let case = Case::new("power-loss").expect("node");
    let wrong = power::lose(&case, queues, "barrier=1");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The test above can fail: a file system that keeps flushes to itself loses what was confirmed.
#[test]
fn a_flush_that_does_not_reach_the_disk_is_noticed() {
    let case = Case::new("power-nobarrier").expect("node");
    let wrong = power::lose(&case, 1, "barrier=0");
    assert!(!wrong.is_empty(), "nothing was lost");
}
