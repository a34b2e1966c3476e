//! Saved state of the root buses: their own registers and the layout of the MMIO bus. The devices
//! save their functions.
//!
//! A function's configuration determines where a BAR decodes, but not whether it is on the bus: of
//! two overlapping BARs, the older one is mapped, and a refused BAR is tried again only at the next
//! remap. So the mappings are saved in their order, and a restore recreates exactly these.

use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering};

use super::{Mapped, Mapping, PciRoot, Window, lock, map, mechanism::ADDRESS_BITS, seat::ZeroBar};
use crate::{
    bus::Bus,
    state::{Section, StateError, check, message, narrow, required},
};

/// Its name in messages, and the section's id.
const NAME: &str = "pci-root";
/// Most places of withdrawn functions that are saved and restored. A machine gets there when its host takes a thousand functions
/// away by force, each at a place of its own.
const MAX_WITHDRAWN: usize = 1024;

impl PciRoot {
    /// The state of the buses. The vCPUs are stopped.
    pub fn save(&self) -> Result<Section, StateError> {
        let config = |slot: usize| self.seat(slot).map(|seat| lock(&seat.function).config().save());
        let (bridge, lpc) = (config(0), self.lpc_slot().and_then(config));
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if mapped.withdrawn.len() > MAX_WITHDRAWN {
            return Err(StateError::not_migratable(
                NAME,
                "too many functions were withdrawn",
            ));
        }
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
            withdrawn: mapped.withdrawn.iter().map(window).collect(),
            lpc,
        };
        Ok(Section::new(NAME, &state))
    }

    /// Takes over a saved state, after all functions were restored: their BARs are on the bus afterwards. The section is
    /// untrusted. After an error some BARs are on the bus; a [`reset`](Self::reset) takes them off.
    pub fn restore(self: &Arc<Self>, section: &Section, mmio: &Bus) -> Result<(), StateError> {
        let saved: message::PciRoot = section.open()?;
        check(
            saved.config_address & !ADDRESS_BITS == 0,
            "config_address",
            "reserved bits are set",
        )?;
        check(saved.withdrawn.len() <= MAX_WITHDRAWN, "withdrawn", "too many")?;
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if !mapped.bars.is_empty() || !mapped.withdrawn.is_empty() {
            return Err(StateError::not_migratable(NAME, "BARs are on the bus already"));
        }
        if let Some(bridge) = self.seat(0) {
            let saved = required("bridge", saved.bridge.as_ref())?;
            lock(&bridge.function).config_mut().restore(saved)?;
        }
        if let Some(lpc) = self.lpc_slot().and_then(|slot| self.seat(slot)) {
            let saved = required("lpc", saved.lpc.as_ref())?;
            lock(&lpc.function).config_mut().restore(saved)?;
        }
        for place in &saved.withdrawn {
            self.restore_withdrawn(&mut mapped, place, mmio)?;
        }
        for mapping in &saved.mappings {
            self.restore_mapping(&mut mapped, mapping, mmio)?;
        }
        self.place_window(&mut mapped, mmio);
        self.config_address.store(saved.config_address, Ordering::Relaxed);
        Ok(())
    }

    fn restore_withdrawn(
        &self,
        mapped: &mut Mapped,
        saved: &message::PciWindow,
        mmio: &Bus,
    ) -> Result<(), StateError> {
        let place = window(saved);
        check(self.allows(place), "withdrawn", "outside the PCI windows")?;
        let zeroes = Arc::new(Mutex::new(ZeroBar));
        let inserted = mmio.insert(place.address, place.size, zeroes);
        inserted.map_err(|error| StateError::invalid("withdrawn", error.to_string()))?;
        mapped.withdrawn.push(place);
        Ok(())
    }

    fn restore_mapping(
        &self,
        mapped: &mut Mapped,
        saved: &message::PciMapping,
        mmio: &Bus,
    ) -> Result<(), StateError> {
        let mapping = Mapping {
            slot: narrow("mappings.slot", saved.slot)?,
            bar: narrow("mappings.bar", saved.bar)?,
            window: window(required("mappings.window", saved.window.as_ref())?),
        };
        let seat = self.seat(mapping.slot);
        let seat = seat.ok_or_else(|| StateError::invalid("mappings.slot", "there is no function"))?;
        let windows = lock(&seat.function).config().windows();
        check(
            windows.get(mapping.bar) == Some(&Some(mapping.window)),
            "mappings.window",
            "the function's BAR is elsewhere",
        )?;
        check(
            self.allows(mapping.window),
            "mappings.window",
            "outside the PCI windows",
        )?;
        check(
            map(&seat, &mapping, mmio),
            "mappings.window",
            "something else is there",
        )?;
        mapped.bars.push(mapping);
        Ok(())
    }
}

fn window(saved: &message::PciWindow) -> Window {
    Window {
        address: saved.address,
        size: saved.size,
    }
}
