use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::sys::Iovecs;

use super::{super::config::offloads, *};
use crate::{
    component::Component,
    net::Offloads,
    virtio::{
        fault::{Counters, DeviceEvent},
        testing::{Area, Rig},
    },
};

#[test]
fn the_configuration_tells_address_link_and_mtu() {
    let (_peer, driver) = running(ALL);
    let config = |offset, width| driver.rig.read(Area::Device, offset, width);
    assert_eq!(config(0, 4) | config(4, 2) << 32, 0x0302_0100_5452);
    assert_eq!((config(6, 2), config(8, 2), config(10, 2)), (1, 1, 1500));
    driver.rig.write(Area::Device, 0, 4, 0);
    assert_eq!(config(0, 1), 0x52);
}

#[test]
fn packet_longer_than_its_only_buffer_is_dropped() {
    let (peer, control, mut driver) = controlled(ALL & !MRG_RXBUF);
    // A longer buffer before makes no difference.
    driver.submit(RECEIVE, &[Buffer::Writable(70_000)]);
    peer.send(&packet(1, 5000));
    assert_eq!(driver.wait_used(RECEIVE).0.written, 5012);
    driver.submit(RECEIVE, &[Buffer::Writable(1000)]);
    peer.send(&packet(2, 989));
    peer.send(&packet(3, 988));
    let mut sent = packet(3, 988);
    sent[10] = 1;
    assert!(driver.wait_used(RECEIVE).1 == sent);
    assert_eq!(control.stats().receive_dropped, 1);
    assert_eq!(control.stats().received, 2);
}

#[test]
fn packets_wait_for_buffers_and_come_with_few_interrupts() {
    let (peer, mut driver) = running(ALL);
    for number in 0..50 {
        peer.send(&packet(number, 60));
    }
    assert!(driver.try_used(RECEIVE).is_none());
    for _ in 0..60 {
        driver.offer(RECEIVE, &[Buffer::Writable(2000)]);
    }
    let interrupts = || driver.rig.device.counters().interrupts.load(Ordering::Relaxed);
    let before = interrupts();
    driver.rig.write(Area::Notify, 0, 2, 0);
    let used = GuestAddress(driver.rings[0].used + 2);
    let all_came = || driver.rig.memory.load::<u16>(used, Ordering::Acquire).unwrap() == 50;
    assert!(driver.rig.msi.wait_until(all_came));
    assert!(interrupts() - before <= 5);
    for number in 0..50 {
        assert_eq!(driver.wait_used(RECEIVE).1[12..20], u64::to_le_bytes(number));
    }
}

#[test]
fn a_host_that_takes_no_more_makes_packets_wait_and_loses_none() {
    let (mut peer, control, mut driver) = controlled(ALL);
    for number in 0..200 {
        driver.offer(TRANSMIT, &[Buffer::Readable(packet(number, 1500))]);
    }
    driver.kick(TRANSMIT);
    driver.wait_used(TRANSMIT);
    for number in 0..200 {
        assert_eq!(peer.receive(), packet(number, 1500));
    }
    while driver.under_way(TRANSMIT) > 0 {
        driver.wait_used(TRANSMIT);
    }
    // And again, now that it has waited once.
    peer.drain();
    for number in 200..300 {
        driver.offer(TRANSMIT, &[Buffer::Readable(packet(number, 1500))]);
    }
    driver.kick(TRANSMIT);
    peer.wait_for(0, &packet(299, 1500));
    while driver.under_way(TRANSMIT) > 0 {
        driver.wait_used(TRANSMIT);
    }
    assert_eq!((control.stats().sent, control.stats().send_dropped), (300, 0));
    assert_eq!(control.stats().sent_bytes, 300 * 1500);
}

#[test]
fn buffers_that_were_taken_and_not_used_survive_a_pause() {
    let (peer, mut driver) = running(ALL);
    for _ in 0..100 {
        driver.offer(RECEIVE, &[Buffer::Writable(2000)]);
    }
    driver.kick(RECEIVE);
    for round in 0..80 {
        peer.send(&packet(round, 1000));
        if round % 3 == 0 {
            driver.rig.pause();
            driver.rig.device.resume().unwrap();
        }
        assert_eq!(driver.wait_used(RECEIVE).1[12..20], round.to_le_bytes());
    }
    assert_eq!(driver.under_way(RECEIVE), 20);
}

#[test]
fn offloads_follow_what_was_negotiated_and_end_with_a_reset() {
    let (peer, mut driver) = running(ALL);
    driver.rig.pause();
    let set = |peer: &Peer| peer.told.last_offloads();
    assert_eq!(set(&peer), Some(Offloads::all()));
    driver.rig.device.resume().unwrap();
    driver.rig.reset_device();
    assert_eq!(set(&peer), Some(Offloads::empty()));
    driver.start(GUEST_CSUM);
    driver.rig.pause();
    assert_eq!(set(&peer), Some(Offloads::CHECKSUM));
    driver.rig.device.resume().unwrap();
    // Segments without checksums make no sense.
    assert_eq!(offloads(GUEST_TSO4), Offloads::empty());
    assert_eq!(
        offloads(GUEST_CSUM | GUEST_TSO4),
        Offloads::CHECKSUM | Offloads::TSO4
    );
}

#[test]
fn packets_that_make_no_sense_are_dropped_and_counted_and_the_next_is_sent() {
    let (peer, control, mut driver) = controlled(ALL);
    let bad_gso = [&[0, 0xff][..], &packet(1, 60)[2..]].concat();
    let bad_checksum = [&[1, 0, 0, 0, 0, 0, 0xff, 0xff][..], &packet(1, 60)[8..]].concat();
    let requests: [&[Buffer]; 7] = [
        &[Buffer::Readable(bad_gso)],
        &[Buffer::Readable(bad_checksum)],
        &[Buffer::Readable(vec![0; 11])],
        &[Buffer::Readable(vec![0; 12])],
        &[Buffer::Readable(packet(1, 13))],
        &[Buffer::Readable(packet(1, 65_600))],
        &[Buffer::Writable(100)],
    ];
    for request in requests {
        driver.request(TRANSMIT, request);
    }
    driver.request(TRANSMIT, &[Buffer::Readable(packet(2, 60))]);
    assert_eq!(peer.receive(), packet(2, 60));
    assert_eq!(control.stats().send_dropped, 7);
    assert_eq!(
        driver.rig.device.counters().guest_faults.load(Ordering::Relaxed),
        7
    );
    assert!(driver.rig.sink.events().is_empty());
}

#[test]
fn a_packet_in_as_many_pieces_as_a_chain_may_have_is_sent() {
    let (peer, mut driver) = running(ALL);
    driver.indirect = true;
    let sent = packet(1, 1012);
    let dust: Vec<_> = sent.iter().map(|byte| Buffer::Readable(vec![*byte])).collect();
    driver.request(TRANSMIT, &dust);
    assert_eq!(peer.receive(), sent);
}

#[test]
fn a_packet_longer_than_the_buffers_left_waits_for_more_and_one_that_never_fits_is_dropped() {
    let (peer, control, mut driver) = controlled(ALL);
    driver.submit(RECEIVE, &[Buffer::Writable(1500)]);
    driver.submit(RECEIVE, &[Buffer::Writable(1500)]);
    peer.send(&packet(1, 2900));
    assert_eq!(
        (
            driver.wait_used(RECEIVE).0.written,
            driver.wait_used(RECEIVE).0.written
        ),
        (1500, 1412)
    );
    driver.submit(RECEIVE, &[Buffer::Writable(1500)]);
    peer.send(&packet(2, 2900));
    peer.send(&packet(3, 60));
    assert!(driver.try_used(RECEIVE).is_none());
    driver.submit(RECEIVE, &[Buffer::Writable(1500)]);
    assert_eq!(
        (
            driver.wait_used(RECEIVE).0.written,
            driver.wait_used(RECEIVE).0.written
        ),
        (1500, 1412)
    );
    driver.submit(RECEIVE, &[Buffer::Writable(1500)]);
    assert_eq!(driver.wait_used(RECEIVE).0.written, 72);
    assert_eq!(control.stats().receive_dropped, 0);
    peer.send(&packet(4, 20_000));
    peer.send(&packet(5, 60));
    driver.submit(RECEIVE, &[Buffer::Writable(1500)]);
    assert_eq!(driver.wait_used(RECEIVE).1[12..20], 5_u64.to_le_bytes());
    assert_eq!(control.stats().receive_dropped, 1);
}

#[test]
fn a_receive_buffer_too_short_for_a_header_comes_back_empty() {
    let (peer, mut driver) = running(ALL);
    driver.submit(RECEIVE, &[Buffer::Writable(11)]);
    driver.submit(RECEIVE, &[Buffer::Writable(2000)]);
    peer.send(&packet(1, 60));
    assert_eq!(driver.wait_used(RECEIVE).0.written, 0);
    assert_eq!(driver.wait_used(RECEIVE).0.written, 72);
}

/// A tap whose interface is down, or gone: always ready, never of use.
struct Down {
    ready: vmm_sys_util::eventfd::EventFd,
    fd: OwnedFd,
    calls: Arc<AtomicU64>,
}

impl AsFd for Down {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl NetBackend for Down {
    fn capabilities(&self) -> Offloads {
        Offloads::all()
    }
    fn receive(&self, _buffers: &Iovecs) -> io::Result<usize> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Err(io::Error::from_raw_os_error(libc::EBADFD))
    }
    fn receive_into(&self, _buffer: &mut [u8]) -> io::Result<usize> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Err(io::Error::from_raw_os_error(libc::EBADFD))
    }
    fn send(&self, _header: &[u8], _packet: &mut Iovecs) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }
    fn set_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        self.ready.write(1)
    }
    fn set_attached(&self, _attached: bool) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_tap_that_is_down_drops_packets_is_reported_and_is_not_asked_over_and_over() {
    let calls = Arc::<AtomicU64>::default();
    let (fd, other) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&other, b"x").unwrap();
    let down = Down {
        ready: vmm_sys_util::eventfd::EventFd::new(0).unwrap(),
        fd,
        calls: Arc::clone(&calls),
    };
    let mut driver = Driver::new(Rig::new(Box::new(Net::new(
        vec![Box::new(down)],
        NetOptions::new("eth0", MAC, 1500),
    ))));
    driver.start(ALL);
    for _ in 0..20 {
        driver.submit(RECEIVE, &[Buffer::Writable(2000)]);
    }
    assert!(matches!(driver.rig.sink.wait(), DeviceEvent::BackendError(_)));
    for _ in 0..100 {
        driver.request(TRANSMIT, &[Buffer::Readable(packet(1, 60))]);
    }
    assert!(calls.load(Ordering::Relaxed) <= 16 * 25, "{calls:?}");
    assert!(driver.rig.sink.events().len() <= 5);
    driver.rig.reset_device();
}

/// A tap that takes every packet, and notes how many interrupts the driver had got when it took the one with the number `AT`.
struct Noting {
    fd: OwnedFd,
    sent: AtomicU64,
    counters: Arc<OnceLock<Arc<Counters>>>,
    noted: Arc<AtomicU64>,
}

/// The first one is 0.
const AT: u64 = 100;

impl AsFd for Noting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl NetBackend for Noting {
    fn capabilities(&self) -> Offloads {
        Offloads::all()
    }
    fn receive(&self, _buffers: &Iovecs) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
    fn receive_into(&self, _buffer: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
    fn send(&self, _header: &[u8], _packet: &mut Iovecs) -> io::Result<()> {
        if self.sent.fetch_add(1, Ordering::Relaxed) == AT {
            let counters = self.counters.get().unwrap();
            self.noted
                .store(counters.interrupts.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Ok(())
    }
    fn set_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Ok(())
    }
    fn set_attached(&self, _attached: bool) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_driver_is_told_of_packets_that_were_sent_while_others_of_the_batch_are_being_sent() {
    let (fd, _other) = rustix::pipe::pipe().unwrap();
    let (counters, noted) = (Arc::<OnceLock<_>>::default(), Arc::<AtomicU64>::default());
    let tap = Noting {
        fd,
        sent: AtomicU64::new(0),
        counters: Arc::clone(&counters),
        noted: Arc::clone(&noted),
    };
    let front = Net::new(vec![Box::new(tap)], NetOptions::new("eth0", MAC, 1500));
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    let count = counters.get_or_init(|| Arc::clone(driver.rig.device.counters()));
    driver.start(ALL);
    driver.request(TRANSMIT, &[Buffer::Readable(packet(0, 60))]);
    let before = count.interrupts.load(Ordering::Relaxed);
    // One batch.
    for number in 1..120 {
        driver.offer(TRANSMIT, &[Buffer::Readable(packet(number, 60))]);
    }
    driver.kick(TRANSMIT);
    while driver.under_way(TRANSMIT) > 0 {
        driver.wait_used(TRANSMIT);
    }
    assert!(noted.load(Ordering::Relaxed) > before, "{noted:?} and {before}");
}

proptest! {
    #[test]
    fn packets_of_any_length_arrive_whole_in_buffers_of_any_length(
        lengths in proptest::collection::vec(14_usize..20_000, 1..12),
        buffers in proptest::collection::vec(12_u32..3000, 30..120),
        mergeable: bool,
    ) {
        let (peer, mut driver) = running(if mergeable { ALL } else { ALL & !MRG_RXBUF });
        let scale = if mergeable { 1 } else { 30 };
        let mut offered = VecDeque::new();
        for buffer in &buffers {
            driver.submit(RECEIVE, &[Buffer::Writable(buffer * scale)]);
            offered.push_back((buffer * scale) as usize);
        }
        for (number, length) in lengths.into_iter().enumerate() {
            let mut sent = packet(number as u64, length);
            let mut count = 0_u8;
            let mut room = 0;
            while room < sent.len() && (mergeable || count == 0) {
                let Some(next) = offered.pop_front() else { return Ok(()) };
                room += next;
                count += 1;
            }
            if room < sent.len() {
                return Ok(());
            }
            peer.send(&sent);
            sent[10] = count;
            let mut received = Vec::new();
            for _ in 0..count {
                received.extend(driver.wait_used(RECEIVE).1);
            }
            prop_assert!(received == sent);
        }
    }
}
