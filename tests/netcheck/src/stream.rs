//! One stream of packets in one direction: UDP datagrams with a window, or records over TCP.
//!
//! A window is [`WINDOW`] datagrams and a probe, which the receiver acknowledges. At most two
//! windows are under way at once, and datagrams are not repeated. Therefore an interruption of any
//! length loses at most [`AHEAD`] windows.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, UdpSocket},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::net::sockopt;

use crate::{
    data::{Arrived, Counts, Sizes, TRAIN, fill},
    sys,
};

/// Datagrams of a window, a multiple of [`TRAIN`]. Two windows of four streams are fewer packets than a tap and the ring behind it hold.
pub const WINDOW: u32 = 63;
/// The same of datagrams that are larger than the MTU: one of 64 KiB is 45 packets.
pub const LARGE_WINDOW: u32 = 3;
/// Windows that are sent before the first of them has to be acknowledged.
pub const AHEAD: u32 = 2;
/// Marks a probe instead of a sequence number; the other bits are the number of the window.
const PROBE: u32 = 1 << 31;
/// A probe is sent again when it is not acknowledged for this long.
const AGAIN: Duration = Duration::from_millis(250);
/// Time after the end of a stream during which missing packets may arrive. Such a packet is late,
/// not lost.
const LINGER: Duration = Duration::from_secs(5);
/// How long the way may be interrupted.
const PATIENCE: Duration = Duration::from_secs(240);
/// Room in a socket's buffers, so that no packet is lost there.
const BUFFER: usize = 16 << 20;
/// The largest datagram.
pub const LARGEST: usize = 65_507;

/// Datagrams of all streams of this process: those sent that were acknowledged, and those received.
static PROGRESS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// How many datagrams were acknowledged, and how many received.
pub fn progress() -> [u64; 2] {
    PROGRESS.each_ref().map(|count| count.load(Ordering::Relaxed))
}

/// What is sent.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How many packets; 0: until the receiver says that it is enough.
    pub packets: u32,
    /// Their sizes.
    pub sizes: Sizes,
    /// Datagrams of a window.
    pub window: u32,
}

/// Makes room in a socket's buffers, and has it wake up from time to time.
pub fn prepare(socket: &UdpSocket) -> Result<()> {
    sockopt::set_socket_recv_buffer_size_force(socket, BUFFER).context("the size of a receive buffer")?;
    socket.set_read_timeout(Some(AGAIN / 5))?;
    Ok(())
}

fn idle(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// Sends datagrams `to` the receiver until they are as many as planned, or `enough` is set here or at the receiver.
pub fn send(socket: &UdpSocket, to: SocketAddr, plan: Plan, enough: &AtomicBool) -> Result<Counts> {
    let mut counts = Counts::default();
    let (mut window, mut acknowledged, mut over) = (0_u32, 0_u32, false);
    let mut buffer = vec![0; LARGEST];
    let mut next = 0;
    while !over {
        let last = if plan.packets == 0 {
            PROBE - 1
        } else {
            plan.packets
        };
        // The first is a probe alone: a group that the receiver joined has to reach its NIC.
        let end = if window == 0 {
            0
        } else {
            (next + plan.window).min(last)
        };
        while next < end {
            next += send_next(socket, to, plan.sizes, next..end, &mut buffer, &mut counts)?;
        }
        window += 1;
        over = next == last || enough.load(Ordering::Relaxed);
        // The first and the last are waited for too.
        let wanted = if over || window == 1 {
            window
        } else {
            window.saturating_sub(AHEAD - 1)
        };
        let began = Instant::now();
        let mut asked = None;
        loop {
            if asked.is_none_or(|asked: Instant| asked.elapsed() >= AGAIN) {
                counts.again += u64::from(asked.is_some());
                // When there is no way at the moment, it is tried again.
                let _ = socket.send_to(&(PROBE | window).to_be_bytes(), to);
                asked = Some(Instant::now());
            }
            if acknowledged >= wanted {
                break;
            }
            ensure!(began.elapsed() < PATIENCE, "window {window} is not acknowledged");
            let mut answer = [0; 5];
            match socket.recv(&mut answer) {
                Ok(5) => {
                    let [number @ .., stop] = answer;
                    let number = u32::from_be_bytes(number);
                    let fresh = number.saturating_sub(acknowledged) * plan.window;
                    PROGRESS[0].fetch_add(fresh.into(), Ordering::Relaxed);
                    acknowledged = acknowledged.max(number);
                    if stop == 1 {
                        enough.store(true, Ordering::Relaxed);
                    }
                }
                Ok(_) => {}
                Err(error) if idle(&error) => {}
                Err(error) => return Err(error).context("receive an acknowledgement"),
            }
        }
    }
    counts.sent = u64::from(next);
    Ok(counts)
}

/// Sends the next datagram, or a train of them; how many these were.
fn send_next(
    socket: &UdpSocket,
    to: SocketAddr,
    sizes: Sizes,
    range: std::ops::Range<u32>,
    buffer: &mut [u8],
    counts: &mut Counts,
) -> Result<u32> {
    let size = sizes.of(range.start);
    let count = if sizes.trains {
        TRAIN.min(range.end - range.start)
    } else {
        1
    };
    let bytes = &mut buffer[..size * count as usize];
    if size > 0 {
        for (packet, sequence) in bytes.chunks_exact_mut(size).zip(range) {
            fill(packet, sequence);
        }
    }
    if sizes.trains {
        sys::set_segment(socket, size)?;
    }
    let began = Instant::now();
    while let Err(error) = socket.send_to(bytes, to) {
        // Without a cable or a neighbor there is no way for a while, and a device may have no room.
        let passing = [
            libc::ENETDOWN,
            libc::ENETUNREACH,
            libc::EHOSTUNREACH,
            libc::EHOSTDOWN,
            libc::ENOBUFS,
        ];
        let passes = error
            .raw_os_error()
            .is_some_and(|number| passing.contains(&number));
        ensure!(
            passes && began.elapsed() < PATIENCE,
            "send {count} times {size} bytes: {error}"
        );
        thread::sleep(Duration::from_millis(10));
    }
    if sizes.trains {
        // Probes are sent alone.
        sys::set_segment(socket, 0)?;
        counts.in_trains += u64::from(count);
    }
    Ok(count)
}

/// Receives datagrams until it is `over`, with how many were sent, and acknowledges windows to `peer`; with `enough`, which the sender then hears.
pub fn receive(
    socket: &UdpSocket,
    peer: SocketAddr,
    sizes: Sizes,
    over: &OnceLock<u64>,
    enough: &AtomicBool,
) -> Result<Arrived> {
    let mut arrived = Arrived::new(sizes);
    let mut buffer = vec![0; LARGEST + 1];
    let mut quiet = None;
    loop {
        // Read before `recv`, so that the socket is drained before the end counts.
        let sent = over.get();
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if idle(&error) => {
                if let Some(sent) = sent {
                    let since = *quiet.get_or_insert_with(Instant::now);
                    if arrived.received() >= *sent || since.elapsed() >= LINGER {
                        return Ok(arrived);
                    }
                }
                continue;
            }
            Err(error) => return Err(error).context("receive a datagram"),
        };
        let packet = &buffer[..length];
        match packet.first_chunk().map(|number| u32::from_be_bytes(*number)) {
            Some(number) if number & PROBE != 0 && length == 4 => {
                let mut answer = [0; 5];
                answer[..4].copy_from_slice(&(number ^ PROBE).to_be_bytes());
                answer[4] = enough.load(Ordering::Relaxed).into();
                // One that is lost is asked for again.
                let _ = socket.send_to(&answer, peer);
            }
            _ => {
                let late = quiet.map(|since: Instant| since.elapsed());
                arrived.take(packet, late);
                PROGRESS[1].fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Writes records of all sizes: their length, then a packet. `enough` ends them.
pub fn write(mut stream: impl Write, plan: Plan, enough: &AtomicBool) -> Result<Counts> {
    let mut record = vec![0; 4 + plan.sizes.max];
    let mut sent = 0;
    while plan.packets == 0 || sent < plan.packets {
        if plan.packets == 0 && enough.load(Ordering::Relaxed) {
            break;
        }
        let size = plan.sizes.of(sent);
        let record = &mut record[..4 + size];
        let (length, packet) = record.split_at_mut(4);
        length.copy_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
        fill(packet, sent);
        stream.write_all(record).context("write a record")?;
        sent += 1;
    }
    stream
        .write_all(&u32::MAX.to_be_bytes())
        .context("write the end")?;
    Ok(Counts {
        sent: sent.into(),
        ..Counts::default()
    })
}

/// Reads records up to their end.
pub fn read(mut stream: impl Read, sizes: Sizes) -> Result<Arrived> {
    let mut arrived = Arrived::new(sizes);
    let mut packet = Vec::new();
    loop {
        let mut length = [0; 4];
        stream
            .read_exact(&mut length)
            .context("read the length of a record")?;
        let length = u32::from_be_bytes(length);
        if length == u32::MAX {
            return Ok(arrived);
        }
        ensure!(
            length as usize <= sizes.max,
            "a record of {length} bytes: the stream is damaged"
        );
        packet.resize(length as usize, 0);
        stream.read_exact(&mut packet).context("read a record")?;
        arrived.take(&packet, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_way_loses_and_doubles_is_counted() {
        let [sender, way, receiver] = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
        for socket in [&sender, &way, &receiver] {
            prepare(socket).expect("buffers");
        }
        let [from, through, to] =
            [&sender, &way, &receiver].map(|socket| socket.local_addr().expect("address"));
        let plan = Plan {
            packets: 10 * WINDOW,
            sizes: Sizes {
                max: 1472,
                trains: false,
            },
            window: WINDOW,
        };
        let (over, enough) = (OnceLock::new(), AtomicBool::new(false));
        let arrived = thread::scope(|scope| {
            let receiving = scope.spawn(|| receive(&receiver, from, plan.sizes, &over, &enough));
            scope.spawn(|| {
                let mut buffer = [0; 2000];
                while over.get().is_none() {
                    let Ok(length) = way.recv(&mut buffer) else {
                        continue;
                    };
                    let number = buffer
                        .first_chunk()
                        .map_or(0, |number| u32::from_be_bytes(*number));
                    // Probes pass, and so do packets without a number.
                    let times = match number {
                        _ if length < 5 => 1,
                        number if number % 100 == 7 => 0,
                        number if number % 100 == 9 => 2,
                        _ => 1,
                    };
                    for _ in 0..times {
                        way.send_to(&buffer[..length], to).expect("forward");
                    }
                }
            });
            let sent = send(&sender, through, plan, &enough).expect("send");
            over.set(sent.sent).expect("it ends once");
            let arrived = receiving.join().expect("the receiver").expect("receive");
            arrived.counts(&sent)
        });
        let expected = Counts {
            sent: 630,
            received: 623,
            lost: 7,
            first_lost: Some(7),
            doubled: 7,
            ..Counts::default()
        };
        assert_eq!(Counts { again: 0, ..arrived }, expected);
    }
}
