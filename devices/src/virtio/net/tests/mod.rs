mod combinations;
mod commands;
mod headers;
mod kernel;
mod limits;
mod link;
mod packets;
mod pairs;
mod peer;

use peer::{Peer, packet};

use super::*;
use crate::virtio::{
    device::VirtioDevice,
    testing::{Buffer, Driver, Rig, suite::DeviceUnderTest},
};

/// All features but those of the rings.
const ALL: u64 = !(3 << 28);
const CSUM: u64 = 1;
const GUEST_CSUM: u64 = 1 << 1;
const GUEST_TSO4: u64 = 1 << 7;
const GUEST_TSO6: u64 = 1 << 8;
const GUEST_ECN: u64 = 1 << 9;
const HOST_TSO4: u64 = 1 << 11;
const HOST_TSO6: u64 = 1 << 12;
const HOST_ECN: u64 = 1 << 13;
const MRG_RXBUF: u64 = 1 << 15;
const CTRL_VQ: u64 = 1 << 17;
const MQ: u64 = 1 << 22;
const GUEST_USO: u64 = 3 << 54;
const HOST_USO: u64 = 1 << 56;

const MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];

/// Queues of the first pair, and the control queue of an interface with one pair.
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const CONTROL: u16 = 2;

fn running(features: u64) -> (Peer, Driver) {
    let (peer, _, driver) = controlled(features);
    (peer, driver)
}

/// The same with the interface's control.
fn controlled(features: u64) -> (Peer, NetControl, Driver) {
    let (peer, front) = Peer::new();
    let control = front.control();
    let mut driver = Driver::new(Rig::new(front));
    driver.start(features);
    (peer, control, driver)
}

/// Gives a command to the device; says whether it was carried out.
fn command(driver: &mut Driver, queue: u16, class: u8, number: u8, data: &[u8]) -> bool {
    let parts = [
        Buffer::Readable(vec![class, number]),
        Buffer::Readable(data.to_vec()),
        Buffer::Writable(1),
    ];
    let (used, answer) = driver.request(queue, &parts);
    assert_eq!(used.written, 1);
    answer == [0]
}

/// One packet each way over a pair.
fn exchange(peer: &mut Peer, driver: &mut Driver, pair: u16) {
    let (receive, transmit) = (pair * 2, pair * 2 + 1);
    let number = peer.next();
    let out = packet(number, 100);
    let parts = [
        Buffer::Readable(out[..12].into()),
        Buffer::Readable(out[12..].into()),
    ];
    driver.request(transmit, &parts);
    peer.wait_for(pair, &out);
    driver.submit(receive, &[Buffer::Writable(12), Buffer::Writable(2000)]);
    let mut incoming = packet(number | 1 << 32, 200);
    peer.send_to(pair, &incoming);
    incoming[10] = 1;
    let (used, written) = driver.wait_used(receive);
    assert_eq!((used.written, written), (212, incoming));
}

/// An interface as drivers found it before there was a control queue.
struct Plain(Peer);

impl DeviceUnderTest for Plain {
    const FEATURES: u64 = ALL;
    const EAGER_QUEUES: &'static [u16] = &[TRANSMIT];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let options = NetOptions {
            control: false,
            offloads: Offloads::all() - Offloads::USO,
            ..NetOptions::new("eth0", MAC, 1500)
        };
        let (mut peer, front) = Peer::with(1, options);
        peer.drain();
        (Self(peer), front)
    }

    fn probe(&mut self, driver: &mut Driver) {
        exchange(&mut self.0, driver, 0);
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (TRANSMIT, vec![Buffer::Readable(packet(0, 60))])
    }
}

mod plain {
    crate::virtio_device_tests!(super::Plain);
    crate::virtio_saved_device_tests!(super::Plain, "virtio-net");
}

/// An interface with one pair of queues and a control queue, to whose driver something was said.
struct Single(Peer);

impl DeviceUnderTest for Single {
    const FEATURES: u64 = ALL;
    const EAGER_QUEUES: &'static [u16] = &[TRANSMIT, CONTROL];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let (mut peer, front) = Peer::new();
        peer.drain();
        (Self(peer), front)
    }

    fn probe(&mut self, driver: &mut Driver) {
        exchange(&mut self.0, driver, 0);
        if driver.features & CTRL_VQ != 0 {
            // A group, a VLAN and another address.
            let tables = [&[0, 0, 0, 0][..], &[1, 0, 0, 0], &[0x33, 0x33, 0, 0, 0, 1]].concat();
            assert!(command(driver, CONTROL, 1, 0, &tables));
            assert!(command(driver, CONTROL, 2, 0, &[7, 0]));
            assert!(command(driver, CONTROL, 1, 1, &[0x52, 0x54, 0, 9, 9, 9]));
        }
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (TRANSMIT, vec![Buffer::Readable(packet(0, 60))])
    }
}

mod single {
    crate::virtio_device_tests!(super::Single);
    crate::virtio_saved_device_tests!(super::Single, "virtio-net-control");
}

/// An interface with four pairs of queues.
struct Four(Peer);

impl DeviceUnderTest for Four {
    const FEATURES: u64 = ALL;
    const EAGER_QUEUES: &'static [u16] = &[1, 3, 5, 7, 8];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let (mut peer, front) = Peer::with(4, NetOptions::new("eth0", MAC, 1500));
        peer.drain();
        (Self(peer), front)
    }

    fn probe(&mut self, driver: &mut Driver) {
        exchange(&mut self.0, driver, 0);
        if driver.features & MQ != 0 {
            assert!(command(driver, 8, 4, 0, &[4, 0]));
            for pair in 0..4 {
                exchange(&mut self.0, driver, pair);
            }
        }
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (TRANSMIT, vec![Buffer::Readable(packet(0, 60))])
    }
}

mod four {
    crate::virtio_device_tests!(super::Four);
    crate::virtio_saved_device_tests!(super::Four, "virtio-net-4-pairs");
}
