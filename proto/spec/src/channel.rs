//! Channels between programs of a guest and clients: `spec.channels`.

use vmmd_api::v1;

use crate::{Violations, vm::unique};

/// Most channels of a VM beside the one of its agent.
pub const MAX_CHANNELS: usize = 7;
/// Longest name in bytes.
pub const MAX_NAME: usize = 64;
/// The channel of qemu-guest-agent.
pub const AGENT: &str = "org.qemu.guest_agent.0";

/// Validates the channels of a spec and returns their names.
pub(super) fn names(found: &mut Violations, wires: &[v1::ChannelSpec]) -> Vec<String> {
    let field = "spec.channels";
    if wires.len() > MAX_CHANNELS {
        found.add(field, format_args!("at most {MAX_CHANNELS}, are {}", wires.len()));
        return Vec::new();
    }
    unique(found, field, "name", wires.iter().map(|wire| wire.name.as_str()));
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    for (index, wire) in wires.iter().enumerate() {
        let name = &wire.name;
        let field = format!("{field}[{index}].name");
        if name == AGENT {
            found.add(
                field,
                "is the channel of the guest's agent: give the VM a `guestAgent` instead",
            );
        } else if !(1..=MAX_NAME).contains(&name.len()) || !name.bytes().all(is_allowed) {
            found.add(field, "must have 1 to 64 letters, digits, '.', '-' and '_'");
        }
    }
    wires.iter().map(|wire| wire.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_names_of_channels_are_named() {
        let fields = |names: &[&str]| {
            let wire = |name: &&str| v1::ChannelSpec {
                name: (*name).to_owned(),
            };
            let wires: Vec<_> = names.iter().map(wire).collect();
            let mut found = Violations::default();
            super::names(&mut found, &wires);
            found.0.into_iter().map(|one| one.field).collect::<Vec<_>>()
        };
        assert!(fields(&["com.example.metrics.0", "a-b_c"]).is_empty());
        for wrong in ["", "a b", "a/b", "ä", AGENT, &"x".repeat(65)] {
            assert_eq!(fields(&["a", wrong]), ["spec.channels[1].name"], "{wrong}");
        }
        assert_eq!(fields(&["a", "a"]), ["spec.channels"]);
        assert_eq!(
            fields(&["a", "b", "c", "d", "e", "f", "g", "h"]),
            ["spec.channels"]
        );
    }
}
