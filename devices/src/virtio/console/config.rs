//! `struct virtio_console_config` (virtio 1.3, 5.3.4).

/// Length in bytes: columns, rows, number of ports, emergency write.
pub(super) const LENGTH: usize = 12;
/// Offset of the emergency write.
pub(super) const EMERG_WRITE: usize = 8;

/// Size of the terminal in characters; zero while the size is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Config {
    pub columns: u16,
    pub rows: u16,
}

impl Config {
    /// As the driver reads it.
    pub fn encode(self) -> [u8; LENGTH] {
        let [c0, c1] = self.columns.to_le_bytes();
        let [r0, r1] = self.rows.to_le_bytes();
        // One port; it is a field of VIRTIO_CONSOLE_F_MULTIPORT, which is not offered.
        [c0, c1, r0, r1, 1, 0, 0, 0, 0, 0, 0, 0]
    }
}
