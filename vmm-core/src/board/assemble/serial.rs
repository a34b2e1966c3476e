//! COM1 and where it is served.

use std::{fs::File, io};

use devices::{
    log_limit::LogLimit,
    serial::{
        SerialPort, Setup,
        history::Capacity,
        log::{DEFAULT_LIMIT, Log},
    },
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vmm_protocol::vmm::ErrorKind;

use super::{Assembly, Console, Failure};
use crate::{
    board::{COM1_GSI, COM1_PORT, image::map, output_lines::OutputLines},
    lifecycle::Notice,
};

/// Message about firmware that has found nothing to boot.
const NOTHING_TO_BOOT: &str =
    "no disk, CD-ROM or NIC of the boot order can be booted: look at the serial console";

pub(super) fn build(
    assembly: &mut Assembly,
    spec: &vmm_protocol::machine::Machine,
    console: Option<Console>,
) -> Result<SerialPort, Failure> {
    let mut setup = Setup::default();
    if let Some((current, older)) = spec.serial_log {
        let (current, older) = (assembly.fds.take(current)?, assembly.fds.take(older)?);
        let log = Log::new(File::from(current), Some(File::from(older)), DEFAULT_LIMIT);
        setup.log = Some(log.map_err(Failure::during(ErrorKind::Resources, "serial log"))?);
    }
    match console {
        Some(Console::Socket(listener)) => {
            fcntl_getfl(&listener)
                .and_then(|flags| fcntl_setfl(&listener, flags | OFlags::NONBLOCK))
                .map_err(io::Error::from)
                .map_err(Failure::during(ErrorKind::Resources, "console socket"))?;
            setup.listener = Some(listener);
        }
        Some(Console::Terminal(terminal)) => setup.terminal = Some(terminal),
        None => {}
    }
    let (notifier, mut lines) = (assembly.sockets.notifier.clone(), OutputLines::default());
    let (has_firmware, limit) = (map(spec).has_firmware(), LogLimit::new());
    setup.watch = Some(Box::new(move |text, printed| {
        let seen = lines.feed(text);
        if seen.panic {
            notifier.notify(Notice::PanicPrinted { printed });
        }
        if seen.nothing_to_boot && has_firmware && limit.allow().is_some() {
            notifier.notify(Notice::DeviceError {
                device: "firmware".to_owned(),
                message: NOTHING_TO_BOOT.to_owned(),
            });
        }
    }));
    let irq = assembly.irq_line(COM1_GSI)?;
    let port = SerialPort::start(irq, Capacity::default(), setup)
        .map_err(Failure::during(ErrorKind::Resources, "serial port"))?;
    assembly.spaces.pio.insert(COM1_PORT.into(), 8, port.device())?;
    Ok(port)
}
