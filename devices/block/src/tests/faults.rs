//! Failures and limits.

use std::io;

use rustix::fs::{SealFlags, fcntl_add_seals};
use vm_memory::Bytes;

use super::*;

const SIZE: u64 = 64 << 10;

#[rstest]
fn a_file_that_was_cut_off_is_an_error_where_it_ends(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
    #[values(Cache::Buffered, Cache::Direct, Cache::Coarse)] cache: Cache,
) {
    let Some(setup) = Setup::new(which, cache, SIZE) else {
        return;
    };
    let (mut engine, memory) = (setup.engine(), memory());
    File::options()
        .write(true)
        .open(&setup.path)
        .unwrap()
        .set_len(8192)
        .unwrap();
    let whole = carry_out(&mut *engine, request(&memory, 1, read(4096), 0, 4096));
    whole.result.unwrap();
    for (offset, length) in [(4096, 8192), (8192, 4096), (16384, 512)] {
        let cut = carry_out(&mut *engine, request(&memory, 2, read(offset), 0, length));
        assert_eq!(cut.result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
    // A write extends the file as needed; to the guest the disk has its full size again.
    carry_out(&mut *engine, request(&memory, 3, write(SIZE - 4096), 0, 4096))
        .result
        .unwrap();
    carry_out(&mut *engine, request(&memory, 4, read(8192), 0, 8192))
        .result
        .unwrap();
}

/// The host's error number arrives: a sealed memfd gives EPERM to writes, a descriptor for reading EBADF.
#[rstest]
fn the_hosts_error_is_passed_on(#[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which) {
    let memory = memory();
    let Some(mut setup) = Setup::new(which, Cache::Buffered, SIZE) else {
        return;
    };
    let sealed = rustix::fs::memfd_create("sealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, SIZE).unwrap();
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    let reader = File::open(&setup.path).unwrap();
    for (file, expected) in [(File::from(sealed), libc::EPERM), (reader, libc::EBADF)] {
        setup.target = Arc::new(Target::new(file).unwrap());
        let mut engine = setup.engine();
        let failed = carry_out(&mut *engine, request(&memory, 1, write(0), 0, 4096));
        assert_eq!(failed.result.unwrap_err().raw_os_error(), Some(expected));
        carry_out(&mut *engine, request(&memory, 2, read(0), 0, 4096))
            .result
            .unwrap();
        let zero = Operation::WriteZeroes {
            offset: 0,
            length: 4096,
            unmap: true,
        };
        let failed = carry_out(&mut *engine, request(&memory, 3, zero, 0, 0));
        assert_eq!(failed.result.unwrap_err().raw_os_error(), Some(expected));
    }
}

#[rstest]
fn many_more_requests_than_the_depth_are_done_in_turns(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
    #[values(Cache::Buffered, Cache::Direct)] cache: Cache,
) {
    let Some(setup) = Setup::new(which, cache, SIZE) else {
        return;
    };
    let (mut engine, memory) = (setup.engine(), memory());
    memory.write_slice(&[9; 4096], GuestAddress(0)).unwrap();
    let depth = engine.depth();
    assert!(depth >= 32);
    let (mut sent, mut done) = (0, 0);
    while done < 4 * depth {
        while engine.in_flight() < depth && sent < 4 * depth {
            let block = sent as u64 % (SIZE / 4096);
            engine.submit(request(&memory, sent as u32, write(block * 4096), 0, 4096));
            sent += 1;
        }
        assert!(engine.in_flight() == depth || sent == 4 * depth);
        engine.commit().unwrap();
        engine.wait(late()).unwrap();
        while let Some(completion) = engine.completed() {
            completion.result.unwrap();
            done += 1;
        }
    }
    assert_eq!(engine.in_flight(), 0);
    assert!(setup.content().iter().all(|byte| *byte == 9));
}

/// More requests than fit are no reason to lose one.
#[rstest]
fn what_is_submitted_beyond_the_depth_completes_too(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
) {
    let Some(setup) = Setup::new(which, Cache::Buffered, SIZE) else {
        return;
    };
    let (mut engine, memory) = (setup.engine(), memory());
    let count = engine.depth() + 50;
    for token in 0..count {
        engine.submit(request(&memory, token as u32, read(0), 0, 512));
    }
    engine.commit().unwrap();
    let mut seen = vec![false; count];
    while engine.in_flight() > 0 {
        engine.wait(late()).unwrap();
        let mut any = false;
        while let Some(completion) = engine.completed() {
            completion.result.unwrap();
            assert!(!std::mem::replace(&mut seen[completion.token as usize], true));
            any = true;
        }
        assert!(any, "nothing completed");
    }
    assert!(seen.into_iter().all(|seen| seen));
}

#[rstest]
fn a_wait_ends_at_its_deadline(#[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which) {
    let Some(setup) = Setup::new(which, Cache::Coarse, SIZE) else {
        return;
    };
    let (mut engine, memory) = (setup.engine(), memory());
    // Nothing under way: no wait at all.
    engine.wait(late()).unwrap();
    // A change of a block that never ends keeps this one from beginning.
    let changing = setup.target.changing().unwrap();
    changing.lock(&(0..4096));
    engine.submit(request(&memory, 1, write(512), 0, 512));
    engine.commit().unwrap();
    let start = Instant::now();
    engine.wait(start + Duration::from_millis(50)).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert!(engine.completed().is_none() && engine.in_flight() == 1);
    changing.unlock(&(0..4096));
    engine.wait(late()).unwrap();
    engine.completed().unwrap().result.unwrap();
    assert_eq!(engine.in_flight(), 0);
}

/// After all completions were taken, the event signals each further completion, also
/// edge-triggered.
#[rstest]
fn the_event_tells_of_completions(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
    #[values(Cache::Buffered, Cache::Direct)] cache: Cache,
) {
    use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

    let Some(setup) = Setup::new(which, cache, SIZE) else {
        return;
    };
    let (mut engine, memory) = (setup.engine(), memory());
    let epoll = Epoll::new().unwrap();
    let interest = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 1);
    let event = std::os::fd::AsRawFd::as_raw_fd(engine.event().unwrap());
    epoll.ctl(ControlOperation::Add, event, interest).unwrap();
    let mut events = [EpollEvent::default(); 4];
    for round in 0..300_u32 {
        let operation = if round % 10 == 9 {
            Operation::Flush
        } else {
            write(0)
        };
        let length = if round % 10 == 9 { 0 } else { 4096 };
        engine.submit(request(&memory, round, operation, 0, length));
        engine.commit().unwrap();
        let completion = loop {
            if let Some(completion) = engine.completed() {
                break completion;
            }
            match epoll.wait(20_000, &mut events) {
                // The kernel interrupts to make a thread for the ring.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                count => assert_eq!(count.unwrap(), 1, "no event in round {round}"),
            }
        };
        completion.result.unwrap();
        assert!(engine.completed().is_none());
    }
}

/// Drop of an engine with a request under way: the memory lives until the host is done, and the
/// image is closed.
#[rstest]
fn an_engine_may_go_with_requests_under_way(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
    #[values(Cache::Buffered, Cache::Direct, Cache::Coarse)] cache: Cache,
) {
    let Some(setup) = Setup::new(which, cache, SIZE) else {
        return;
    };
    let memory = memory();
    for count in [1, 32] {
        for committed in [false, true] {
            let mut engine = setup.engine();
            for token in 0..count {
                engine.submit(request(&memory, token, write(0), 0, 4096));
            }
            if committed {
                engine.commit().unwrap();
            }
            drop(engine);
        }
    }
}
