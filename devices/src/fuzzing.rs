//! Entry points of the fuzz targets: one function for each, which takes any bytes and must not
//! panic. The targets and their seed corpora are in `devices/fuzz`. The tests here run the
//! functions over the seeds and over generated input.

pub use block::qcow2::fuzz::image as qcow2_image;
pub use rfb::fuzz::client as rfb_client;

pub use crate::virtio::{
    balloon::fuzz::queue as balloon_queue, blk::fuzz::queue as blk_queue,
    console::fuzz::driver as console_driver, gpu::fuzz::commands as gpu_commands,
    input::fuzz::driver as input_driver, net::fuzz::queue as net_queue,
};

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

    #[test]
    fn the_seeds_of_balloon_queue_do_no_harm() {
        seeds("balloon_queue", super::balloon_queue);
    }

    #[test]
    fn the_seeds_of_net_queue_do_no_harm() {
        seeds("net_queue", super::net_queue);
    }

    #[test]
    fn the_seeds_of_qcow2_image_do_no_harm() {
        seeds("qcow2_image", super::qcow2_image);
    }

    #[test]
    fn the_seeds_of_rfb_client_do_no_harm() {
        seeds("rfb_client", super::rfb_client);
    }

    #[test]
    fn the_seeds_of_gpu_commands_do_no_harm() {
        seeds("gpu_commands", super::gpu_commands);
    }

    #[test]
    fn the_seeds_of_input_driver_do_no_harm() {
        seeds("input_driver", super::input_driver);
    }

    #[test]
    fn the_seeds_of_console_driver_do_no_harm() {
        seeds("console_driver", super::console_driver);
    }

    /// Seeds of that name, with their bytes changed in a few places.
    fn changed_seeds(name: &str) -> impl Strategy<Value = Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz/corpus")
            .join(name);
        let entries = fs::read_dir(folder).unwrap();
        let seeds: Vec<_> = entries
            .map(|entry| fs::read(entry.unwrap().path()).unwrap())
            .collect();
        let place = prop_oneof![3 => 0..112_usize, 2 => 0..4096_usize, 1 => any::<usize>()];
        let value = prop_oneof![any::<u8>(), 0..4_u8, Just(0x80), Just(0xff)];
        let changes = proptest::collection::vec((place, value), 0..12);
        (proptest::sample::select(seeds), changes).prop_map(|(mut seed, changes)| {
            for (place, value) in changes {
                let place = place % seed.len();
                if let Some(byte) = seed.get_mut(place) {
                    *byte = value;
                }
            }
            seed
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_changes_make_qcow2_image_do_harm(data in changed_seeds("qcow2_image")) {
            super::qcow2_image(&data);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_harm_blk_queue(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::blk_queue(&data);
        }

        #[test]
        fn no_bytes_harm_net_queue(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::net_queue(&data);
        }

        #[test]
        fn no_bytes_harm_balloon_queue(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::balloon_queue(&data);
        }

        #[test]
        fn no_bytes_harm_rfb_client(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::rfb_client(&data);
        }

        #[test]
        fn no_bytes_harm_input_driver(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::input_driver(&data);
        }

        #[test]
        fn no_bytes_harm_console_driver(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::console_driver(&data);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_harm_gpu_commands(data in proptest::collection::vec(any::<u8>(), 0..300)) {
            super::gpu_commands(&data);
        }
    }
}
