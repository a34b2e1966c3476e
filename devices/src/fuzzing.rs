//! Entry points of the fuzz targets: one function for each, which takes any bytes and must not
//! panic. The targets and their seed corpora are in `devices/fuzz`. The tests here run the
//! functions over the seeds and over generated input.

pub use block::qcow2::fuzz::image as qcow2_image;
pub use rfb::fuzz::client as rfb_client;

pub use crate::ahci::fuzz::port as ahci_port;
pub use crate::firmware::fuzz::{flash, fw_cfg};
pub use crate::tpm::fuzz::registers as tpm_registers;
pub use crate::virtio::{
    balloon::fuzz::queue as balloon_queue, blk::fuzz::queue as blk_queue,
    channels::fuzz::driver as channels_driver, console::fuzz::driver as console_driver,
    gpu::fuzz::commands as gpu_commands, input::fuzz::driver as input_driver, net::fuzz::queue as net_queue,
    vsock::fuzz::driver as vsock_driver,
};
pub use crate::watchdog::fuzz::registers as watchdog_registers;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;
    use rstest::rstest;

    /// The committed seeds of that name.
    fn seeds(name: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz/corpus")
            .join(name);
        let entries = fs::read_dir(&folder).unwrap();
        entries
            .map(|entry| fs::read(entry.unwrap().path()).unwrap())
            .collect()
    }

    #[rstest]
    #[case::ahci_port("ahci_port", crate::fuzzing::ahci_port)]
    #[case::balloon_queue("balloon_queue", crate::fuzzing::balloon_queue)]
    #[case::blk_queue("blk_queue", crate::fuzzing::blk_queue)]
    #[case::channels_driver("channels_driver", crate::fuzzing::channels_driver)]
    #[case::console_driver("console_driver", crate::fuzzing::console_driver)]
    #[case::flash("flash", crate::fuzzing::flash)]
    #[case::fw_cfg("fw_cfg", crate::fuzzing::fw_cfg)]
    #[case::gpu_commands("gpu_commands", crate::fuzzing::gpu_commands)]
    #[case::input_driver("input_driver", crate::fuzzing::input_driver)]
    #[case::net_queue("net_queue", crate::fuzzing::net_queue)]
    #[case::qcow2_image("qcow2_image", crate::fuzzing::qcow2_image)]
    #[case::rfb_client("rfb_client", crate::fuzzing::rfb_client)]
    #[case::tpm_registers("tpm_registers", crate::fuzzing::tpm_registers)]
    #[case::vsock_driver("vsock_driver", crate::fuzzing::vsock_driver)]
    #[case::watchdog_registers("watchdog_registers", crate::fuzzing::watchdog_registers)]
    fn the_committed_seeds_do_no_harm(#[case] name: &str, #[case] target: fn(&[u8])) {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "no seeds of {name}");
        seeds.iter().for_each(|seed| target(seed));
    }

    /// Seeds of that name, with their bytes changed in a few places.
    fn changed_seeds(name: &str) -> impl Strategy<Value = Vec<u8>> {
        let seeds = seeds(name);
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

    #[rstest]
    #[case::ahci_port(3000, 600, crate::fuzzing::ahci_port)]
    #[case::balloon_queue(3000, 600, crate::fuzzing::balloon_queue)]
    #[case::blk_queue(3000, 600, crate::fuzzing::blk_queue)]
    #[case::channels_driver(3000, 600, crate::fuzzing::channels_driver)]
    #[case::console_driver(3000, 600, crate::fuzzing::console_driver)]
    #[case::flash(1000, 600, crate::fuzzing::flash)]
    #[case::fw_cfg(3000, 600, crate::fuzzing::fw_cfg)]
    #[case::gpu_commands(300, 300, crate::fuzzing::gpu_commands)]
    #[case::input_driver(3000, 600, crate::fuzzing::input_driver)]
    #[case::net_queue(3000, 600, crate::fuzzing::net_queue)]
    #[case::rfb_client(3000, 600, crate::fuzzing::rfb_client)]
    #[case::tpm_registers(3000, 600, crate::fuzzing::tpm_registers)]
    #[case::vsock_driver(3000, 600, crate::fuzzing::vsock_driver)]
    fn no_bytes_do_harm(#[case] cases: u32, #[case] most: usize, #[case] target: fn(&[u8])) {
        let config = ProptestConfig {
            cases,
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        proptest!(config, |(data in proptest::collection::vec(any::<u8>(), 0..most))| target(&data));
    }
}
