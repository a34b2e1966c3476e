//! Fuzzer of a console. It interprets arbitrary bytes as typed input, input taken by a driver,
//! configuration writes, pauses and saves.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::{collections::VecDeque, sync::Arc};

use super::{Console, config, shared::BACKLOG};
use crate::{
    serial::{History, history::Capacity},
    virtio::device::VirtioDevice,
};

/// The entry function. It panics if the console keeps more than it may, loses input or changes its order, takes more than it has
/// room for, is saved and not restored the same, or panics itself.
pub fn driver(data: &[u8]) {
    let history = Arc::new(History::new(Capacity::default()).unwrap());
    let mut console = Console::new(history).unwrap();
    let port = console.port();
    let mut typed = VecDeque::new();
    for step in data.chunks(3) {
        let [what, a, b] = [0, 1, 2].map(|at| step.get(at).copied().unwrap_or(0));
        match what & 7 {
            0 => {
                let input = vec![b; usize::from(a) * 8];
                let room = port.room();
                let input = &input[..input.len().min(room)];
                port.receive(input);
                typed.extend(input);
            }
            1 => {
                let mut space = vec![0; usize::from(a)];
                let count = console.shared.peek(&mut space);
                let expected: Vec<u8> = typed.drain(..count).collect();
                assert_eq!(space[..count], expected);
                console.shared.taken(count);
            }
            2 => console.control().resize(a.into(), b.into()),
            3 => {
                let (offset, length) = (usize::from(a) % config::LENGTH, usize::from(b % 8));
                let length = length.min(config::LENGTH - offset);
                console.write_config(offset, &[b; 8][..length]);
                console.read_config(offset, &mut [0; 8][..length]);
            }
            4 => {
                let front = console.save().unwrap();
                console.restore(&front).unwrap();
                assert_eq!(console.save().unwrap(), front);
            }
            5 => console.shared.set_paused(a & 1 == 1),
            _ => {
                let saved = console.shared.save();
                assert_eq!(saved.backlog, typed.iter().copied().collect::<Vec<_>>());
                let other = Console::new(port.history()).unwrap();
                other.shared.restore(&saved).unwrap();
                assert_eq!(other.shared.save(), saved);
            }
        }
        assert_eq!(console.shared.waiting(), typed.len());
        assert!(typed.len() <= BACKLOG);
    }
}
