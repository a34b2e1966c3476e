//! Saved state of the controller and its drives. The commands that are issued are part of it, and are fetched again
//! after a restore: none is in process during a save.

use std::sync::atomic::Ordering;

use super::{
    ata::{Disk, NCQ_ERROR},
    atapi::{Cdrom, Event, Sense},
    function::{Back, Function, Phase},
    port::{Device, Port},
};
use crate::state::{StateError, check, message, narrow, required};

impl Function {
    /// The state of the paused controller.
    pub(super) fn save(&self) -> Result<message::Ahci, StateError> {
        if self.phase == Phase::Running {
            return Err(StateError::not_migratable(&self.name, "it is not paused"));
        }
        let (interrupts_enabled, interrupt_status) = self.hba.registers();
        let ports = self.hba.ports().iter().zip(&self.backs);
        Ok(message::Ahci {
            pci: Some(self.config.save()),
            msi: Some(self.msi.save()),
            interrupts_enabled,
            interrupt_status,
            ports: ports
                .map(|(port, back)| save(&port.lock(), back.disk.capacity.load(Ordering::SeqCst)))
                .collect(),
        })
    }

    /// Takes over a saved state; the controller is paused afterwards, or idle.
    pub(super) fn restore(&mut self, saved: &message::Ahci) -> Result<(), StateError> {
        if self.phase != Phase::Idle || self.bus_master {
            return Err(StateError::not_migratable(&self.name, "it is in use already"));
        }
        check(
            saved.ports.len() == self.backs.len(),
            "ports",
            "not as many as the controller has drives",
        )?;
        let ports = self.hba.ports().iter().zip(&self.backs).zip(&saved.ports);
        let ports = ports.map(|((port, back), saved)| restored(&port.lock().device, back, saved));
        let ports = ports.collect::<Result<Vec<_>, _>>()?;
        check(
            saved.interrupt_status & !self.hba.implemented() == 0,
            "interrupt_status",
            "unknown ports",
        )?;
        let msi = required("msi", saved.msi.as_ref())?;
        self.config.restore(required("pci", saved.pci.as_ref())?)?;
        self.msi.restore(msi, &self.config)?;
        self.hba.restore(saved.interrupts_enabled, saved.interrupt_status);
        for ((place, back), (port, capacity)) in self.hba.ports().iter().zip(&self.backs).zip(ports) {
            *place.lock() = port;
            back.disk.capacity.store(capacity, Ordering::SeqCst);
        }
        if self.config.is_bus_master() {
            self.phase = Phase::Paused;
        }
        Ok(())
    }
}

fn save(port: &Port, capacity: u64) -> message::AhciPort {
    let (disk, cdrom) = match &port.device {
        Device::Disk(disk) => (Some(save_disk(disk)), None),
        Device::Cdrom(drive) => (None, Some(save_cdrom(drive))),
    };
    message::AhciPort {
        command_list: port.list,
        received_fis: port.received,
        interrupt_status: port.interrupt,
        interrupt_enable: port.enabled,
        command: port.command,
        status: port.status.into(),
        error: port.error.into(),
        sata_control: port.control,
        sata_error: port.sata_error,
        sata_active: port.active,
        issued: port.issued,
        halted: port.halted,
        slot: port.slot,
        capacity,
        disk,
        cdrom,
    }
}

fn save_disk(disk: &Disk) -> message::AtaDisk {
    message::AtaDisk {
        cache_off: disk.cache_off,
        smart_off: disk.smart_off,
        multiple: disk.multiple.into(),
        ncq_error: disk.ncq_error.map_or_else(Vec::new, Vec::from),
    }
}

fn save_cdrom(drive: &Cdrom) -> message::AtapiCdrom {
    let Sense(key, code, qualifier) = drive.sense;
    message::AtapiCdrom {
        sense: u32::from_be_bytes([0, key, code, qualifier]),
        attention: drive.attention,
        locked: drive.locked,
        open: drive.open,
        event: drive.event as u32,
    }
}

/// The port with its saved state, and the capacity that its driver knows. A driver can write each value of the
/// registers, so the port is safe with all of them.
fn restored(device: &Device, back: &Back, saved: &message::AhciPort) -> Result<(Port, u64), StateError> {
    let device = match (device, &saved.disk, &saved.cdrom) {
        (Device::Disk(_), Some(disk), None) => Device::Disk(restored_disk(disk)?),
        (Device::Cdrom(_), None, Some(drive)) => Device::Cdrom(restored_cdrom(drive)?),
        _ => {
            return Err(StateError::invalid(
                "ports.disk",
                "another kind of drive is at the port",
            ));
        }
    };
    let capacity = saved.capacity;
    check(
        capacity.is_multiple_of(back.block),
        "ports.capacity",
        "not a multiple of the block",
    )?;
    check(
        capacity <= back.disk.capacity.load(Ordering::SeqCst),
        "ports.capacity",
        "the image is smaller",
    )?;
    check(saved.slot < 32, "ports.slot", "not 0 to 31")?;
    let mut port = Port::new(device);
    port.list = saved.command_list;
    port.received = saved.received_fis;
    port.interrupt = saved.interrupt_status;
    port.enabled = saved.interrupt_enable;
    port.set_command(saved.command);
    port.status = narrow("ports.status", saved.status)?;
    port.error = narrow("ports.error", saved.error)?;
    port.control = saved.sata_control;
    port.sata_error = saved.sata_error;
    port.active = saved.sata_active;
    port.issued = saved.issued;
    port.halted = saved.halted;
    port.slot = saved.slot;
    Ok((port, capacity))
}

fn restored_disk(saved: &message::AtaDisk) -> Result<Disk, StateError> {
    let error = match saved.ncq_error.as_slice() {
        [] => None,
        bytes => {
            let error = <[u8; NCQ_ERROR]>::try_from(bytes);
            Some(error.map_err(|_| StateError::invalid("ports.disk.ncq_error", "the length is not 16"))?)
        }
    };
    Ok(Disk {
        cache_off: saved.cache_off,
        smart_off: saved.smart_off,
        multiple: narrow("ports.disk.multiple", saved.multiple)?,
        ncq_error: error,
    })
}

fn restored_cdrom(saved: &message::AtapiCdrom) -> Result<Cdrom, StateError> {
    let [_, key, code, qualifier] = saved.sense.to_be_bytes();
    check(key < 16, "ports.cdrom.sense", "no such key")?;
    Ok(Cdrom {
        sense: Sense(key, code, qualifier),
        attention: saved.attention,
        locked: saved.locked,
        open: saved.open,
        event: match saved.event {
            0 => Event::None,
            1 => Event::EjectRequest,
            2 => Event::NewMedia,
            3 => Event::Removal,
            _ => return Err(StateError::invalid("ports.cdrom.event", "unknown")),
        },
    })
}
