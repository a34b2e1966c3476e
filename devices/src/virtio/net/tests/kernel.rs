//! Tests of pairs of queues with an external server, which stands in for vhost-net.

use std::{
    os::fd::BorrowedFd,
    sync::{Mutex, atomic::Ordering},
    time::Instant,
};

use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::{
    component::Component,
    net::{PairServer, ServedRing},
    virtio::{
        chain::Chain,
        fault::DeviceEvent,
        queue::Queue,
        rate::Limits,
        testing::{Area, PATIENCE},
    },
};

/// The kernel's state of a pair that it serves.
struct Serving {
    memory: GuestMemory,
    /// The receive and the transmit queue.
    queues: [Queue; 2],
    calls: [EventFd; 2],
    ring_error: EventFd,
}

#[derive(Default)]
struct State {
    serving: Option<Serving>,
    /// How often it began.
    begun: u32,
    /// It refuses to begin.
    broken: bool,
}

/// Mock of the kernel that serves queues only on request of the test.
#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<State>>);

impl PairServer for Kernel {
    fn start(
        &mut self,
        memory: &GuestMemory,
        features: u64,
        rings: [ServedRing<'_>; 2],
        _tap: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        if state.broken {
            return Err(io::ErrorKind::Unsupported.into());
        }
        assert!(state.serving.is_none());
        let event_idx = features & 1 << 29 != 0;
        let queue = |ring: &ServedRing<'_>| {
            let mut queue = Queue::new(ring.state, 256, event_idx, memory.clone()).unwrap();
            queue.go_on(Some(ring.state.next_avail)).unwrap();
            assert_eq!(
                queue.state().next_used,
                ring.state.next_used,
                "all that was used is shown"
            );
            queue
        };
        let [receive, transmit] = &rings;
        state.begun += 1;
        state.serving = Some(Serving {
            memory: memory.clone(),
            queues: [queue(receive), queue(transmit)],
            calls: [receive.call.try_clone()?, transmit.call.try_clone()?],
            ring_error: receive.error.try_clone()?,
        });
        Ok(())
    }

    fn set_call(&mut self, ring: u32, call: &EventFd) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.serving.as_mut().unwrap().calls[ring as usize] = call.try_clone()?;
        Ok(())
    }

    fn stop(&mut self) -> io::Result<[u16; 2]> {
        let serving = self.0.lock().unwrap().serving.take().unwrap();
        Ok(serving.queues.map(|queue| queue.state().next_avail))
    }
}

impl Kernel {
    fn begun(&self) -> u32 {
        self.0.lock().unwrap().begun
    }

    fn is_serving(&self) -> bool {
        self.0.lock().unwrap().serving.is_some()
    }

    fn wait(&self, serving: bool) {
        let begin = Instant::now();
        while self.is_serving() != serving {
            assert!(begin.elapsed() < PATIENCE, "not {serving} after {PATIENCE:?}");
            std::thread::yield_now();
        }
    }

    /// Takes a packet from the transmit queue.
    fn take(&self) -> Option<Vec<u8>> {
        let mut state = self.0.lock().unwrap();
        let serving = state.serving.as_mut().unwrap();
        let (mut chain, [_, queue]) = (Chain::new(), &mut serving.queues);
        if !queue.pop(&mut chain).unwrap() {
            return None;
        }
        let mut packet = vec![0; chain.readable_len() as usize];
        chain.read(&serving.memory, 0, &mut packet).unwrap();
        queue.add_used(chain.head(), 0).unwrap();
        if queue.needs_interrupt().unwrap() {
            serving.calls[1].write(1).unwrap();
        }
        Some(packet)
    }

    /// Puts a packet into the receive queue.
    fn put(&self, packet: &[u8]) {
        let mut state = self.0.lock().unwrap();
        let serving = state.serving.as_mut().unwrap();
        let (mut chain, [queue, _]) = (Chain::new(), &mut serving.queues);
        assert!(queue.pop(&mut chain).unwrap(), "no buffer");
        chain.write(&serving.memory, 0, packet).unwrap();
        queue.add_used(chain.head(), packet.len() as u32).unwrap();
        if queue.needs_interrupt().unwrap() {
            serving.calls[0].write(1).unwrap();
        }
    }
}

struct Served {
    kernel: Kernel,
    control: NetControl,
    peer: Peer,
    driver: Driver,
}

fn served_with(options: NetOptions) -> Served {
    let (mut peer, mut front) = Peer::with(1, options);
    let kernel = Kernel::default();
    front.serve_by(vec![Box::new(kernel.clone())]);
    let control = front.control();
    peer.drain();
    let mut driver = Driver::new(Rig::new(front));
    driver.start(ALL);
    Served {
        kernel,
        control,
        peer,
        driver,
    }
}

fn served() -> Served {
    let served = served_with(NetOptions::new("eth0", MAC, 1500));
    served.kernel.wait(true);
    served
}

/// A packet each way through the kernel.
fn through_the_kernel(it: &mut Served, number: u64) {
    it.driver
        .submit(TRANSMIT, &[Buffer::Readable(packet(number, 100))]);
    assert_eq!(it.kernel.take(), Some(packet(number, 100)));
    it.driver.wait_used(TRANSMIT);
    it.driver.submit(RECEIVE, &[Buffer::Writable(2000)]);
    it.kernel.put(&packet(number, 200));
    assert_eq!(it.driver.wait_used(RECEIVE).1, packet(number, 200));
}

/// Serves as the other devices of these tests.
struct ByKernel(Peer, Kernel);

impl DeviceUnderTest for ByKernel {
    const FEATURES: u64 = ALL;
    const EAGER_QUEUES: &'static [u16] = &[TRANSMIT, CONTROL];

    /// The kernel fails, so the worker serves, and tries again after each reset.
    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let (mut peer, mut front) = Peer::new();
        let kernel = Kernel::default();
        kernel.0.lock().unwrap().broken = true;
        front.serve_by(vec![Box::new(kernel.clone())]);
        peer.drain();
        (Self(peer, kernel), front)
    }

    fn probe(&mut self, driver: &mut Driver) {
        assert!(!self.1.is_serving());
        exchange(&mut self.0, driver, 0);
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (TRANSMIT, vec![Buffer::Readable(packet(0, 60))])
    }
}

mod by_kernel {
    crate::virtio_device_tests!(super::ByKernel);
}

/// A device that asks for a reset does not keep a snapshot waiting.
fn is_kept(it: &Served) {
    assert!(it.control.keep_queues(true, PATIENCE));
    assert!(!it.kernel.is_serving());
    assert!(it.control.keep_queues(false, PATIENCE));
}

fn works_after_a_reset(it: &mut Served) {
    it.driver.rig.reset_device();
    it.driver.start(ALL);
    it.kernel.wait(true);
    through_the_kernel(it, 1);
}

#[test]
fn the_kernel_serves_packets_and_the_worker_commands() {
    let mut it = served();
    let kicks = |driver: &Driver| driver.rig.device.counters().kicks.load(Ordering::Relaxed);
    let before = kicks(&it.driver);
    for number in 0..300 {
        through_the_kernel(&mut it, number);
    }
    assert_eq!(kicks(&it.driver), before);
    assert_eq!(it.control.served_by_kernel(), 1);
    assert!(command(&mut it.driver, CONTROL, 1, 1, &[0x52, 0x54, 0, 9, 9, 9]));
    assert_eq!(it.kernel.begun(), 1);
}

#[test]
fn a_pause_and_a_reset_take_the_queues_back_and_a_resume_gives_them() {
    let mut it = served();
    through_the_kernel(&mut it, 1);
    // A request that the kernel has not taken yet stays in the ring.
    it.driver.submit(TRANSMIT, &[Buffer::Readable(packet(2, 100))]);
    it.driver.rig.pause();
    assert!(!it.kernel.is_serving() && it.control.served_by_kernel() == 0);
    it.driver.rig.device.resume().unwrap();
    it.kernel.wait(true);
    assert_eq!(it.kernel.take(), Some(packet(2, 100)));
    it.driver.wait_used(TRANSMIT);
    through_the_kernel(&mut it, 3);
    it.driver.rig.reset_device();
    assert!(!it.kernel.is_serving());
    it.driver.start(ALL);
    it.kernel.wait(true);
    through_the_kernel(&mut it, 4);
}

#[test]
fn a_limit_is_kept_by_the_worker_and_taken_off_gives_the_queues_back() {
    let mut it = served();
    it.driver.submit(TRANSMIT, &[Buffer::Readable(packet(1, 100))]);
    it.control.set_transmit_limit(Some(Limiter::new(Limits {
        operations_per_second: 1000,
        ..Limits::default()
    })));
    it.kernel.wait(false);
    // The worker sends the packet that the kernel did not take.
    it.peer.wait_for(0, &packet(1, 100));
    it.driver.wait_used(TRANSMIT);
    exchange(&mut it.peer, &mut it.driver, 0);
    it.control.set_transmit_limit(None);
    it.kernel.wait(true);
    through_the_kernel(&mut it, 2);
}

#[test]
fn while_the_link_is_down_the_worker_drops_packets() {
    let mut it = served();
    it.control.set_link(false);
    it.kernel.wait(false);
    it.driver.request(TRANSMIT, &[Buffer::Readable(packet(1, 100))]);
    assert_eq!((it.control.stats().send_dropped, it.peer.arrived(0)), (1, 0));
    it.control.set_link(true);
    it.kernel.wait(true);
    through_the_kernel(&mut it, 2);
}

#[test]
fn queues_that_are_kept_are_served_here_and_what_is_written_is_marked_dirty() {
    let mut it = served();
    assert!(it.control.keep_queues(true, PATIENCE));
    assert!(!it.kernel.is_serving());
    exchange(&mut it.peer, &mut it.driver, 0);
    // Not by a pause either.
    it.driver.rig.pause();
    it.driver.rig.device.resume().unwrap();
    exchange(&mut it.peer, &mut it.driver, 0);
    assert_eq!(it.kernel.begun(), 1);
    assert!(it.control.keep_queues(false, PATIENCE));
    it.kernel.wait(true);
    through_the_kernel(&mut it, 1);
}

#[test]
fn a_packet_that_waits_for_buffers_is_delivered_before_the_kernel_serves() {
    let mut it = served();
    assert!(it.control.keep_queues(true, PATIENCE));
    // The driver had room for such a packet once, and has not now.
    for _ in 0..2 {
        it.driver.submit(RECEIVE, &[Buffer::Writable(1000)]);
    }
    it.peer.send(&packet(1, 1500));
    for _ in 0..2 {
        it.driver.wait_used(RECEIVE);
    }
    it.driver.submit(RECEIVE, &[Buffer::Writable(1000)]);
    it.peer.send(&packet(2, 1500));
    // Queues have their turns: after two packets of the other one it has taken the packet that has no room.
    for number in 3..5 {
        it.driver
            .request(TRANSMIT, &[Buffer::Readable(packet(number, 100))]);
    }
    assert!(it.control.keep_queues(false, PATIENCE));
    it.driver.request(TRANSMIT, &[Buffer::Readable(packet(5, 100))]);
    assert!(!it.kernel.is_serving());
    it.driver.submit(RECEIVE, &[Buffer::Writable(1000)]);
    let mut received = it.driver.wait_used(RECEIVE).1;
    received.extend(it.driver.wait_used(RECEIVE).1);
    assert_eq!(received[12..20], 2_u64.to_le_bytes());
    it.kernel.wait(true);
    through_the_kernel(&mut it, 3);
}

#[test]
fn a_queue_that_gets_another_vector_interrupts_by_that_one() {
    let mut it = served();
    it.driver.rig.write(Area::Common, 0x16, 2, TRANSMIT.into());
    it.driver.rig.write(Area::Common, 0x1a, 2, 0);
    let before = it.driver.rig.msi.count(0);
    it.driver.rig.msi.wait_for(0, before.max(1));
    let before = it.driver.rig.msi.count(0);
    it.driver.submit(TRANSMIT, &[Buffer::Readable(packet(1, 100))]);
    assert!(it.kernel.take().is_some());
    it.driver.rig.msi.wait_for(0, before + 1);
}

#[test]
fn a_ring_that_the_kernel_finds_corrupt_makes_the_device_ask_for_a_reset() {
    let mut it = served();
    let event = it
        .kernel
        .0
        .lock()
        .unwrap()
        .serving
        .as_ref()
        .unwrap()
        .ring_error
        .try_clone()
        .unwrap();
    event.write(1).unwrap();
    it.driver.wait_needs_reset();
    assert!(matches!(it.driver.rig.sink.wait(), DeviceEvent::NeedsReset(_)));
    is_kept(&it);
    works_after_a_reset(&mut it);
}

#[test]
fn a_corrupt_control_queue_ends_the_kernels_service_too() {
    let mut it = served();
    let control = usize::from(CONTROL);
    it.driver.rings[control].set_avail_index(&it.driver.rig.memory, 0x7777);
    it.driver.kick(CONTROL);
    it.driver.wait_needs_reset();
    is_kept(&it);
    works_after_a_reset(&mut it);
}

#[test]
fn a_kernel_that_refuses_is_asked_again_after_a_reset_and_the_worker_serves_until_then() {
    let mut it = served();
    it.kernel.0.lock().unwrap().broken = true;
    it.driver.rig.pause();
    it.driver.rig.device.resume().unwrap();
    exchange(&mut it.peer, &mut it.driver, 0);
    it.kernel.0.lock().unwrap().broken = false;
    works_after_a_reset(&mut it);
}

#[test]
fn pairs_that_the_driver_does_not_use_are_not_served() {
    let (mut peer, mut front) = Peer::with(4, NetOptions::new("eth0", MAC, 1500));
    peer.drain();
    let kernels: Vec<Kernel> = (0..4).map(|_| Kernel::default()).collect();
    front.serve_by(
        kernels
            .iter()
            .map(|it| Box::new(it.clone()) as Box<dyn PairServer>)
            .collect(),
    );
    let mut driver = Driver::new(Rig::new(front));
    driver.start(ALL);
    kernels[0].wait(true);
    assert!(kernels[1..].iter().all(|kernel| !kernel.is_serving()));
    assert!(command(&mut driver, 8, 4, 0, &[3, 0]));
    kernels[1..3].iter().for_each(|kernel| kernel.wait(true));
    assert!(!kernels[3].is_serving());
    assert!(command(&mut driver, 8, 4, 0, &[1, 0]));
    kernels[1..3].iter().for_each(|kernel| kernel.wait(false));
    assert!(kernels[0].is_serving());
}
