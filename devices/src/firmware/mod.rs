//! Devices that the firmware of a PC finds on QEMU's machines: the configuration device and flash
//! memory. A machine has them only when it boots through firmware.

pub mod flash;
pub mod fw_cfg;
