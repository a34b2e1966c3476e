//! What fuzz targets call: one function for each, which takes any bytes and must not panic. The targets are in
//! `devices/fuzz`, with a corpus of seeds each; the tests here run the functions over the seeds and over generated input.

pub use crate::virtio::blk::fuzz::queue as blk_queue;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    /// Runs `target` over the committed seeds of that name.
    fn seeds(name: &str, target: fn(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz/corpus")
            .join(name);
        let mut count = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            target(&fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 0, "no seeds in {}", folder.display());
    }

    #[test]
    fn the_seeds_of_blk_queue_do_no_harm() {
        seeds("blk_queue", super::blk_queue);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_harm_blk_queue(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::blk_queue(&data);
        }
    }
}
