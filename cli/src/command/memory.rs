//! How much of its memory a VM keeps.

use proto::v1;

use crate::{
    args::memory::SetMemory,
    client::{Client, WORK, about_vm, send},
    failure::Result,
    manifest::quantity,
    output,
};

/// `set memory`.
pub async fn set(client: &Client, args: &SetMemory) -> Result<()> {
    let target = args.target.unwrap_or_default();
    let request = v1::SetMemoryTargetRequest {
        name: args.name.clone(),
        target_bytes: target,
        ..Default::default()
    };
    let answer = send!(client.limit(WORK), client.vms, set_memory_target, request).await;
    answer.map_err(|failure| about_vm(failure, &args.name))?;
    let name = &args.name;
    if target == 0 {
        return output::line(format!("vm/{name} gets all of its memory back"));
    }
    output::line(format!(
        "vm/{name} is asked to do with {}",
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
