//! The same reads on a ring, with nothing around it.

use std::{fs::File, os::fd::AsRawFd as _, path::Path, time::Duration};

use io_uring::{IoUring, opcode, types};
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

use super::{BLOCK, DATA, Figures, Offsets, cpu_time, repeat};

#[allow(unsafe_code)]
pub(super) fn run(file: &File, bytes: u64, depth: u16, time: Duration) -> Figures {
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
    let mut done = Vec::new();
    let elapsed = repeat(time, || {
        ring.submit_and_wait(1).unwrap();
        done.extend(ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (slot, result) in done.drain(..) {
            assert_eq!(result, BLOCK as i32);
            ask(&mut ring, slot);
            requests += 1;
        }
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
