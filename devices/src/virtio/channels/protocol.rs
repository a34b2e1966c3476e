//! Control messages (virtio 1.3, 5.3.6.2).

/// Length of a message without a name, in bytes.
pub(super) const LENGTH: usize = 8;

/// Events of control messages.
pub(super) mod event {
    /// From the driver: it can use the device (value 1) or not (0).
    pub const DEVICE_READY: u16 = 0;
    /// To the driver: there is this port.
    pub const DEVICE_ADD: u16 = 1;
    /// From the driver: it can use the port (value 1) or not (0).
    pub const PORT_READY: u16 = 3;
    /// In both directions: the other side has the port open (value 1) or not (0).
    pub const PORT_OPEN: u16 = 6;
    /// To the driver: the name of the port, which follows the message.
    pub const PORT_NAME: u16 = 7;
}

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Control {
    /// Number of the port.
    pub id: u32,
    pub event: u16,
    pub value: u16,
}

impl Control {
    pub fn decode(raw: [u8; LENGTH]) -> Self {
        let [i0, i1, i2, i3, e0, e1, v0, v1] = raw;
        Self {
            id: u32::from_le_bytes([i0, i1, i2, i3]),
            event: u16::from_le_bytes([e0, e1]),
            value: u16::from_le_bytes([v0, v1]),
        }
    }

    /// The message, with `name` behind it.
    pub fn encode(self, name: &str) -> Vec<u8> {
        let mut raw = Vec::with_capacity(LENGTH.saturating_add(name.len()));
        raw.extend(self.id.to_le_bytes());
        raw.extend(self.event.to_le_bytes());
        raw.extend(self.value.to_le_bytes());
        raw.extend(name.as_bytes());
        raw
    }
}
