//! Framing of the private protocol ([`vmmd_wire`]) with its message, and its version.

pub use vmmd_wire::{Error, Limits, MAX_FDS, MAX_FRAME, Read, Sending, encode, receive, send_all};

use crate::vmm::Message;

/// Version of the protocol spoken by this build. A `vmm` serves every minor version of its major one.
pub const MAJOR: u32 = 1;
/// See [`MAJOR`].
pub const MINOR: u32 = 19;

/// Assembles messages from received bytes.
pub type Receiver = vmmd_wire::Receiver<Message>;

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::{
            fd::{AsFd, BorrowedFd, OwnedFd},
            unix::net::UnixStream,
        },
    };

    use prost::Message as _;

    use super::*;
    use crate::vmm::{Hello, Request, message::Kind, request::Op};

    fn hello(id: u64) -> Message {
        let op = Some(Op::Hello(Hello {
            major: MAJOR,
            minor: MINOR,
        }));
        Message {
            kind: Some(Kind::Request(Request {
                id,
                op,
                ..Default::default()
            })),
        }
    }

    #[test]
    fn messages_and_their_descriptors_arrive_whole_and_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile_like();
        send_all(&a, &hello(1), &[file.as_fd(), a.as_fd()]).unwrap();
        send_all(&a, &hello(2), &[]).unwrap();
        drop(a);
        let mut receiver = Receiver::new();
        let (first, fds) = receive(&b, &mut receiver).unwrap().unwrap();
        assert_eq!((first, fds.len()), (hello(1), 2));
        drop(fds);
        let (second, fds) = receive(&b, &mut receiver).unwrap().unwrap();
        assert_eq!((second, fds.len()), (hello(2), 0));
        assert!(receive(&b, &mut receiver).unwrap().is_none());
    }

    #[test]
    fn limited_receiver_refuses_many_fields_before_decoding() {
        use crate::vmm::{DiskStats, DiskStatsReply, Response, response::Result as Outcome};
        let limits = Limits {
            frame_bytes: MAX_FRAME,
            fields: 1000,
            fds: 0,
        };
        let reply = |disks: usize| Message {
            kind: Some(Kind::Response(Response {
                id: 1,
                result: Some(Outcome::DiskStats(DiskStatsReply {
                    disks: vec![DiskStats::default(); disks],
                })),
            })),
        };
        let received = |frame: &[u8]| {
            let (a, b) = UnixStream::pair().unwrap();
            let sent = std::thread::spawn({
                let frame = frame.to_vec();
                move || {
                    let _refused_early = (&a).write_all(&frame);
                }
            });
            let result = receive(&b, &mut Receiver::limited(limits));
            drop(b);
            sent.join().unwrap();
            result
        };
        // Message, response, id and reply are fields too.
        assert!(received(&encode(&reply(996)).unwrap()).is_ok());
        let many = encode(&reply(400_000)).unwrap();
        assert!(matches!(received(&many), Err(Error::TooManyFields(1000))));
        // Hidden behind a group that a decoder skips.
        let mut hidden = vec![0xfb, 0x01, 0xfc, 0x01];
        hidden.extend_from_slice(&many[4..]);
        let mut frame = u32::try_from(hidden.len()).unwrap().to_le_bytes().to_vec();
        frame.extend_from_slice(&hidden);
        assert!(Message::decode(hidden.as_slice()).is_ok());
        assert!(matches!(received(&frame), Err(Error::TooManyFields(1000))));
    }

    #[test]
    fn a_limited_receiver_holds_no_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        send_all(&a, &hello(1), &[a.as_fd()]).unwrap();
        let limits = Limits {
            fds: 0,
            ..Limits::TRUSTED
        };
        let result = receive(&b, &mut Receiver::limited(limits));
        assert!(matches!(result, Err(Error::TooManyFds)));
    }

    #[test]
    fn descriptors_stay_with_their_message() {
        for ahead in 0..3_u64 {
            let (a, b) = UnixStream::pair().unwrap();
            for id in 0..ahead {
                send_all(&a, &hello(1 + id), &[]).unwrap();
            }
            send_all(&a, &hello(100), &[a.as_fd()]).unwrap();
            send_all(&a, &hello(101), &[]).unwrap();
            send_all(&a, &hello(102), &[a.as_fd(), a.as_fd()]).unwrap();
            let mut receiver = Receiver::new();
            let mut counts = Vec::new();
            for _ in 0..ahead + 3 {
                let (_, fds) = receive(&b, &mut receiver).unwrap().unwrap();
                counts.push(fds.len());
            }
            let expected = [vec![0; usize::try_from(ahead).unwrap()], vec![1, 0, 2]].concat();
            assert_eq!(counts, expected);
        }
    }

    #[test]
    fn maximum_of_descriptors_arrives_in_order() {
        let file = tempfile_like();
        for count in [1, 252, 253, 254, 506, 507, MAX_FDS] {
            let (a, b) = UnixStream::pair().unwrap();
            let copies: Vec<OwnedFd> = (0..count).map(|_| file.try_clone().unwrap()).collect();
            let mut fds: Vec<BorrowedFd<'_>> = copies.iter().map(AsFd::as_fd).collect();
            *fds.last_mut().unwrap() = a.as_fd();
            send_all(&a, &hello(1), &[a.as_fd()]).unwrap();
            send_all(&a, &hello(2), &fds).unwrap();
            send_all(&a, &hello(3), &[]).unwrap();
            let mut receiver = Receiver::new();
            let mut counts = Vec::new();
            for id in 1..=3 {
                let (message, received) = receive(&b, &mut receiver).unwrap().unwrap();
                assert_eq!(message, hello(id));
                if id == 2 {
                    let kind = |fd: &OwnedFd| {
                        rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(fd).unwrap().st_mode)
                    };
                    let sockets = received.iter().map(|fd| kind(fd) == rustix::fs::FileType::Socket);
                    let last: Vec<bool> = (1..=count).map(|number| number == count).collect();
                    assert_eq!(sockets.collect::<Vec<_>>(), last);
                }
                counts.push(received.len());
            }
            assert_eq!(counts, [1, count, 0]);
        }
        let fds = vec![file.as_fd(); MAX_FDS + 1];
        assert!(matches!(Sending::new(b"x", &fds), Err(Error::TooManyFds)));
    }

    #[test]
    fn a_long_message_in_pieces_keeps_its_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        let reply = crate::vmm::HelloReply {
            build: "x".repeat(MAX_FRAME - 100),
            ..Default::default()
        };
        let response = crate::vmm::Response {
            id: 2,
            result: Some(crate::vmm::response::Result::Hello(reply)),
        };
        let long = Message {
            kind: Some(Kind::Response(response)),
        };
        let sender = std::thread::spawn(move || {
            send_all(&a, &hello(1), &[]).unwrap();
            send_all(&a, &long, &[a.as_fd()]).unwrap();
            send_all(&a, &hello(3), &[]).unwrap();
        });
        let mut receiver = Receiver::new();
        for expected in [0, 1, 0] {
            let (_, fds) = receive(&b, &mut receiver).unwrap().unwrap();
            assert_eq!(fds.len(), expected);
        }
        sender.join().unwrap();
    }

    #[test]
    fn garbage_is_an_error_and_never_a_large_allocation() {
        for bytes in [&[0xff; 8][..], &[0, 0, 0, 0, 1], &[2, 0, 0, 0, 0xff, 0xff]] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(bytes).unwrap();
            assert!(receive(&b, &mut Receiver::new()).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_connection_closed_in_the_middle_of_a_message_is_an_error() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&encode(&hello(1)).unwrap()[..5]).unwrap();
        drop(a);
        assert!(matches!(receive(&b, &mut Receiver::new()), Err(Error::Truncated)));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_receiver_panic(bytes: Vec<u8>) {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(&bytes).unwrap();
            drop(a);
            let mut receiver = Receiver::new();
            while let Ok(Some(_)) = receive(&b, &mut receiver) {}
        }
    }

    fn tempfile_like() -> OwnedFd {
        rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }
}
