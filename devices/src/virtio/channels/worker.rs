//! Worker of the channels: moves bytes between the ports' queues and the clients, and exchanges
//! control messages with the driver.

use std::{io, sync::Arc, time::Instant};

use vmm_base::GuestMemory;

use super::{
    Channel, F_MULTIPORT, MAX_OUTPUT,
    open::{OnChange, OpenChannels},
    port::Port,
    protocol::{Control, LENGTH, event},
};
use crate::{
    state::{Section, StateError, check, message},
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
    },
};

/// Queues of control messages (5.3.2).
const CONTROL_IN: u16 = 2;
const CONTROL_OUT: u16 = 3;
/// Most input that is delivered in one buffer, in bytes.
const PIECE: usize = 16 << 10;

pub(super) struct ChannelsHandler {
    ports: Vec<Port>,
    open: Arc<OpenChannels>,
    on_change: OnChange,
    chain: Chain,
    scratch: Vec<u8>,
}

/// Use of a queue, by its number (5.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    ControlIn,
    ControlOut,
    /// Input of the port at this index.
    Input(usize),
    Output(usize),
    /// Queues of port 0, which stays unused.
    Nothing,
}

impl Use {
    fn of(queue: u16) -> Self {
        match (queue, queue.checked_sub(4)) {
            (CONTROL_IN, _) => Self::ControlIn,
            (CONTROL_OUT, _) => Self::ControlOut,
            (_, Some(port)) if port.is_multiple_of(2) => Self::Input(usize::from(port / 2)),
            (_, Some(port)) => Self::Output(usize::from(port / 2)),
            (_, None) => Self::Nothing,
        }
    }
}

/// The queue with the input of the port at this index. The queue with its output follows.
fn input_of(index: usize) -> u16 {
    let pair = u16::try_from(index).unwrap_or(u16::MAX).saturating_mul(2);
    pair.saturating_add(4)
}

fn output_of(index: usize) -> u16 {
    input_of(index).saturating_add(1)
}

/// Number of the port at this index, as the driver knows it.
fn id_of(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX).saturating_add(1)
}

/// Tokens of the events of a port: its listener, and its client.
fn tokens(index: usize) -> (u32, u32) {
    let first = u32::try_from(index).unwrap_or(u32::MAX).saturating_mul(2);
    (first, first.saturating_add(1))
}

impl ChannelsHandler {
    pub fn new(channels: Vec<Channel>, open: Arc<OpenChannels>, on_change: OnChange) -> io::Result<Self> {
        let ports = channels.into_iter().map(Port::new);
        Ok(Self {
            ports: ports.collect::<io::Result<_>>()?,
            open,
            on_change,
            chain: Chain::new(),
            scratch: Vec::new(),
        })
    }

    /// Reports the ports that programs of the guest have open, if they have changed.
    fn report(&self) {
        if self.open.set(self.ports.iter().map(|port| port.open)) {
            (self.on_change)();
        }
    }

    /// Gives the driver the messages that wait, as far as there are buffers.
    fn tell(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        for (index, port) in self.ports.iter_mut().enumerate() {
            loop {
                let before = port.messages;
                let Some(raw) = port.next_message(id_of(index)) else {
                    break;
                };
                if !session.pop(CONTROL_IN, &mut self.chain)? {
                    port.messages = before;
                    return Ok(Progress::Done);
                }
                let head = self.chain.head();
                if self.chain.write(session.memory(), 0, &raw).is_err() {
                    port.messages = before;
                    return Err(Fault::Guest {
                        queue: CONTROL_IN,
                        head,
                        reason: "a buffer that is too short for a message",
                    });
                }
                session.add_used(CONTROL_IN, head, u32::try_from(raw.len()).unwrap_or(0))?;
            }
        }
        // Buffers are taken when there is something for them. A ring that makes no sense is found now.
        if session.pop(CONTROL_IN, &mut self.chain)? {
            session.unpop(CONTROL_IN);
        }
        Ok(Progress::Waiting)
    }

    /// Takes the driver's messages.
    fn hear(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        while session.pop(CONTROL_OUT, &mut self.chain)? {
            let head = self.chain.head();
            let Ok(raw) = self.chain.read_obj::<[u8; LENGTH]>(session.memory(), 0) else {
                return Err(Fault::Guest {
                    queue: CONTROL_OUT,
                    head,
                    reason: "a message that is too short",
                });
            };
            self.note(session, Control::decode(raw))?;
            session.add_used(CONTROL_OUT, head, 0)?;
        }
        Ok(Progress::Done)
    }

    /// Messages about ports that are not there, and unknown ones, are ignored.
    fn note(&mut self, session: &mut Session, control: Control) -> Result<(), Fault> {
        let yes = control.value != 0;
        if control.event == event::DEVICE_READY {
            for port in &mut self.ports {
                port.messages.add = yes;
            }
            session.kick_again(CONTROL_IN);
            return Ok(());
        }
        let index = usize::try_from(control.id).unwrap_or(usize::MAX).checked_sub(1);
        let Some(index) = index.filter(|index| *index < self.ports.len()) else {
            return Ok(());
        };
        if let Some(port) = self.ports.get_mut(index) {
            match control.event {
                event::PORT_READY => {
                    port.ready = yes;
                    port.messages.name = yes;
                    port.messages.open = yes;
                }
                event::PORT_OPEN => port.set_open(yes),
                _ => return Ok(()),
            }
        }
        session.kick_again(CONTROL_IN);
        session.kick_again(input_of(index));
        self.rewatch(session, index)
    }

    /// Delivers input of the client while there are buffers and a program that reads.
    fn deliver(&mut self, session: &mut Session, index: usize) -> Result<Progress, Fault> {
        let queue = input_of(index);
        let Some(port) = self.ports.get_mut(index) else {
            return Ok(Progress::Done);
        };
        self.scratch.resize(PIECE, 0);
        port.takes_input = false;
        let mut progress = Progress::Waiting;
        while port.open && port.client.is_some() {
            if !session.pop(queue, &mut self.chain)? {
                progress = Progress::Done;
                break;
            }
            let head = self.chain.head();
            let room = usize::try_from(self.chain.writable_len()).unwrap_or(usize::MAX);
            let space = self.scratch.get_mut(..room.min(PIECE)).unwrap_or_default();
            if space.is_empty() {
                return Err(Fault::Guest {
                    queue,
                    head,
                    reason: "no buffer to fill",
                });
            }
            match port.read(space) {
                Ok(count @ 1..) => {
                    let input = space.get(..count).unwrap_or_default();
                    if self.chain.write(session.memory(), 0, input).is_err() {
                        return Err(Fault::Bug("a buffer is shorter than it said".into()));
                    }
                    session.add_used(queue, head, u32::try_from(count).unwrap_or(0))?;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    session.unpop(queue);
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => port.takes_input = true,
                Ok(_) | Err(_) => port.disconnect(),
            }
            session.unpop(queue);
            break;
        }
        if progress == Progress::Waiting && session.pop(queue, &mut self.chain)? {
            // As for control messages.
            session.unpop(queue);
        }
        self.rewatch(session, index)?;
        Ok(progress)
    }

    /// Passes the guest's output on, one buffer after the other.
    fn pass(&mut self, session: &mut Session, index: usize) -> Result<Progress, Fault> {
        let queue = output_of(index);
        let Some(port) = self.ports.get_mut(index) else {
            return Ok(Progress::Done);
        };
        let mut progress = Progress::Done;
        loop {
            if !port.output.is_empty() {
                progress = Progress::Waiting;
                break;
            }
            if !session.pop(queue, &mut self.chain)? {
                break;
            }
            let head = self.chain.head();
            let length = self.chain.readable_len();
            if length > MAX_OUTPUT {
                return Err(Fault::Guest {
                    queue,
                    head,
                    reason: "a buffer of more than 1 MiB",
                });
            }
            port.output.resize(length as usize, 0);
            if self.chain.read(session.memory(), 0, &mut port.output).is_err() {
                return Err(Fault::Bug("a buffer is shorter than it said".into()));
            }
            port.flush();
            session.add_used(queue, head, 0)?;
        }
        self.rewatch(session, index)?;
        Ok(progress)
    }

    /// Serves a queue that has no use: output is dropped, and there is never input.
    fn drop_output(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        while session.pop(queue, &mut self.chain)? {
            if queue.is_multiple_of(2) {
                session.unpop(queue);
                return Ok(Progress::Waiting);
            }
            session.add_used(queue, self.chain.head(), 0)?;
        }
        Ok(Progress::Done)
    }

    /// Watches the client of a port for what can be done now.
    fn rewatch(&mut self, session: &Session, index: usize) -> Result<(), Fault> {
        let (_, token) = tokens(index);
        let Some(port) = self.ports.get_mut(index) else {
            return Ok(());
        };
        let mut events = EventSet::empty();
        if port.takes_input {
            events |= EventSet::IN;
        }
        if !port.output.is_empty() {
            events |= EventSet::OUT;
        }
        match &mut port.client {
            Some(client) => client.stream.watch(session, token, events),
            None => Ok(()),
        }
    }

    /// The client's connection is ready, or broken.
    fn client_event(&mut self, session: &mut Session, index: usize) -> Result<(), Fault> {
        let Some(port) = self.ports.get_mut(index) else {
            return Ok(());
        };
        if !port.output.is_empty() {
            port.flush();
            session.kick_again(output_of(index));
        }
        if let Some(client) = &mut port.client
            && client.stream.check_hang_up(session)?
            && !port.open
        {
            port.disconnect();
        }
        session.kick_again(input_of(index));
        self.rewatch(session, index)
    }
}

impl QueueHandler for ChannelsHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        if session.features() & F_MULTIPORT == 0 {
            return Ok(());
        }
        for (index, port) in self.ports.iter_mut().enumerate() {
            if let Some(listener) = &port.listener {
                session.watch(listener, tokens(index).0, EventSet::IN)?;
            }
            if let Some(client) = &mut port.client {
                client.stream.end_session();
            }
        }
        (0..self.ports.len()).try_for_each(|index| self.rewatch(session, index))
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        if session.features() & F_MULTIPORT == 0 {
            return self.drop_output(session, queue);
        }
        match Use::of(queue) {
            Use::ControlIn => self.tell(session),
            Use::ControlOut => {
                let progress = self.hear(session);
                self.report();
                progress
            }
            Use::Input(index) => self.deliver(session, index),
            Use::Output(index) => self.pass(session, index),
            Use::Nothing => self.drop_output(session, queue),
        }
    }

    fn event(&mut self, session: &mut Session, token: u32) -> Result<(), Fault> {
        let index = (token / 2) as usize;
        if token % 2 == 1 {
            return self.client_event(session, index);
        }
        let Some(port) = self.ports.get_mut(index) else {
            return Ok(());
        };
        let accepted = port.accept();
        if accepted.map_err(|error| Fault::Backend("accept a client of a channel", error))? {
            session.kick_again(input_of(index));
            session.kick_again(output_of(index));
        }
        self.rewatch(session, index)
    }

    fn drain(&mut self, _session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        self.ports.iter_mut().for_each(Port::reset);
        self.report();
    }

    fn save(&self) -> Result<Section, StateError> {
        let state = message::VirtioChannelsQueues {
            ports: self.ports.iter().map(Port::save).collect(),
        };
        Ok(Section::new("channels", &state))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        let saved: message::VirtioChannelsQueues = section.open()?;
        check(
            saved.ports.len() == self.ports.len(),
            "ports",
            "not as many as the device has",
        )?;
        for (port, saved) in self.ports.iter_mut().zip(&saved.ports) {
            port.restore(saved);
        }
        self.report();
        Ok(())
    }
}
