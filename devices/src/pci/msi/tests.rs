#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]

use super::*;
use crate::{pci::Header, virtio::testing::MockMsi};

const AT: usize = 0x40;

fn new() -> (MockMsi, ConfigSpace, Msi) {
    let (controller, mut config) = (MockMsi::default(), ConfigSpace::new(&Header::default()));
    let msi = Msi::new(&controller, &mut config).unwrap();
    (controller, config, msi)
}

fn enable(config: &mut ConfigSpace, msi: &mut Msi, data: u16) {
    config.write(AT + ADDRESS, &0xfee0_1000_u32.to_le_bytes());
    config.write(AT + DATA, &data.to_le_bytes());
    config.write(AT + CONTROL, &ENABLE.to_le_bytes());
    msi.apply(config);
}

#[test]
fn message_is_sent_by_an_enabled_bus_master() {
    let (controller, mut config, mut msi) = new();
    assert_eq!(config.read_u16(AT), 0x0005);
    assert_eq!(config.read_u16(AT + CONTROL), 0x0080);
    assert!(!msi.vectors().raise(0));
    enable(&mut config, &mut msi, 7);
    assert!(msi.vectors().raise(0));
    assert_eq!(controller.count(7), 0);
    msi.set_bus_master(true);
    assert_eq!(controller.count(7), 1);
    enable(&mut config, &mut msi, 9);
    assert!(msi.vectors().raise(0));
    assert_eq!((controller.count(7), controller.count(9)), (1, 1));
}

#[test]
fn pending_message_goes_with_the_state() {
    let (_, mut config, mut msi) = new();
    enable(&mut config, &mut msi, 7);
    assert!(msi.vectors().raise(0));
    let (controller, _, mut restored) = new();
    restored.restore(&msi.save(), &config).unwrap();
    assert_eq!(restored.save(), msi.save());
    restored.set_bus_master(true);
    assert_eq!(controller.count(7), 1);
}
