//! Input devices (virtio 1.3, 5.8): a keyboard with lights, and a tablet, which is a pointer with
//! absolute coordinates.
//!
//! Events wait in a bounded list until the driver has buffers for them. The device drops events
//! beyond the limit, but never the release of a key or button whose press it reported.

mod config;
mod events;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
mod worker;

use std::{io, sync::Arc};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::{
    config::Config,
    events::{Event, Events},
    worker::InputHandler,
};
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes},
    signals::Signals,
};
use crate::{
    input::{Hub, Key, Keyboard, LED_CAPS, LED_NUM, LED_SCROLL, Pointer, Tablet},
    state::{Section, StateError, check, message, narrow},
};

/// Sizes of the event queue and of the status queue, which carries the driver's changes of the
/// lights.
const QUEUE_SIZES: [u16; 2] = [64; 2];

/// All lights.
const LEDS: u8 = LED_CAPS | LED_NUM | LED_SCROLL;

/// Type of an input device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Keyboard,
    Tablet,
}

/// The front of an input device.
pub struct Input {
    kind: Kind,
    hub: Arc<Hub>,
    events: Arc<Events>,
    config: Config,
    connected: bool,
}

impl Input {
    /// A keyboard, which is added to `hub`.
    pub fn keyboard(hub: &Arc<Hub>) -> io::Result<Self> {
        let input = Self::new(Kind::Keyboard, hub)?;
        hub.add_keyboard(Arc::new(Handle(Arc::clone(&input.events))));
        Ok(input)
    }

    /// A tablet, which becomes the one of `hub`.
    pub fn tablet(hub: &Arc<Hub>) -> io::Result<Self> {
        let input = Self::new(Kind::Tablet, hub)?;
        hub.set_tablet(Arc::new(Handle(Arc::clone(&input.events))));
        Ok(input)
    }

    fn new(kind: Kind, hub: &Arc<Hub>) -> io::Result<Self> {
        Ok(Self {
            kind,
            hub: Arc::clone(hub),
            events: Arc::new(Events::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?)),
            config: Config::new(kind),
            connected: false,
        })
    }

    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Keyboard => "keyboard",
            Kind::Tablet => "tablet",
        }
    }
}

impl VirtioDevice for Input {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Input
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        config::LENGTH
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&self.config.read(), offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        // The two writable fields have one byte each, and drivers write each of them separately.
        if let [value] = data {
            self.config.write(offset, *value);
        }
    }

    fn reset(&mut self) {
        self.config.reset();
    }

    fn workers(&mut self, _signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        if std::mem::replace(&mut self.connected, true) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let lights = (self.kind == Kind::Keyboard).then(|| Arc::clone(&self.hub));
        Ok(vec![WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: self.name().into(),
            queues: vec![0, 1],
            handler: Box::new(InputHandler::new(Arc::clone(&self.events), lights)),
        }])
    }

    fn save(&self) -> Result<Section, StateError> {
        let (select, subsel) = self.config.selected();
        let state = message::VirtioInput {
            select: select.into(),
            subsel: subsel.into(),
        };
        Ok(Section::new("input", &state))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::VirtioInput = section.open()?;
        self.config
            .select(narrow("select", saved.select)?, narrow("subsel", saved.subsel)?);
        Ok(())
    }
}

/// The device as the hub sees it.
struct Handle(Arc<Events>);

impl Keyboard for Handle {
    fn is_listening(&self) -> bool {
        self.0.is_driven()
    }

    fn key(&self, key: Key, down: bool) {
        self.0.button(key.code().into(), down);
    }

    fn is_waiting(&self) -> bool {
        self.0.first().is_some()
    }

    fn repeat(&self, key: Key) {
        self.0.repeat(key.code().into());
    }
}

impl Tablet for Handle {
    fn point(&self, pointer: Pointer) {
        self.0.point(pointer);
    }
}

impl Events {
    fn save(&self, leds: u8) -> message::VirtioInputQueues {
        let (pending, down) = self.state();
        message::VirtioInputQueues {
            events: pending.iter().flat_map(|event| event.encode()).collect(),
            down: down.into_iter().map(u32::from).collect(),
            leds: leds.into(),
        }
    }

    /// Gives the lights.
    fn restore(&self, saved: &message::VirtioInputQueues) -> Result<u8, StateError> {
        let leds: u8 = narrow("leds", saved.leds)?;
        check(leds <= LEDS, "leds", "there are three")?;
        check(saved.events.len().is_multiple_of(8), "events", "half an event")?;
        check(saved.events.len() / 8 <= events::MAX_EVENTS, "events", "too many")?;
        let codes = saved.down.iter().map(|code| narrow("down", *code));
        let down = codes.collect::<Result<Vec<u16>, _>>()?;
        check(down.len() <= events::MAX_DOWN, "down", "too many")?;
        let chunks = saved.events.chunks_exact(8);
        let pending = chunks.map(|raw| Event::decode(raw.try_into().unwrap_or_default()));
        self.set_state(pending.collect(), down);
        Ok(leds)
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;
