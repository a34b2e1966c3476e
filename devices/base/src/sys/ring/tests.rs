use std::{
    fs,
    io::Write as _,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EFD_NONBLOCK;

use super::*;
use crate::{GuestMemory, lacking, ram::Segment, sys::event::wait_for};

struct Rig {
    /// Notes the tag, once more.
    ring: Ring<u32>,
    memory: Arc<GuestMemory>,
}

/// On a file of 4 KiB of sevens; `None` where there is no io_uring.
fn rig() -> Option<Rig> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, [7; 4096]).unwrap();
    rig_on(&File::open(path).unwrap())
}

fn rig_on(file: &File) -> Option<Rig> {
    let event = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let ring = match Ring::new(file, 4, event) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
            lacking("io_uring", error);
            return None;
        }
        ring => ring.unwrap(),
    };
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
    Some(Rig {
        ring,
        memory: Arc::new(memory),
    })
}

impl Rig {
    fn buffers(&self, address: u64, length: u32) -> Box<Iovecs> {
        let mut buffers = Box::new(Iovecs::new(Arc::clone(&self.memory)));
        let address = GuestAddress(address);
        buffers.append(&[Segment { address, length }], 0, length).unwrap();
        buffers
    }

    /// Pushes a read of a KiB to the `tag`th KiB of memory.
    fn push(&mut self, tag: u32) -> Result<(), io::ErrorKind> {
        let buffers = self.buffers(u64::from(tag % 64) << 10, 1024);
        let held = Held { note: tag, buffers };
        let pushed = self.ring.push(tag, Call::Read(0), held, false);
        pushed.map_err(|(held, error)| {
            assert_eq!((held.note, held.buffers.len()), (tag, 1024), "all comes back");
            error.kind()
        })
    }

    fn tags(&mut self) -> Vec<u32> {
        self.ring.submit().unwrap();
        let mut tags = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(100);
        while self.ring.under_way() > 0 {
            if let Some(back) = self.ring.returned() {
                assert_eq!((back.result, back.held.buffers.len()), (1024, 1024));
                assert_eq!(back.held.note, back.tag);
                tags.push(back.tag);
            } else {
                assert!(Instant::now() < deadline, "only {tags:?} came back");
                wait_for(self.ring.event(), deadline).unwrap();
            }
        }
        tags.sort_unstable();
        tags
    }
}

#[test]
fn a_tag_stands_for_one_call_at_a_time() {
    let Some(mut rig) = rig() else { return };
    for tag in [3, 0, 2] {
        rig.push(tag).unwrap();
    }
    for tag in [0, 2, 3, 1 << 16, u32::MAX] {
        assert_eq!(rig.push(tag), Err(io::ErrorKind::InvalidInput), "{tag}");
    }
    assert_eq!(rig.ring.under_way(), 3);
    assert_eq!(rig.tags(), [0, 2, 3]);
    rig.push(2).unwrap();
    rig.push(1).unwrap();
    assert_eq!(rig.tags(), [1, 2]);
    let mut read = [0; 4096];
    rig.memory.read_slice(&mut read, GuestAddress(0)).unwrap();
    assert_eq!(read, [7; 4096]);
}

#[test]
fn more_calls_than_the_ring_has_room_for_are_handed_over_in_between() {
    let Some(mut rig) = rig() else { return };
    for tag in 0..50 {
        rig.push(tag).unwrap();
    }
    assert_eq!(rig.tags(), (0..50).collect::<Vec<_>>());
}

#[test]
fn what_has_to_be_gathered_is_not_at_hand() {
    let (reader, mut writer) = io::pipe().unwrap();
    let Some(mut rig) = rig_on(&File::from(OwnedFd::from(reader))) else {
        return;
    };
    for tag in 0..2 {
        rig.push(tag).unwrap();
    }
    rig.ring.submit().unwrap();
    assert!(rig.ring.returned().is_none());
    writer.write_all(&[7; 2048]).unwrap();
    if rig.ring.deferred {
        assert!(rig.ring.at_hand().is_none());
    }
    // The event is on, and no thread gathers completions.
    let first = rig.ring.returned().unwrap().tag;
    // It was gathered with the first.
    let second = rig.ring.at_hand().unwrap().tag;
    assert_eq!(first + second, 1);
    assert!(rig.ring.at_hand().is_none() && rig.ring.returned().is_none());
}

#[test]
fn a_ring_refuses_all_that_it_is_not_used_for() {
    let Some(deferred) = rig() else { return };
    let file = tempfile::tempfile().unwrap();
    let event = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let undeferred = Ring::<u32>::undeferred(&file, 4, event).unwrap();
    for mut ring in [deferred.ring, undeferred] {
        ring.wake_up().unwrap();
        let path = c"/etc/passwd".as_ptr();
        let here = io_uring::types::Fd(libc::AT_FDCWD);
        let nowhere = io_uring::types::Fd(-1);
        let read = || opcode::Read::new(io_uring::types::Fixed(0), std::ptr::null_mut(), 0).build();
        for (entry, allowed) in [
            (read(), true),
            (read().flags(squeue::Flags::ASYNC), true),
            (opcode::Nop::new().build(), false),
            (opcode::OpenAt::new(here, path).build(), false),
            (
                opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
                false,
            ),
            (opcode::Connect::new(nowhere, std::ptr::null(), 0).build(), false),
            (opcode::Close::new(nowhere).build(), false),
            (read().flags(squeue::Flags::IO_LINK), false),
        ] {
            // SAFETY: nothing is read or written: lengths are 0, and the path is a constant.
            unsafe { ring.ring.submission().push(&entry) }.unwrap();
            ring.ring.submit_and_wait(1).unwrap();
            let result = ring.ring.completion().next().unwrap().result();
            assert_eq!(result != -libc::EACCES, allowed, "{entry:?}: {result}");
        }
        let error = ring.ring.submitter().register_probe(&mut io_uring::Probe::new());
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }
}

#[test]
fn a_poll_that_was_given_up_does_not_end_the_next_wait() {
    const LIMIT: Duration = Duration::from_millis(50);
    let Some(mut rig) = rig() else { return };
    let other = EventFd::new(EFD_NONBLOCK).unwrap();
    if !rig.ring.wait_beside(other.as_raw_fd(), Some(LIMIT)).unwrap() {
        // A kernel before 6.1.
        return;
    }
    for _ in 0..3 {
        rig.ring.forget_other();
        let begin = Instant::now();
        assert!(rig.ring.wait_beside(other.as_raw_fd(), Some(LIMIT)).unwrap());
        assert!(begin.elapsed() >= LIMIT, "{:?}", begin.elapsed());
        assert!(rig.ring.returned().is_none() && !rig.ring.other_called());
    }
    other.write(1).unwrap();
    assert!(rig.ring.wait_beside(other.as_raw_fd(), None).unwrap());
    assert!(rig.ring.returned().is_none() && rig.ring.other_called());
}
