//! The host bridge.

use super::super::{
    config::{ConfigSpace, Header},
    function::PciFunction,
};
use crate::bus::Effect;

/// The function at slot 0: what EDK2's CloudHv platform recognises.
pub(super) struct HostBridge {
    config: ConfigSpace,
}

impl HostBridge {
    pub(super) fn new() -> Self {
        let header = Header {
            vendor: 0x8086,
            device: 0x0d57,
            class: 0x06_00_00,
            ..Header::default()
        };
        Self {
            config: ConfigSpace::new(&header),
        }
    }
}

impl PciFunction for HostBridge {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Effect {
        self.config.write(offset, data);
        Effect::None
    }

    fn read_bar(&mut self, _bar: usize, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&mut self, _bar: usize, _offset: u64, _data: &[u8]) -> Effect {
        Effect::None
    }

    fn bar_moved(&mut self, _bar: usize, _address: Option<u64>) {}

    fn reset(&mut self) {
        self.config.reset();
    }
}
