//! The same reads on a ring, with nothing around it.

use std::{
    fs::File,
    os::fd::AsRawFd as _,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use io_uring::{IoUring, opcode, types};
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

use super::{BLOCK, DATA, Figures, Offsets, between_looks, cpu_time, places::Places, repeat};

/// With a thread beside it that looks at its progress all the time, as a driver that polls looks at the used ring: where
/// two processors share a core, as hyperthreads do, that takes part of it from both.
pub(super) fn run_watched(file: &File, bytes: u64, depth: u16, time: Duration, places: Places) -> Figures {
    let (progress, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            places.ask();
            watch(&progress, &over);
        });
        // Also when it panics: the scope waits for the thread.
        let _end = End(&over);
        run(file, bytes, depth, time, |requests| {
            progress.store(requests, Ordering::Release);
        })
    })
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn watch(progress: &AtomicU64, over: &AtomicBool) {
    let mut looks = 0;
    while !over.load(Ordering::Relaxed) {
        let seen = progress.load(Ordering::Acquire);
        while progress.load(Ordering::Acquire) == seen && !over.load(Ordering::Relaxed) {
            looks += 1;
            between_looks(looks);
        }
    }
}

/// Runs the loop. `done` receives the number of completed requests each time the number grows.
#[allow(unsafe_code)]
pub(super) fn run(file: &File, bytes: u64, depth: u16, time: Duration, done: impl Fn(u64)) -> Figures {
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 64 << 20)]).unwrap();
    let mut ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(u32::from(depth).next_power_of_two())
        .unwrap();
    ring.submitter().register_files(&[file.as_raw_fd()]).unwrap();
    let mut offsets = Offsets::new(bytes);
    let mut ask = |ring: &mut IoUring, slot: u64| {
        let place = GuestAddress(DATA + slot * BLOCK);
        let buffer = memory.get_host_address(place).unwrap();
        let entry = opcode::Read::new(types::Fixed(0), buffer, BLOCK as u32)
            .offset(offsets.next())
            .build()
            .user_data(slot);
        // SAFETY: the buffer lies in `memory`, which outlives the ring's use: all requests are waited for below.
        unsafe { ring.submission().push(&entry) }.unwrap();
    };
    for slot in 0..depth {
        ask(&mut ring, slot.into());
    }
    let thread = Path::new("/proc/thread-self");
    let begin = cpu_time(thread);
    let mut requests = 0;
    let mut back = Vec::new();
    let elapsed = repeat(time, || {
        ring.submit_and_wait(1).unwrap();
        back.extend(ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (slot, result) in back.drain(..) {
            assert_eq!(result, BLOCK as i32);
            ask(&mut ring, slot);
            requests += 1;
        }
        done(requests);
    });
    let cpu = cpu_time(thread).saturating_sub(begin);
    ring.submit_and_wait(depth.into()).unwrap();
    Figures {
        requests,
        elapsed,
        cpu,
        kicks: 0,
    }
}
