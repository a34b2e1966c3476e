//! A guest that changes its memory faster than it is sent, with vCPUs that stand still for a part of the time and without.

use std::{io::Read as _, sync::mpsc::RecvTimeoutError, time::Instant};

use vm_memory::{Bytes as _, GuestAddress};

use super::{
    snapshot::{Kit, One},
    *,
};
use crate::{
    lifecycle::Machine as _,
    snapshot::saving::{Event, Policy, Purpose, Report, Round},
};

/// Changes each page of 8 MiB, again and again.
const REWRITER: [u8; 23] = [
    0xbf, 0x00, 0x00, 0x40, 0x00, // again: mov edi, 0x400000
    0xb9, 0x00, 0x08, 0x00, 0x00, // mov ecx, 0x800
    0x40, // inc eax
    0x89, 0x07, // next: mov [edi], eax
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 0x1000
    0xe2, 0xf6, // loop next
    0xeb, 0xe9, // jmp again
];
/// Address of these pages. Their first word changes when the guest begins again.
const REWRITTEN: u64 = 0x40_0000;
/// Maximum rate of the receiver, in bytes per millisecond: the 8 MiB take 128 ms.
const BYTES_PER_MS: usize = 64 << 10;
/// Within which 3.75 MiB can be sent.
const DOWNTIME: Duration = Duration::from_millis(60);
/// Within which 64 KiB can be sent: less than the guest changes in a round, however little it runs meanwhile.
const SHORT_DOWNTIME: Duration = Duration::from_millis(1);

/// Time that is made up for, since timers are late.
const LATE: Duration = Duration::from_millis(10);

/// Data between two waits for the guest, in bytes.
const PIECE: usize = 1 << 20;

/// Copies the data from a socket to a file at a limited rate, which does not rise after a stall.
/// `guest_ran` is called after each [`PIECE`], and waits until the guest has run.
fn slowly(mut socket: UnixStream, mut guest_ran: impl FnMut() + Send + 'static) -> thread::JoinHandle<File> {
    thread::spawn(move || {
        let (mut stream, mut due) = (tempfile::tempfile().unwrap(), Instant::now());
        let mut copied = 0;
        let mut piece = vec![0; BYTES_PER_MS];
        loop {
            let length = socket.read(&mut piece).unwrap();
            if length == 0 {
                return stream;
            }
            stream.write_all(&piece[..length]).unwrap();
            copied += length;
            if copied >= PIECE {
                copied = 0;
                guest_ran();
            }
            let takes = Duration::from_millis(1).mul_f64(length as f64 / BYTES_PER_MS as f64);
            let now = Instant::now();
            due = due.max(now.checked_sub(LATE).unwrap_or(now)) + takes;
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    })
}

impl One {
    /// Runs due work until the next notice, like the driver.
    fn next_event(&mut self) -> Event {
        loop {
            let deadline = self.machine.next_deadline();
            let left = deadline.map_or(PATIENCE, |it| it.saturating_duration_since(Instant::now()));
            match self.notices.recv_timeout(left) {
                Ok(Input::Notice(Notice::Snapshot(event))) => return event,
                Err(RecvTimeoutError::Timeout) if deadline.is_some() => self.machine.keep_time().unwrap(),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Sends the machine to a slow receiver.
    fn send_slowly(
        &mut self,
        policy: Policy,
        downtime: Duration,
    ) -> Result<(File, Report, Vec<Round>), Failure> {
        let (near, far) = UnixStream::pair().unwrap();
        let memory = self.machine.ram.memory().clone();
        let mut last = 0_u32;
        // A processor of the host that is busy can stop the guest for a whole round.
        let guest_ran = move || {
            let began = Instant::now();
            let changed = || memory.read_obj::<u32>(GuestAddress(REWRITTEN)).unwrap();
            while policy == Policy::AlwaysSafe && changed() == last {
                assert!(began.elapsed() < PATIENCE, "the guest does not run");
                thread::sleep(Duration::from_millis(1));
            }
            last = changed();
        };
        let stream = slowly(far, guest_ran);
        let purpose = Purpose::Migration { downtime, policy };
        let socket = OwnedFd::from(near);
        self.machine
            .begin_migration(socket.into(), purpose, &vmm_protocol::vmm::Send::default())
            .unwrap();
        let mut rounds = Vec::new();
        loop {
            match self.next_event() {
                Event::Round(round) => {
                    self.machine.throttle(round.throttle).unwrap();
                    rounds.push(round);
                }
                Event::Disks { .. } => panic!("it has none"),
                Event::Ready => {
                    self.machine.pause().unwrap();
                    self.machine.complete_snapshot(Vec::new(), false).unwrap();
                }
                Event::Ended => {
                    let report = self.machine.end_snapshot()?;
                    return Ok((stream.join().unwrap(), report, rounds));
                }
            }
        }
    }

    /// The processor time of the vCPU.
    fn ran(&self) -> Duration {
        let time = self.machine.vcpus.times().next().unwrap().unwrap();
        Duration::from_nanos(time.1)
    }

    /// The part of the next `time` in which the vCPU ran.
    fn busy(&mut self, time: Duration) -> f64 {
        let (ran, began) = (self.ran(), Instant::now());
        while began.elapsed() < time {
            let due = self.machine.next_deadline().unwrap_or(began + time);
            thread::sleep(due.min(began + time).saturating_duration_since(Instant::now()));
            self.machine.keep_time().unwrap();
        }
        (self.ran() - ran).as_secs_f64() / began.elapsed().as_secs_f64()
    }
}

#[test]
fn fast_writer_is_sent_only_with_throttled_vcpus() {
    let kit = Kit::new(&REWRITER);
    let mut one = kit.started();
    let refused = one.send_slowly(Policy::AlwaysSafe, SHORT_DOWNTIME).unwrap_err();
    assert!(refused.message.contains("limit of the downtime"), "{refused:?}");
    assert!(one.machine.throttle.is_none());

    let (stream, report, rounds) = one.send_slowly(Policy::PreferForced, DOWNTIME).unwrap();
    let steps: Vec<_> = rounds.iter().map(|round| round.throttle).collect();
    println!("{report:?} {steps:?}");
    assert_eq!(steps[0], 0, "the first round says nothing of it");
    assert!(steps.is_sorted() && steps.last() >= Some(&20), "{steps:?}");
    assert!(one.machine.throttle.is_none(), "it is paused");
    let mut other = kit.received(stream).unwrap();
    other.machine.resume().unwrap();
    assert!(other.busy(Duration::from_millis(200)) > 0.0, "it goes on there");
    // The source continues without a throttle, if the target does not continue.
    other.machine.halt();
    one.machine.resume().unwrap();
    assert!(one.machine.throttle.is_none() && one.busy(Duration::from_millis(200)) > 0.0);
}

#[test]
fn throttled_vcpus_run_for_their_share_of_the_time() {
    let mut one = Kit::new(&SPIN).started();
    one.machine.throttle(95).unwrap();
    let busy = one.busy(Duration::from_secs(2));
    assert!(busy > 0.0 && busy < 0.4, "it ran for {busy} of the time");
    one.machine.throttle(0).unwrap();
    assert!(one.machine.throttle.is_none() && one.machine.next_deadline().is_none());
    assert!(one.busy(Duration::from_millis(200)) > 0.0);
    // A pause ends it too.
    one.machine.throttle(99).unwrap();
    one.machine.pause().unwrap();
    assert!(one.machine.next_deadline().is_none());
    one.machine.resume().unwrap();
    assert!(one.busy(Duration::from_millis(200)) > 0.0);
}
