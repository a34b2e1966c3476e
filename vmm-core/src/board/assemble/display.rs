//! The screen: graphics adapter, keyboard, tablet, and the server that shows and drives them.

use std::sync::Arc;

use super::{Assembly, Failure};
use devices::{
    display::{
        Framebuffer, Size,
        rfb::server::{Access, Server, Setup},
    },
    input::{Hub, Layout},
    virtio::{gpu::Gpu, input::Input},
};
use proto::{
    model::{display, machine},
    vmm::ErrorKind,
};

/// Gives the server, unless nobody can connect.
pub(super) fn build(
    assembly: &mut Assembly,
    name: &str,
    spec: &machine::Display,
) -> Result<Option<Server>, Failure> {
    let (width, height) = spec.size;
    let size = Size::new(width, height).ok_or_else(|| Failure {
        kind: ErrorKind::Invalid,
        message: format!("no screen has {width} x {height} pixels"),
    })?;
    let layout = match spec.layout {
        display::Layout::Us => Layout::Us,
        display::Layout::De => Layout::De,
        display::Layout::Dk => Layout::Dk,
    };
    let (framebuffer, hub) = (Arc::new(Framebuffer::new(size)), Arc::new(Hub::new(layout)));
    let gpu = Gpu::new(Arc::clone(&framebuffer), size);
    let control = gpu.control();
    let keyboard = Input::keyboard(&hub).map_err(|error| failure("keyboard", &error))?;
    let tablet = Input::tablet(&hub).map_err(|error| failure("tablet", &error))?;
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
        input: hub,
        resizer: Arc::new(control),
    };
    let server = Server::start(setup).map_err(|error| failure("VNC server", &error))?;
    Ok(Some(server))
}

fn failure(what: &str, error: &std::io::Error) -> Failure {
    Failure {
        kind: ErrorKind::Resources,
        message: format!("{what}: {error}"),
    }
}
