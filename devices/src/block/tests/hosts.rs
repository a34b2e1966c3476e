//! What needs a certain host. Run with `--run-ignored all` and the variables that say what to use.

use std::env;

use rstest::rstest;
use vm_memory::Bytes;

use super::*;

/// Blocks run out in the middle: who wrote them has them, the others get ENOSPC, and none of it is the end.
#[rstest]
#[ignore = "needs VMMD_TEST_SMALL_DIR, a directory on a file system with less than 64 MiB"]
fn a_full_file_system_is_an_error_until_there_is_space(
    #[values(Which::Uring, Which::Threads)] which: Which,
    #[values(Cache::Buffered, Cache::Direct, Cache::Coarse)] cache: Cache,
) {
    const BLOCK: u32 = 256 << 10;
    let folder = PathBuf::from(env::var_os("VMMD_TEST_SMALL_DIR").unwrap());
    let path = folder.join("disk");
    File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let Some(setup) = Setup::on(which, cache, &path) else {
        return;
    };
    let (mut engine, memory) = (setup.engine(), memory());
    memory
        .write_slice(&vec![7; BLOCK as usize], GuestAddress(0))
        .unwrap();
    let write = |engine: &mut dyn Engine, block: u64| {
        let operation = Operation::Write {
            offset: block * u64::from(BLOCK),
            stable: false,
        };
        carry_out(engine, request(&memory, 1, operation, 0, BLOCK)).result
    };
    let full = (0..256).find_map(|block| Some((block, write(&mut *engine, block).err()?)));
    let (block, error) = full.expect("the file system is too large");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert!(block > 2);
    let discard = Operation::Discard {
        offset: 0,
        length: 2 * u64::from(BLOCK),
    };
    carry_out(&mut *engine, request(&memory, 2, discard, 0, 0))
        .result
        .unwrap();
    write(&mut *engine, block).unwrap();
    carry_out(&mut *engine, request(&memory, 3, Operation::Flush, 0, 0))
        .result
        .unwrap();
    let content = setup.content();
    let written = (BLOCK as usize * 2)..(BLOCK as usize * (block as usize + 1));
    assert!(content[written].iter().all(|byte| *byte == 7));
    fs::remove_file(path).unwrap();
}

fn on_device(which: Which, cache: Cache, steps: Vec<model::Step>) {
    let path = PathBuf::from(env::var_os("VMMD_TEST_BLOCK_DEVICE").unwrap());
    let mut setup = Setup::on(which, Cache::Buffered, &path).unwrap();
    let zero = Operation::WriteZeroes {
        offset: 0,
        length: setup.target.capacity(),
        unmap: true,
    };
    carry_out(&mut *setup.engine(), request(&memory(), 0, zero, 0, 0))
        .result
        .unwrap();
    if cache != Cache::Buffered {
        setup = Setup::on(which, cache, &path).unwrap();
    }
    model::run(&setup, steps);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    #[ignore = "overwrites VMMD_TEST_BLOCK_DEVICE, a block device of 1 MiB"]
    fn the_ring_works_on_block_devices(steps in model::steps(false)) {
        on_device(Which::Uring, Cache::Buffered, steps);
    }

    #[test]
    #[ignore = "overwrites VMMD_TEST_BLOCK_DEVICE, a block device of 1 MiB"]
    fn the_ring_works_on_block_devices_past_the_page_cache(steps in model::steps(false)) {
        on_device(Which::Uring, Cache::Direct, steps);
    }

    #[test]
    #[ignore = "overwrites VMMD_TEST_BLOCK_DEVICE, a block device of 1 MiB"]
    fn threads_work_on_block_devices_past_the_page_cache(steps in model::steps(false)) {
        on_device(Which::Threads, Cache::Direct, steps);
    }
}
