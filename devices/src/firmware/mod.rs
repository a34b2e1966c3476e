//! Devices that the firmware of a PC finds on QEMU's machines: the configuration device and flash
//! memory. A machine has them only when it boots through firmware.

pub mod flash;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
pub mod fw_cfg;
