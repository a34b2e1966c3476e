//! Tests of the registers and of the server.

mod flood;
mod server;
mod state;
mod uart;

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use super::{history::Capacity, *};
use crate::{bus::BusDevice, interrupt::IrqLine};

/// Counts edges.
#[derive(Default)]
struct Line(AtomicUsize);

impl IrqLine for Line {
    fn pulse(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Line {
    /// Edges since the last call.
    fn take(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}

fn port(capacity: usize) -> (Arc<Mutex<Uart>>, Arc<Line>) {
    let line = Arc::new(Line::default());
    let history = Arc::new(
        History::new(Capacity {
            first: 0,
            last: capacity,
        })
        .unwrap(),
    );
    (
        Arc::new(Mutex::new(Uart::new(line.clone(), history).unwrap())),
        line,
    )
}

fn read(uart: &Mutex<Uart>, offset: u64) -> u8 {
    let mut data = [0];
    uart.lock().unwrap().read(offset, &mut data);
    data[0]
}

fn write(uart: &Mutex<Uart>, offset: u64, value: u8) {
    let _ = uart.lock().unwrap().write(offset, &[value]);
}

fn print(uart: &Mutex<Uart>, text: &[u8]) {
    text.iter().for_each(|byte| write(uart, 0, *byte));
}

fn printed(uart: &Mutex<Uart>) -> Vec<u8> {
    uart.lock().unwrap().history().replay(usize::MAX).0
}
