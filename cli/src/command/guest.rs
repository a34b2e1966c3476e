//! Guests of running VMs, by their agents.

use vmmd_api::v1;

use crate::{
    args::{Output, kind::GetGuest},
    client::{Client, WORK, about_vm, call, empty_answer},
    failure::Result,
    manifest::schema,
    output::{self, format},
};

/// Prints what the agent says about the guest.
pub async fn show(client: &Client, args: &GetGuest) -> Result<()> {
    let request = v1::GetGuestInfoRequest {
        name: args.vm.clone(),
    };
    let answer = call(WORK, client.vms.clone().get_guest_info(request)).await;
    let answer = answer.map_err(|failure| about_vm(failure, &args.vm))?;
    let guest = answer.guest.ok_or_else(empty_answer)?;
    match &args.output {
        None | Some(Output::Wide) => output::print(&output::guest::guest(&guest, jiff::Timestamp::now())),
        Some(output) => format::one(format!("guest/{}", args.vm), &guest, schema::GUEST, output),
    }
}
