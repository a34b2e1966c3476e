#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::{
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::Ordering,
    thread::JoinHandle,
};

use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

use super::*;
use crate::virtio::testing::back_end::BackEnd;

/// Back end that sends these bytes as the answer to any request, and then disconnects.
fn answering(bytes: Vec<u8>) -> (OwnedFd, JoinHandle<()>) {
    let (front, mut back) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let _ = back.read(&mut [0; 64]);
        let _ = back.write_all(&bytes);
    });
    (front.into(), thread)
}

fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).unwrap();
    let mut bytes = [request, flags, size].map(u32::to_le_bytes).concat();
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn what_is_no_answer_to_the_question_ends_the_connection_at_once() {
    let features = 1_u64.to_le_bytes();
    for (what, bytes) in [
        ("nothing", vec![]),
        ("half a header", vec![1, 0, 0, 0, 5]),
        ("half a body", message(1, 5, &features)[..16].to_vec()),
        ("to another request", message(2, 5, &features)),
        ("no reply", message(1, 1, &features)),
        ("another version", message(1, 6, &features)),
        ("unknown flags", message(1, 0x25, &features)),
        ("too short", message(1, 5, &features[..4])),
        ("too long", message(1, 5, &[0; 4096])),
        ("length beyond all bounds", {
            let mut bytes = message(1, 5, &features);
            bytes[8..12].fill(0xff);
            bytes
        }),
    ] {
        let began = Instant::now();
        let (front, thread) = answering(bytes);
        assert!(FrontEnd::new(front, deadline()).is_err(), "{what}");
        assert!(began.elapsed() < PATIENCE, "{what}");
        thread.join().unwrap();
    }
}

#[test]
fn a_back_end_that_hung_up_is_an_error_and_no_signal() {
    let (front, back) = UnixStream::pair().unwrap();
    drop(back);
    let error = FrontEnd::new(front.into(), deadline()).unwrap_err();
    assert!(matches!(
        error.kind(),
        ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset
    ));
}

#[test]
fn back_end_gets_no_time_beyond_its_operations_deadline() {
    let (front, mut back) = UnixStream::pair().unwrap();
    // It has answered the first request of the operation, and leaves the next one open.
    back.write_all(&message(1, 5, &PROTOCOL_FEATURES.to_le_bytes()))
        .unwrap();
    let error = FrontEnd::new(front.into(), Instant::now()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[test]
fn features_that_the_back_end_lacks_are_not_accepted() {
    let (_back_end, socket) = BackEnd::start();
    let mut front = FrontEnd::new(socket, deadline()).unwrap();
    assert!(front.features() & 1 << 32 != 0);
    front.set_features(1 << 32, deadline()).unwrap();
    assert!(front.set_features(1 << 32 | 1 << 5, deadline()).is_err());
}

#[test]
fn memory_that_is_not_shared_is_not_handed_over() {
    let (_back_end, socket) = BackEnd::start();
    let mut front = FrontEnd::new(socket, deadline()).unwrap();
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap();
    let error = front.set_memory(&memory, deadline()).unwrap_err();
    assert!(error.to_string().contains("not shared"), "{error}");
}

#[test]
fn a_ring_that_does_not_stop_in_time_is_waited_for_by_the_next_call() {
    let (front, mut back) = UnixStream::pair().unwrap();
    let mut front = unasked(front.into(), false);
    let soon = Instant::now();
    assert_eq!(front.stop_ring(1, soon).unwrap(), None);
    assert!(front.is_stopping());
    assert!(front.stop_ring(0, soon).is_err(), "another one");
    back.write_all(&message(11, 5, &[1, 0, 0, 0, 7, 0, 0, 0]))
        .unwrap();
    assert_eq!(front.stop_ring(1, soon).unwrap(), Some(7));
    assert!(!front.is_stopping());
    back.write_all(&message(11, 5, &[0, 0, 0, 0, 0, 0, 1, 0]))
        .unwrap();
    assert!(front.stop_ring(0, soon).is_err(), "beyond any ring");
}

#[test]
fn a_ring_is_not_started_beyond_what_the_back_end_knows_without_an_error() {
    let (mut back_end, socket) = BackEnd::start();
    let mut front = FrontEnd::new(socket, deadline()).unwrap();
    back_end.kill();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let addresses = RingAddresses {
        size: 8,
        descriptors: 0,
        available: 0x1000,
        used: 0x2000,
    };
    let events = RingEvents {
        kick: &event,
        call: &event,
        error: &event,
    };
    let started = front.start_ring(0, 0, &addresses, &events, deadline());
    assert!(started.is_err());
    assert_eq!(back_end.mood.served.load(Ordering::SeqCst), 0);
}

#[test]
fn a_state_that_is_too_large_or_of_a_back_end_without_any_is_refused() {
    let (back_end, socket) = BackEnd::start();
    let front = FrontEnd::new(socket, deadline()).unwrap();
    assert_eq!(front.save_state().unwrap(), b"of the first");
    front.load_state(b"another").unwrap();
    assert_eq!(front.save_state().unwrap(), b"another");
    front.load_state(b"").unwrap();
    assert_eq!(front.save_state().unwrap(), b"");
    back_end.mood.has_no_state.store(true, Ordering::SeqCst);
    assert!(front.save_state().is_err() && front.load_state(b"x").is_err());

    // One that offers none is not asked.
    let (front, _back) = UnixStream::pair().unwrap();
    let error = unasked(front.into(), false).save_state().unwrap_err();
    assert!(error.to_string().contains("can't save its state"), "{error}");
}

/// A connection on which nothing was said yet.
fn unasked(socket: OwnedFd, has_state: bool) -> FrontEnd {
    FrontEnd {
        socket,
        features: 0,
        acknowledged: false,
        has_state,
        stopping: None,
    }
}

#[test]
fn a_state_that_never_ends_is_given_up() {
    let (front, back) = UnixStream::pair().unwrap();
    let front = unasked(front.into(), true);
    let thread = std::thread::spawn(move || {
        let mut header = [0; 20];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let mut into = [std::io::IoSliceMut::new(&mut header)];
        rustix::net::recvmsg(&back, &mut into, &mut ancillary, rustix::net::RecvFlags::WAITALL).unwrap();
        let mut pipe = ancillary.drain().find_map(|message| match message {
            rustix::net::RecvAncillaryMessage::ScmRights(mut fds) => fds.next().map(std::fs::File::from),
            _ => None,
        });
        (&back)
            .write_all(&message(42, 5, &0x100_u64.to_le_bytes()))
            .unwrap();
        while pipe.as_mut().unwrap().write_all(&[0; 65536]).is_ok() {}
    });
    let error = front.save_state().unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
    thread.join().unwrap();
}
