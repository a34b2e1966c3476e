//! The back: hands events over, and hears about the lights.

use std::{sync::Arc, time::Instant};

use vmm_base::GuestMemory;

use super::{
    config::code,
    events::{Event, Events},
};
use crate::{
    input::{Hub, LED_CAPS, LED_NUM, LED_SCROLL},
    state::{Section, StateError},
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
    },
};

const EVENTS: u16 = 0;
/// Token of the list of events.
const WAKE: u32 = 0;
const EVENT_LEN: u32 = 8;

pub(super) struct InputHandler {
    events: Arc<Events>,
    /// Hub to notify about the lights; only for a keyboard.
    lights: Option<Arc<Hub>>,
    leds: u8,
    chain: Chain,
    /// The saved device's pressed keys have no holder.
    restored: bool,
}

impl InputHandler {
    pub fn new(events: Arc<Events>, lights: Option<Arc<Hub>>) -> Self {
        Self {
            events,
            lights,
            leds: 0,
            chain: Chain::new(),
            restored: false,
        }
    }

    /// Hands events over as long as there are some, and buffers.
    fn deliver(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        while let Some(event) = self.events.first() {
            if !session.pop(EVENTS, &mut self.chain)? {
                return Ok(Progress::Done);
            }
            let head = self.chain.head();
            if self.chain.write(session.memory(), 0, &event.encode()).is_err() {
                return Err(Fault::Guest {
                    queue: EVENTS,
                    head,
                    reason: "a buffer that is too short for an event",
                });
            }
            session.add_used(EVENTS, head, EVENT_LEN)?;
            self.events.pop();
        }
        // Buffers are taken when there is something for them. A ring that makes no sense is found now.
        if session.pop(EVENTS, &mut self.chain)? {
            session.unpop(EVENTS);
        }
        Ok(Progress::Waiting)
    }

    fn hear(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        while session.pop(queue, &mut self.chain)? {
            let head = self.chain.head();
            let Ok(raw) = self.chain.read_obj::<[u8; 8]>(session.memory(), 0) else {
                return Err(Fault::Guest {
                    queue,
                    head,
                    reason: "a status that is too short",
                });
            };
            self.note(Event::decode(raw));
            session.add_used(queue, head, 0)?;
        }
        Ok(Progress::Done)
    }

    fn note(&mut self, event: Event) {
        let Some(hub) = self.lights.as_ref().filter(|_| event.kind == code::EV_LED) else {
            return;
        };
        let bit = match event.code {
            code::LED_NUML => LED_NUM,
            code::LED_CAPSL => LED_CAPS,
            code::LED_SCROLLL => LED_SCROLL,
            _ => return,
        };
        self.leds = if event.value == 0 {
            self.leds & !bit
        } else {
            self.leds | bit
        };
        hub.set_leds(self.leds);
    }
}

impl QueueHandler for InputHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.events.set_driven();
        if std::mem::take(&mut self.restored) {
            self.events.release_all();
        }
        session.watch(self.events.wake(), WAKE, EventSet::IN)
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        if queue == EVENTS {
            self.deliver(session)
        } else {
            self.hear(session, queue)
        }
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        // The worker is the only reader. After a spurious event the counter is empty.
        let _count = self.events.wake().read();
        session.kick_again(EVENTS);
        Ok(())
    }

    fn drain(&mut self, _session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        self.restored = false;
        self.events.forget();
        self.leds = 0;
        if let Some(hub) = &self.lights {
            hub.set_leds(0);
        }
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("input", &self.events.save(self.leds)))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        self.leds = self.events.restore(&section.open()?)?;
        self.restored = true;
        // The hub is new. Another keyboard of it may have lights on.
        if let Some(hub) = self.lights.as_ref().filter(|_| self.leds != 0) {
            hub.set_leds(self.leds);
        }
        Ok(())
    }
}
