//! Fuzzer of an input device. It interprets arbitrary bytes as a driver's configuration writes, as
//! typed keys and pointer movements, and as taken events.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::{collections::BTreeSet, sync::Arc};

use rfb::Size;

use super::{
    Input,
    config::{self, code},
    events::{MAX_EVENTS, REPEATED},
};
use crate::{
    input::{Hub, Layout},
    virtio::device::VirtioDevice,
};

/// Entry function of the fuzzer. Panics if the device violates an invariant: it must not keep more
/// than its limit, leave a key down without a holder, report a release or repetition of a key that
/// is not down, or panic.
pub fn driver(data: &[u8]) {
    let hub = Arc::new(Hub::new(Layout::De));
    let mut devices = [Input::keyboard(&hub).unwrap(), Input::tablet(&hub).unwrap()];
    let mut source = Some(Hub::source(&hub));
    let mut down: [BTreeSet<u16>; 2] = Default::default();
    for device in &devices {
        device.events.set_driven();
    }
    for step in data.chunks(3) {
        let [what, a, b] = [0, 1, 2].map(|at| step.get(at).copied().unwrap_or(0));
        let which = usize::from(what & 1);
        let typist = source.get_or_insert_with(|| Hub::source(&hub));
        match what >> 1 & 7 {
            0 => typist.scancode(a.into(), b & 1 == 1),
            1 => typist.keysym(u32::from(a) | u32::from(b & 0xfe) << 7, b & 1 == 1),
            2 => typist.point(a, (b.into(), a.into()), Size::new(200, 100).unwrap()),
            3 => {
                let device = &mut devices[which];
                let (offset, length) = (usize::from(a) % config::LENGTH, usize::from(b % 8));
                let length = length.min(config::LENGTH - offset);
                device.write_config(offset, &[b; 8][..length]);
                device.read_config(offset, &mut [0; 8][..length]);
            }
            4 => {
                let state = devices[which].events.save(0);
                devices[which].events.restore(&state).unwrap();
                assert_eq!(devices[which].events.save(0), state);
            }
            5 => source = None,
            _ => take(&devices[which], &mut down[which], a.into()),
        }
        assert!(
            devices
                .iter()
                .all(|device| device.events.state().0.len() <= MAX_EVENTS)
        );
    }
    drop(source);
    for (device, down) in devices.iter().zip(&mut down) {
        take(device, down, usize::MAX);
        assert!(down.is_empty(), "{down:?} is left down");
    }
}

/// Takes events as a driver does.
fn take(device: &Input, down: &mut BTreeSet<u16>, most: usize) {
    for _ in 0..most {
        let Some(event) = device.events.first() else {
            return;
        };
        device.events.pop();
        if event.kind == code::EV_KEY {
            let news = match event.value {
                0 => down.remove(&event.code),
                REPEATED => down.contains(&event.code),
                _ => down.insert(event.code),
            };
            assert!(news, "{event:?} says nothing new");
        }
    }
}
