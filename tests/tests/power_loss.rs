//! A node that loses power keeps flushed data of its guests: every write that a FLUSH confirmed is
//! in the image, regardless of other writes.

use vmmd_tests::{Case, long, power};

/// With four queues, and in the long form with one too.
#[test]
fn what_a_guest_has_flushed_survives_a_loss_of_power() {
    let case = Case::new("power-loss");
    let queues: &[u32] = if long() { &[4, 1] } else { &[4] };
    for queues in queues {
        let wrong = power::lose(&case, *queues, "barrier=1");
        assert!(wrong.is_empty(), "{queues} queues: {}", wrong.join("\n"));
    }
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    /// The test above can fail: a file system that ignores flushes loses confirmed writes.
    #[test]
    fn a_flush_that_does_not_reach_the_disk_is_noticed() {
        let case = Case::new("power-nobarrier");
        let wrong = power::lose(&case, 1, "barrier=0");
        assert!(!wrong.is_empty(), "nothing was lost");
    }
}
