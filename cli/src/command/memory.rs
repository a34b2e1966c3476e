//! How much of its memory a VM keeps.

use vmmd_api::v1;

use super::update::{self, Change, How};
use crate::{
    args::memory::SetMemory,
    client::{Client, about_vm},
    failure::Result,
    manifest::quantity,
    output,
};

/// `set memory`.
pub async fn set(client: &Client, args: &SetMemory) -> Result<()> {
    let (name, target) = (&args.name, args.target.unwrap_or_default());
    let balloon = v1::BalloonSpec {
        target_bytes: target,
        ..Default::default()
    };
    let change = Change {
        vm: v1::Vm {
            metadata: super::metadata::named(name),
            spec: Some(v1::VmSpec {
                balloon: Some(balloon),
                ..Default::default()
            }),
            ..Default::default()
        },
        paths: vec!["spec.balloon.target_bytes".to_owned()],
    };
    let vm = update::change(client, change, How::default()).await;
    let vm = vm.map_err(|failure| about_vm(failure, name))?;
    let waits = update::waits(&vm, "spec.balloon.targetBytes");
    if target == 0 {
        return output::line(format!("vm/{name} gets all of its memory back{waits}"));
    }
    output::line(format!(
        "vm/{name} is asked to do with {}{waits}",
        quantity::show(target)
    ))
}

/// The balloon of a VM that is made of flags; `None` leaves it to the daemon.
pub fn from_flags(no_balloon: bool, free_page_reporting: bool) -> Option<v1::BalloonSpec> {
    (no_balloon || free_page_reporting).then_some(v1::BalloonSpec {
        disabled: no_balloon,
        free_page_reporting,
        target_bytes: 0,
    })
}
