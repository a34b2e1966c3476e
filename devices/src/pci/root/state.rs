//! Saved state of the bus: its own registers, and what lies where on the MMIO bus. Functions are saved by their devices.
//!
//! Where a BAR is follows from its function's configuration, but of two that overlap the older one is on the bus. So the
//! mappings are saved in their order and made in the same order.

use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering};

use super::{Mapping, PciRoot, Window, lock, seat::Grave};
use crate::{
    bus::Bus,
    pci::function::PciFunction as _,
    state::{Section, StateError, check, message, narrow, required},
};

/// Most places of withdrawn functions that are restored: each takes a look-up of the bus.
const MAX_WITHDRAWN: usize = 1024;

impl PciRoot {
    /// The state of the bus; the vCPUs are stopped.
    pub fn save(&self) -> Result<Section, StateError> {
        let bridge = self.seat(0).map(|seat| lock(&seat.function).config().save());
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        check(
            mapped.graves.len() <= MAX_WITHDRAWN,
            "withdrawn",
            "more functions were withdrawn than can be saved",
        )?;
        let window = |window: &Window| message::PciWindow {
            address: window.address,
            size: window.size,
        };
        let mapping = |mapping: &Mapping| message::PciMapping {
            slot: u32::try_from(mapping.slot).unwrap_or(u32::MAX),
            bar: u32::try_from(mapping.bar).unwrap_or(u32::MAX),
            window: Some(window(&mapping.window)),
        };
        let state = message::PciRoot {
            config_address: self.config_address.load(Ordering::Relaxed),
            bridge,
            mappings: mapped.bars.iter().map(mapping).collect(),
            withdrawn: mapped.graves.iter().map(window).collect(),
        };
        Ok(Section::new("pci-root", &state))
    }

    /// Takes over a saved state, after all functions were restored: their BARs are on the bus afterwards.
    pub fn restore(&self, section: &Section, mmio: &Bus) -> Result<(), StateError> {
        let saved: message::PciRoot = section.open()?;
        check(
            saved.config_address & !0x80ff_fffc == 0,
            "config_address",
            "reserved bits are set",
        )?;
        let mut order = Vec::new();
        for mapping in &saved.mappings {
            order.push(Mapping {
                slot: narrow("mappings.slot", mapping.slot)?,
                bar: narrow("mappings.bar", mapping.bar)?,
                window: window("mappings.window", mapping.window.as_ref())?,
            });
        }
        let withdrawn = saved
            .withdrawn
            .iter()
            .map(|place| window("withdrawn", Some(place)))
            .collect::<Result<Vec<_>, _>>()?;
        check(withdrawn.len() <= MAX_WITHDRAWN, "withdrawn", "too many")?;
        check(
            withdrawn.iter().all(|place| self.allows(*place)),
            "withdrawn",
            "outside the PCI windows",
        )?;
        if let Some(bridge) = self.seat(0) {
            let saved = required("bridge", saved.bridge.as_ref())?;
            lock(&bridge.function).config_mut().restore(saved)?;
        }
        self.config_address.store(saved.config_address, Ordering::Relaxed);
        self.remap_in_order(mmio, &order);
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        for place in withdrawn {
            let grave = Arc::new(Mutex::new(Grave));
            if mmio.insert(place.address, place.size, grave).is_ok() {
                mapped.graves.push(place);
            }
        }
        Ok(())
    }
}

fn window(field: &'static str, saved: Option<&message::PciWindow>) -> Result<Window, StateError> {
    let saved = required(field, saved)?;
    Ok(Window {
        address: saved.address,
        size: saved.size,
    })
}
