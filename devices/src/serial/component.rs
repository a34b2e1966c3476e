//! The serial port as a part of the machine.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use super::{
    History,
    history::Capacity,
    port::Port,
    server::{self, Server, Setup},
    uart::Uart,
};
use crate::{
    component::{Component, ComponentError},
    interrupt::IrqLine,
    state::{Section, StateError},
};

/// The port and its server.
pub struct SerialPort {
    uart: Arc<Mutex<Uart>>,
    server: Server,
}

impl SerialPort {
    /// A port with a server that runs. `capacity` is how much output is kept.
    pub fn start(irq: Arc<dyn IrqLine>, capacity: Capacity, setup: Setup) -> io::Result<Self> {
        let history = Arc::new(History::new(capacity)?);
        let uart = Arc::new(Mutex::new(Uart::new(irq, history)?));
        let port: Arc<dyn Port> = uart.clone();
        let server = server::start(port, setup)?;
        Ok(Self { uart, server })
    }

    /// The registers, for the I/O bus: 8 ports.
    pub fn device(&self) -> Arc<Mutex<Uart>> {
        Arc::clone(&self.uart)
    }

    /// Sends a break to the guest, behind the pending input.
    pub fn send_break(&self) {
        self.uart().receive_break();
    }

    /// How many bytes were printed so far.
    pub fn printed(&self) -> u64 {
        self.uart().history().end()
    }

    /// Ends the server; all that was printed is in the log then. To be called at the machine's end, when no vCPU runs
    /// any more.
    pub fn finish(&mut self) {
        if !self.server.stop() {
            tracing::error!("the console's thread had failed");
        }
    }

    fn uart(&self) -> MutexGuard<'_, Uart> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Component for SerialPort {
    fn name(&self) -> &str {
        "serial"
    }

    fn pause(&mut self, _deadline: Instant) -> Result<(), ComponentError> {
        if self.server.failed() {
            return Err(ComponentError::WorkerGone);
        }
        self.uart().pause();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), ComponentError> {
        self.uart().resume();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), ComponentError> {
        self.uart().reset();
        Ok(())
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new(self.name(), &self.uart().save()))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        self.uart().restore(&section.open()?)
    }
}
