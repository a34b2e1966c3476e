//! The screen: graphics adapter, keyboard, tablet, and the server that shows and drives them.

use std::sync::Arc;

use devices::display::server::{self, Access, Server, Setup};
use devices::{
    display::{BootScreen, Framebuffer},
    input::Hub,
    pci::PciWindows,
    virtio::{gpu::Gpu, input::Input, transport::memory_address},
};
use rfb::Size;
use vmm_protocol::{machine, vmm::ErrorKind};

use super::{Assembly, Failure};
use crate::board::{boot::BootFramebuffer, video::Video};

/// Where the keyboards of a machine with that screen are.
pub(super) fn hub(spec: &machine::Display) -> Arc<Hub> {
    Arc::new(Hub::new(spec.layout))
}

/// Returns the server, or `None` if no client can connect.
pub(super) fn build(
    assembly: &mut Assembly,
    name: &str,
    spec: &machine::Display,
    hub: Arc<Hub>,
) -> Result<Option<Server>, Failure> {
    let size = size(spec)?;
    let framebuffer = Arc::new(Framebuffer::new(size));
    let video = Video::new(&assembly.vm, BootScreen::bar_size(size))?;
    let boot = Arc::new(BootScreen::new(Arc::clone(&framebuffer), size, Arc::new(video)));
    let gpu = Gpu::new(Arc::clone(&framebuffer), size).with_boot_screen(Arc::clone(&boot));
    let control = gpu.control();
    let keyboard = Input::keyboard(&hub).map_err(Failure::during(ErrorKind::Resources, "keyboard"))?;
    let tablet = Input::tablet(&hub).map_err(Failure::during(ErrorKind::Resources, "tablet"))?;
    assembly.add_virtio("gpu", spec.gpu, Box::new(gpu))?;
    assembly.add_virtio("keyboard", spec.keyboard, Box::new(keyboard))?;
    assembly.add_virtio("tablet", spec.tablet, Box::new(tablet))?;

    let mut listeners = Vec::new();
    for (index, access) in [(spec.vnc, Access::Full), (spec.vnc_view, Access::ViewOnly)] {
        let Some(index) = index else { continue };
        listeners.push((assembly.fds.take(index)?, access));
    }
    if listeners.is_empty() {
        return Ok(None);
    }
    let setup = Setup {
        listeners,
        name: name.to_owned(),
        framebuffer,
        boot: Some(boot),
        input: hub,
        resizer: Arc::new(control),
    };
    let server = server::start(setup).map_err(Failure::during(ErrorKind::Resources, "VNC server"))?;
    Ok(Some(server))
}

/// Description of the screen for a kernel that uses it without a driver.
pub fn boot_framebuffer(spec: &machine::Display, windows: &PciWindows) -> Result<BootFramebuffer, Failure> {
    let size = size(spec)?;
    let address = memory_address(windows, spec.gpu.number(), BootScreen::bar_size(size));
    Ok(BootFramebuffer {
        address: address.map_err(|error| Failure::new(ErrorKind::Invalid, &error))?,
        width: size.width(),
        height: size.height(),
    })
}

fn size(spec: &machine::Display) -> Result<Size, Failure> {
    let (width, height) = spec.size;
    Size::new(width, height).ok_or_else(|| {
        let message = format!("no screen has {width} x {height} pixels");
        Failure::of(ErrorKind::Invalid, message)
    })
}
