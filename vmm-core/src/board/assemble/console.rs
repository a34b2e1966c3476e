//! The virtio-console and where it is served.

use std::{io, sync::Arc};

use devices::{
    serial::{History, Setup, history::Capacity, server},
    virtio::console::Console,
};
use vmm_protocol::{machine, vmm::ErrorKind};

use super::{Assembly, Failure};
use crate::board::machine::VirtioConsole;

pub(super) fn build(assembly: &mut Assembly, spec: &machine::Console) -> Result<VirtioConsole, Failure> {
    let history = History::new(Capacity::default()).map_err(|error| failure(&error))?;
    let console = Console::new(Arc::new(history)).map_err(|error| failure(&error))?;
    let (port, control) = (console.port(), console.control());
    assembly.add_virtio("console", spec.slot, Box::new(console))?;
    let server = match spec.socket {
        Some(index) => {
            let setup = Setup {
                listener: Some(assembly.fds.take(index)?),
                ..Setup::default()
            };
            Some(server::start(port, setup).map_err(|error| failure(&error))?)
        }
        None => None,
    };
    Ok(VirtioConsole { control, server })
}

fn failure(error: &io::Error) -> Failure {
    Failure::of(ErrorKind::Resources, format!("virtio-console: {error}"))
}
