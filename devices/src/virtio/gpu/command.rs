//! The commands of a driver (virtio 1.3, 5.7.6). A request is copied once, and then acted on.

use std::{collections::BTreeMap, sync::Arc};

use rfb::{Cursor, Rect, Size};
use vmm_base::GuestMemory;

use super::{
    edid,
    resource::{
        Backing, Entry, Format, MAX_ALL_ENTRIES, MAX_BYTES, MAX_DETACHED, MAX_ENTRIES, MAX_RESOURCES,
        Resource,
    },
    shared::Shared,
};
use crate::display::{BootScreen, Framebuffer, MAX_CURSOR};

/// Longest request: RESOURCE_ATTACH_BACKING with all entries.
pub(super) const MAX_REQUEST: usize = 32 + MAX_ENTRIES * 16;
/// Length of `struct virtio_gpu_ctrl_hdr`.
pub(super) const HEADER: usize = 24;

const GET_DISPLAY_INFO: u32 = 0x100;
const RESOURCE_CREATE_2D: u32 = 0x101;
const RESOURCE_UNREF: u32 = 0x102;
const SET_SCANOUT: u32 = 0x103;
const RESOURCE_FLUSH: u32 = 0x104;
const TRANSFER_TO_HOST_2D: u32 = 0x105;
const ATTACH_BACKING: u32 = 0x106;
const DETACH_BACKING: u32 = 0x107;
const GET_EDID: u32 = 0x10a;
const UPDATE_CURSOR: u32 = 0x300;
const MOVE_CURSOR: u32 = 0x301;

const OK_NODATA: u32 = 0x1100;
const OK_DISPLAY_INFO: u32 = 0x1101;
const OK_EDID: u32 = 0x1104;

const FLAG_FENCE: u32 = 1;
/// `VIRTIO_GPU_MAX_SCANOUTS`: entries of the display information.
const MAX_SCANOUTS: usize = 16;
/// Length of the EDID field in the response.
const EDID_FIELD: usize = 1024;

/// Why a command was refused: `VIRTIO_GPU_RESP_ERR_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Refusal {
    Unspecified = 0x1200,
    OutOfMemory = 0x1201,
    ScanoutId = 0x1202,
    ResourceId = 0x1203,
    Parameter = 0x1205,
}

/// Resource and part of it that the screen shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scanout {
    pub resource: u32,
    pub rect: Rect,
}

/// Little-endian fields of a request.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&mut self) -> Result<u32, Refusal> {
        let (first, rest) = self.0.split_first_chunk::<4>().ok_or(Refusal::Unspecified)?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*first))
    }

    fn u64(&mut self) -> Result<u64, Refusal> {
        let (low, high) = (self.u32()?, self.u32()?);
        Ok(u64::from(low) | u64::from(high) << 32)
    }

    /// A rectangle, which may be any.
    fn rect(&mut self) -> Result<[u32; 4], Refusal> {
        Ok([self.u32()?, self.u32()?, self.u32()?, self.u32()?])
    }
}

/// A rectangle that lies within `size` and is not empty.
fn within([x, y, width, height]: [u32; 4], size: Size) -> Result<Rect, Refusal> {
    let ends = |begin: u32, length: u32, end: u16| {
        length > 0 && begin.checked_add(length).is_some_and(|last| last <= end.into())
    };
    if !ends(x, width, size.width()) || !ends(y, height, size.height()) {
        return Err(Refusal::Parameter);
    }
    let narrow = |value: u32| u16::try_from(value).map_err(|_| Refusal::Parameter);
    Ok(Rect::new(narrow(x)?, narrow(y)?, narrow(width)?, narrow(height)?))
}

/// Resources of a driver, and their presentation on the screen.
pub(super) struct Renderer {
    framebuffer: Arc<Framebuffer>,
    pub(super) boot: Option<Arc<BootScreen>>,
    pub(super) shared: Arc<Shared>,
    pub(super) resources: BTreeMap<u32, Resource>,
    pub(super) scanout: Option<Scanout>,
    pub(super) cursor: Cursor,
    scratch: Vec<u8>,
}

impl Renderer {
    pub fn new(framebuffer: Arc<Framebuffer>, boot: Option<Arc<BootScreen>>, shared: Arc<Shared>) -> Self {
        Self {
            framebuffer,
            boot,
            shared,
            resources: BTreeMap::new(),
            scanout: None,
            cursor: Cursor::default(),
            scratch: Vec::new(),
        }
    }

    /// Carries a request out; gives the response, and whether the request made no sense.
    pub fn execute(&mut self, memory: &GuestMemory, request: &[u8]) -> (Vec<u8>, bool) {
        let mut fields = Fields(request);
        let mut response = Vec::new();
        let result = fields.u32().and_then(|kind| {
            fields.0 = request.get(HEADER..).ok_or(Refusal::Unspecified)?;
            self.command(kind, fields, memory, &mut response)
        });
        let kind = result.unwrap_or_else(|refusal| refusal as u32);
        let mut whole = kind.to_le_bytes().to_vec();
        // A fence is over when its request is: each one is carried out at once. Its id and context are given back.
        let flags = request.get(4..8).and_then(|raw| raw.first_chunk().copied());
        if flags.map(u32::from_le_bytes).unwrap_or(0) & FLAG_FENCE != 0 {
            whole.extend_from_slice(&FLAG_FENCE.to_le_bytes());
            whole.extend_from_slice(request.get(8..HEADER).unwrap_or(&[0; 16]));
        } else {
            whole.resize(HEADER, 0);
        }
        whole.extend_from_slice(&response);
        (whole, result.is_err())
    }

    /// Resets the renderer. The screen then shows the drawing of a guest without a driver, or
    /// black.
    pub fn reset(&mut self) {
        self.resources.clear();
        self.scanout = None;
        self.cursor = Cursor::default();
        self.framebuffer.set_cursor(Cursor::default());
        match &self.boot {
            Some(boot) => boot.show(),
            None => self.framebuffer.clear(self.shared.initial()),
        }
    }

    /// Redraws the scanned-out resource and the cursor.
    pub fn show(&self) {
        self.framebuffer.set_cursor(self.cursor.clone());
        let Some(scanout) = self.scanout else { return };
        let size = Size::new(scanout.rect.width.into(), scanout.rect.height.into());
        if let Some(size) = size.filter(|size| *size != self.framebuffer.size()) {
            self.framebuffer.clear(size);
        }
        self.draw(scanout, scanout.rect);
    }

    fn command(
        &mut self,
        kind: u32,
        mut fields: Fields<'_>,
        memory: &GuestMemory,
        response: &mut Vec<u8>,
    ) -> Result<u32, Refusal> {
        match kind {
            GET_DISPLAY_INFO => {
                put_display_info(self.shared.preferred(), response);
                return Ok(OK_DISPLAY_INFO);
            }
            GET_EDID => {
                if fields.u32()? != 0 {
                    return Err(Refusal::ScanoutId);
                }
                let block = edid::block(self.shared.preferred());
                response.extend_from_slice(&u32::try_from(block.len()).unwrap_or(0).to_le_bytes());
                response.extend_from_slice(&[0; 4]);
                response.extend_from_slice(&block);
                response.resize(EDID_FIELD.saturating_add(8), 0);
                return Ok(OK_EDID);
            }
            RESOURCE_CREATE_2D => self.create(fields)?,
            RESOURCE_UNREF => self.unref(fields.u32()?)?,
            SET_SCANOUT => self.set_scanout(fields)?,
            RESOURCE_FLUSH => self.flush(fields)?,
            TRANSFER_TO_HOST_2D => self.transfer(fields, memory)?,
            ATTACH_BACKING => self.attach(fields)?,
            DETACH_BACKING => self.detach(fields.u32()?)?,
            UPDATE_CURSOR => self.update_cursor(fields)?,
            // Each viewer draws its own pointer at its own position.
            MOVE_CURSOR => {}
            _ => return Err(Refusal::Unspecified),
        }
        Ok(OK_NODATA)
    }

    fn resource(&mut self, id: u32) -> Result<&mut Resource, Refusal> {
        self.resources.get_mut(&id).ok_or(Refusal::ResourceId)
    }

    fn create(&mut self, mut fields: Fields<'_>) -> Result<(), Refusal> {
        let (id, format, width, height) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
        if id == 0 || self.resources.contains_key(&id) {
            return Err(Refusal::ResourceId);
        }
        let format = Format::from_number(format).ok_or(Refusal::Parameter)?;
        let size = Size::new(width, height).ok_or(Refusal::Parameter)?;
        let used = self
            .resources
            .values()
            .map(|resource| Resource::bytes(resource.size));
        let used = used.fold(Resource::bytes(size), usize::saturating_add);
        if used > MAX_BYTES || self.resources.len() >= MAX_RESOURCES {
            return Err(Refusal::OutOfMemory);
        }
        self.resources.insert(id, Resource::new(format, size));
        Ok(())
    }

    fn unref(&mut self, id: u32) -> Result<(), Refusal> {
        self.resources.remove(&id).ok_or(Refusal::ResourceId)?;
        if self.scanout.is_some_and(|scanout| scanout.resource == id) {
            self.blank();
        }
        Ok(())
    }

    fn blank(&mut self) {
        self.scanout = None;
        self.framebuffer.clear(self.framebuffer.size());
    }

    fn set_scanout(&mut self, mut fields: Fields<'_>) -> Result<(), Refusal> {
        let (rect, scanout, id) = (fields.rect()?, fields.u32()?, fields.u32()?);
        if scanout != 0 {
            return Err(Refusal::ScanoutId);
        }
        if id == 0 {
            self.blank();
            return Ok(());
        }
        let rect = within(rect, self.resource(id)?.size)?;
        self.scanout = Some(Scanout { resource: id, rect });
        if let Some(boot) = &self.boot {
            boot.hand_over();
        }
        self.show();
        Ok(())
    }

    fn flush(&mut self, mut fields: Fields<'_>) -> Result<(), Refusal> {
        let (rect, id) = (fields.rect()?, fields.u32()?);
        let rect = within(rect, self.resource(id)?.size)?;
        if let Some(scanout) = self.scanout.filter(|scanout| scanout.resource == id) {
            self.draw(scanout, rect);
        }
        Ok(())
    }

    /// Copies the part of the resource that is scanned out and in `rect` to the screen.
    fn draw(&self, scanout: Scanout, rect: Rect) {
        let Some(resource) = self.resources.get(&scanout.resource) else {
            return;
        };
        let part = rect.intersection(scanout.rect);
        let (left, top) = (scanout.rect.x, scanout.rect.y);
        let place = Rect::new(
            part.x.saturating_sub(left),
            part.y.saturating_sub(top),
            part.width,
            part.height,
        );
        self.framebuffer.write(place, |y, pixels| {
            let row = resource.row(part, y.saturating_add(top));
            for (pixel, new) in pixels.iter_mut().zip(row) {
                *pixel = new & 0x00ff_ffff;
            }
        });
    }

    fn transfer(&mut self, mut fields: Fields<'_>, memory: &GuestMemory) -> Result<(), Refusal> {
        let (rect, offset, id) = (fields.rect()?, fields.u64()?, fields.u32()?);
        let mut scratch = std::mem::take(&mut self.scratch);
        let done = self.resource(id).and_then(|resource| {
            let rect = within(rect, resource.size)?;
            let done = resource.transfer(memory, rect, offset, &mut scratch);
            done.then_some(()).ok_or(Refusal::Parameter)
        });
        self.scratch = scratch;
        done
    }

    fn attach(&mut self, mut fields: Fields<'_>) -> Result<(), Refusal> {
        let (id, count) = (fields.u32()?, fields.u32()?);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let others = self
            .resources
            .values()
            .filter_map(|resource| resource.backing.as_ref());
        let all = others.fold(count, |all, backing| all.saturating_add(backing.entries().len()));
        let resource = self.resource(id)?;
        if resource.backing.is_some() || count > MAX_ENTRIES {
            return Err(Refusal::Unspecified);
        }
        if all > MAX_ALL_ENTRIES {
            return Err(Refusal::OutOfMemory);
        }
        let mut entries = Vec::with_capacity(count);
        for _ in 0..count {
            let (address, length) = (fields.u64()?, fields.u32()?);
            fields.u32()?;
            entries.push(Entry { address, length });
        }
        resource.backing = Some(Backing::new(entries));
        Ok(())
    }

    fn detach(&mut self, id: u32) -> Result<(), Refusal> {
        let detached: usize = self.resources.values().map(Resource::detached_bytes).sum();
        let resource = self.resource(id)?;
        let backing = resource.backing.take().ok_or(Refusal::Unspecified)?;
        if detached.saturating_add(resource.detached_bytes()) > MAX_DETACHED {
            resource.backing = Some(backing);
            return Err(Refusal::OutOfMemory);
        }
        Ok(())
    }

    fn update_cursor(&mut self, mut fields: Fields<'_>) -> Result<(), Refusal> {
        // Where it is: scan-out, column, row, padding.
        let [scanout, ..] = fields.rect()?;
        let (id, x, y) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if scanout != 0 {
            return Err(Refusal::ScanoutId);
        }
        self.cursor = if id == 0 {
            Cursor::default()
        } else {
            let resource = self.resource(id)?;
            let (width, height) = (resource.size.width(), resource.size.height());
            if width > MAX_CURSOR || height > MAX_CURSOR {
                return Err(Refusal::Parameter);
            }
            let spot = |at: u32, side: u16| u16::try_from(at).unwrap_or(u16::MAX).min(side.saturating_sub(1));
            let mut pixels = resource.pixels().to_vec();
            pixels.resize(resource.size.pixels(), 0);
            Cursor {
                width,
                height,
                hotspot: (spot(x, width), spot(y, height)),
                pixels,
            }
        };
        self.framebuffer.set_cursor(self.cursor.clone());
        Ok(())
    }
}

/// Appends the body of `struct virtio_gpu_resp_display_info`: the only scan-out, and zeroes for the
/// absent ones.
fn put_display_info(size: Size, response: &mut Vec<u8>) {
    const MODE: usize = 24;
    let fields = [0, 0, size.width().into(), size.height().into(), 1, 0];
    response.extend(fields.into_iter().flat_map(u32::to_le_bytes));
    response.resize(MAX_SCANOUTS.saturating_mul(MODE), 0);
}
