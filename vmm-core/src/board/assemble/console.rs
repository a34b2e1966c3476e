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
    let failure = Failure::during::<io::Error>(ErrorKind::Resources, "virtio-console");
    let history = History::new(Capacity::default()).map_err(&failure)?;
    let console = Console::new(Arc::new(history)).map_err(&failure)?;
    let (port, control) = (console.port(), console.control());
    assembly.add_virtio("console", spec.slot, Box::new(console))?;
    let server = match spec.socket {
        Some(index) => {
            let setup = Setup {
                listener: Some(assembly.fds.take(index)?),
                ..Setup::default()
            };
            Some(server::start(port, setup).map_err(&failure)?)
        }
        None => None,
    };
    Ok(VirtioConsole { control, server })
}
