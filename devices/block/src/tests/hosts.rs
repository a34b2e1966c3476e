//! Tests that need a file system of a certain size, or a block device with disposable content. The
//! tests create both, as root.

use std::process::Command;

use tempfile::TempDir;
use vm_memory::Bytes;

use super::*;

/// Runs a command that only root may run; `None` where it fails, which fails the test in continuous integration.
fn as_root(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(program).args(arguments).output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
        }
        Ok(output) => {
            lacking(program, String::from_utf8_lossy(&output.stderr));
            None
        }
        Err(error) => {
            lacking(program, error);
            None
        }
    }
}

/// A loop device over a new file, gone when it is dropped.
pub(super) struct Loop {
    pub(super) device: String,
    pub(super) file: NamedTempFile,
}

impl Loop {
    pub(super) fn new(size: u64) -> Option<Self> {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(size).unwrap();
        let path = file.path().to_str().unwrap();
        let device = as_root("losetup", &["--find", "--show", path])?;
        Some(Self { device, file })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}

/// ext4 of 48 MiB, gone when it is dropped.
struct SmallFs {
    folder: TempDir,
    _device: Loop,
}

impl SmallFs {
    fn new() -> Option<Self> {
        let device = Loop::new(48 << 20)?;
        let folder = tempfile::tempdir().unwrap();
        // Without a journal, blocks that were given back can be taken at once.
        as_root("mkfs.ext4", &["-q", "-m0", "-O^has_journal", &device.device])?;
        as_root("mount", &[&device.device, folder.path().to_str().unwrap()])?;
        Some(Self {
            folder,
            _device: device,
        })
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.folder.path()).status();
    }
}

/// Space runs out midway: earlier writes keep their blocks, later ones get ENOSPC, and the image
/// stays usable.
#[rstest]
fn a_full_file_system_is_an_error_until_there_is_space(
    #[values(Which::Uring, Which::Threads)] which: Which,
    #[values(Cache::Buffered, Cache::Direct, Cache::Coarse)] cache: Cache,
) {
    const BLOCK: u32 = 256 << 10;
    let Some(small) = SmallFs::new() else { return };
    let path = small.folder.path().join("disk");
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
}

#[rstest]
#[case::ring(Which::Uring, Cache::Buffered)]
#[case::ring_past_the_page_cache(Which::Uring, Cache::Direct)]
#[case::threads_past_the_page_cache(Which::Threads, Cache::Direct)]
fn an_engine_on_a_block_device_is_a_disk(#[case] which: Which, #[case] cache: Cache) {
    proptest!(model::cases(), |(steps in model::steps(false))| on_device(which, cache, steps));
}

fn on_device(which: Which, cache: Cache, steps: Vec<model::Step>) {
    let Some(device) = Loop::new(model::SECTORS * SECTOR) else {
        return;
    };
    let path = Path::new(&device.device);
    let Some(mut setup) = Setup::on(which, Cache::Buffered, path) else {
        return;
    };
    let zero = Operation::WriteZeroes {
        offset: 0,
        length: setup.target.capacity(),
        unmap: true,
    };
    carry_out(&mut *setup.engine(), request(&memory(), 0, zero, 0, 0))
        .result
        .unwrap();
    if cache != Cache::Buffered {
        setup = Setup::on(which, cache, path).unwrap();
    }
    model::run(&setup, steps);
}
