//! Operating system of a disk: partitions, file systems, boot loader configurations.
#![no_main]

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind, set_hook},
};

thread_local! {
    /// The last panic, and where it was.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

libfuzzer_sys::fuzz_target!(
    // The fuzzer's own hook ends the process at any panic. Those of libraries are caught on purpose: only one that gets out counts.
    init: set_hook(Box::new(|info| PANIC.with(|last| *last.borrow_mut() = info.to_string()))),
    |data: &[u8]| {
        if catch_unwind(AssertUnwindSafe(|| vmm_image::bootdisk::fuzzing::boot_disk(data))).is_err() {
            PANIC.with(|last| eprintln!("{}", last.borrow()));
            std::process::abort();
        }
    }
);
