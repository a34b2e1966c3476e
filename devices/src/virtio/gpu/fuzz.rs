//! Any bytes as the commands of a hostile driver.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::sync::Arc;

use rfb::Size;
use vm_memory::GuestAddress;
use vmm_base::GuestMemory;

use super::{
    command::{HEADER, Renderer},
    resource::{MAX_BYTES, Resource},
    shared::Shared,
};
use crate::display::Framebuffer;

/// Kinds of commands, so that few bytes make one.
const KINDS: [u32; 16] = [
    0x100, 0x101, 0x101, 0x102, 0x103, 0x103, 0x104, 0x105, 0x105, 0x106, 0x106, 0x107, 0x10a, 0x300, 0x301,
    0x108,
];

/// The entry function. Each command is a byte for its kind and one for the number of its fields, then a byte or four for each
/// field. It panics if the device keeps more than it may, answers without a response, is saved and not restored the same, or
/// panics itself.
pub fn commands(data: &[u8]) {
    let size = Size::new(640, 480).unwrap();
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let new = || {
        Renderer::new(
            Arc::new(Framebuffer::new(size)),
            None,
            Arc::new(Shared::new(size)),
        )
    };
    let mut renderer = new();
    let mut input = data;
    let mut byte = || {
        let (first, rest) = input.split_first()?;
        input = rest;
        Some(*first)
    };
    // Each one may copy megabytes.
    for _ in 0..64 {
        let (Some(kind), Some(count)) = (byte(), byte()) else {
            break;
        };
        if kind == 0xff {
            renderer.reset();
            continue;
        }
        let mut request = KINDS[usize::from(kind % 16)].to_le_bytes().to_vec();
        request.resize(HEADER, kind >> 4);
        for _ in 0..count % 24 {
            let field = match byte().unwrap_or(0) {
                0xf0 => u32::from_le_bytes([0; 4].map(|_| byte().unwrap_or(0))),
                0xf1 => u32::from(byte().unwrap_or(0)) << 8,
                0xf2 => u32::MAX - u32::from(byte().unwrap_or(0)),
                small => small.into(),
            };
            request.extend(field.to_le_bytes());
        }
        request.truncate(HEADER + usize::from(count) * 4);
        let (response, _) = renderer.execute(&memory, &request);
        assert!((HEADER..=1056).contains(&response.len()));
        let used: usize = renderer
            .resources
            .values()
            .map(|one| Resource::bytes(one.size))
            .sum();
        assert!(used <= MAX_BYTES);
    }
    let saved = renderer.save();
    let mut restored = new();
    restored.restore(&saved, &memory).unwrap();
    assert_eq!(restored.save(), saved);
}
