//! Saved state of the back.
//!
//! The state does not contain the host's copy of a resource that has guest memory behind it. A
//! restore recreates the copy from this memory, in which the driver keeps the picture. This saves
//! megabytes in the state. A transfer that the driver has not requested yet then takes effect
//! early.

use rfb::{Cursor, Rect, Size};
use vmm_base::GuestMemory;

use super::{
    command::{Renderer, Scanout},
    resource::{
        Backing, Entry, Format, MAX_ALL_ENTRIES, MAX_BYTES, MAX_DETACHED, MAX_ENTRIES, MAX_RESOURCES,
        Resource,
    },
};
use crate::{
    display::MAX_CURSOR,
    state::{StateError, check, message, narrow},
};

impl Renderer {
    pub(super) fn save(&self) -> message::VirtioGpuQueues {
        let resources = self
            .resources
            .iter()
            .map(|(id, resource)| message::VirtioGpuResource {
                id: *id,
                format: resource.format.number,
                width: resource.size.width().into(),
                height: resource.size.height().into(),
                has_backing: resource.backing.is_some(),
                backing: resource
                    .backing
                    .iter()
                    .flat_map(Backing::entries)
                    .map(|entry| message::VirtioGpuMemory {
                        address: entry.address,
                        length: entry.length,
                    })
                    .collect(),
                transferred: !resource.pixels().is_empty(),
                pixels: match resource.backing {
                    Some(_) => Vec::new(),
                    None => bytes(resource.pixels()),
                },
            });
        message::VirtioGpuQueues {
            resources: resources.collect(),
            scanout: self.scanout.map(|scanout| message::VirtioGpuScanout {
                resource: scanout.resource,
                x: scanout.rect.x.into(),
                y: scanout.rect.y.into(),
                width: scanout.rect.width.into(),
                height: scanout.rect.height.into(),
            }),
            cursor: Some(message::VirtioGpuCursor {
                width: self.cursor.width.into(),
                height: self.cursor.height.into(),
                hot_x: self.cursor.hotspot.0.into(),
                hot_y: self.cursor.hotspot.1.into(),
                pixels: bytes(&self.cursor.pixels),
            }),
            boot_hidden: self.boot.as_ref().is_some_and(|boot| !boot.is_shown()),
        }
    }

    pub(super) fn restore(
        &mut self,
        saved: &message::VirtioGpuQueues,
        memory: &GuestMemory,
    ) -> Result<(), StateError> {
        check(saved.resources.len() <= MAX_RESOURCES, "resources", "too many")?;
        let entries = saved.resources.iter().map(|resource| resource.backing.len());
        check(
            entries.sum::<usize>() <= MAX_ALL_ENTRIES,
            "resources.backing",
            "too many pieces",
        )?;
        let (mut used, mut scratch) = (0_usize, Vec::new());
        self.resources.clear();
        for one in &saved.resources {
            let resource = resource(one, memory, &mut scratch)?;
            used = used.saturating_add(Resource::bytes(resource.size));
            check(
                used <= MAX_BYTES,
                "resources",
                "more memory than there is for them",
            )?;
            let again = self.resources.insert(one.id, resource).is_some();
            check(one.id != 0 && !again, "resources.id", "none, or there twice")?;
        }
        let detached: usize = self.resources.values().map(Resource::detached_bytes).sum();
        check(
            detached <= MAX_DETACHED,
            "resources.pixels",
            "more than a device keeps without memory behind them",
        )?;
        self.scanout = saved
            .scanout
            .as_ref()
            .map(|saved| self.scanout(saved))
            .transpose()?;
        self.cursor = saved.cursor.as_ref().map(cursor).transpose()?.unwrap_or_default();
        let hidden = saved.boot_hidden || self.scanout.is_some();
        if let Some(boot) = self.boot.as_ref().filter(|_| hidden) {
            boot.hide();
        }
        self.show();
        Ok(())
    }

    fn scanout(&self, saved: &message::VirtioGpuScanout) -> Result<Scanout, StateError> {
        let rect = Rect::new(
            narrow("scanout.x", saved.x)?,
            narrow("scanout.y", saved.y)?,
            narrow("scanout.width", saved.width)?,
            narrow("scanout.height", saved.height)?,
        );
        let resource = self.resources.get(&saved.resource);
        let within = resource.is_some_and(|resource| resource.size.rect().intersection(rect) == rect);
        check(within && !rect.is_empty(), "scanout", "not within a resource")?;
        Ok(Scanout {
            resource: saved.resource,
            rect,
        })
    }
}

fn resource(
    saved: &message::VirtioGpuResource,
    memory: &GuestMemory,
    scratch: &mut Vec<u8>,
) -> Result<Resource, StateError> {
    let invalid = |field, why| move || StateError::invalid(field, why);
    let format = Format::from_number(saved.format).ok_or_else(invalid("resources.format", "unknown"))?;
    let size = Size::new(saved.width, saved.height)
        .ok_or_else(invalid("resources.width", "no size of a picture"))?;
    check(
        saved.backing.len() <= MAX_ENTRIES,
        "resources.backing",
        "too many pieces",
    )?;
    let mut resource = Resource::new(format, size);
    if saved.has_backing {
        check(
            saved.pixels.is_empty(),
            "resources.pixels",
            "there is memory behind them",
        )?;
        let entries = saved.backing.iter().map(|entry| Entry {
            address: entry.address,
            length: entry.length,
        });
        resource.backing = Some(Backing::new(entries.collect()));
        if saved.transferred && !resource.transfer(memory, size.rect(), 0, scratch) {
            // The driver transferred parts from memory that is not enough for the whole, or took some of it away.
            resource = resource
                .with_pixels(vec![0; size.pixels()])
                .ok_or_else(invalid("resources.pixels", "of another size"))?;
        }
        return Ok(resource);
    }
    check(saved.backing.is_empty(), "resources.backing", "there is none")?;
    check(
        saved.transferred != saved.pixels.is_empty(),
        "resources.transferred",
        "not what the pixels say",
    )?;
    resource
        .with_pixels(pixels(&saved.pixels))
        .ok_or_else(invalid("resources.pixels", "of another size"))
}

fn cursor(saved: &message::VirtioGpuCursor) -> Result<Cursor, StateError> {
    let side = |field, value| {
        let side: u16 = narrow(field, value)?;
        check(side <= MAX_CURSOR, field, "larger than a cursor").map(|()| side)
    };
    let (width, height) = (
        side("cursor.width", saved.width)?,
        side("cursor.height", saved.height)?,
    );
    let pixels = pixels(&saved.pixels);
    let area = usize::from(width).saturating_mul(height.into());
    check(pixels.len() == area, "cursor.pixels", "of another size")?;
    Ok(Cursor {
        width,
        height,
        hotspot: (
            side("cursor.hot_x", saved.hot_x)?,
            side("cursor.hot_y", saved.hot_y)?,
        ),
        pixels,
    })
}

fn bytes(pixels: &[u32]) -> Vec<u8> {
    pixels.iter().flat_map(|pixel| pixel.to_le_bytes()).collect()
}

fn pixels(bytes: &[u8]) -> Vec<u32> {
    let chunks = bytes.chunks_exact(4);
    chunks
        .map(|raw| u32::from_le_bytes(raw.try_into().unwrap_or_default()))
        .collect()
}
