//! `share`: directories of the node that a VM's guest can mount come and go.

use vmmd_api::v1;

use super::{nic::change_part, share_spec};
use crate::{
    args::share::Share,
    client::Client,
    failure::{Code, Failure, Result},
    output,
};

/// Does it.
pub async fn share(client: &Client, what: &Share) -> Result<()> {
    match what {
        Share::Ls(args) => {
            let vm = client.get(&args.vm).await?;
            output::print(&output::share::table(&vm))
        }
        Share::Add(args) => {
            let share = share_spec::from_text(&args.share)?;
            let add = |spec: &mut v1::VmSpec| {
                if spec.shares.iter().any(|other| other.name == share.name) {
                    let message = format!("the VM has a share \"{}\" already", share.name);
                    return Err(Failure::new(Code::Invalid, message));
                }
                spec.shares.push(share.clone());
                Ok(changed(&share.name))
            };
            change_part(client, &args.vm, &args.options, "share", add).await
        }
        Share::Rm(args) => {
            let remove = |spec: &mut v1::VmSpec| {
                let before = spec.shares.len();
                spec.shares.retain(|share| share.name != args.name);
                if spec.shares.len() == before {
                    let message = format!("the VM has no share \"{}\"", args.name);
                    return Err(Failure::new(Code::NotFound, message));
                }
                Ok(changed(&args.name))
            };
            change_part(client, &args.vm, &args.options, "share", remove).await
        }
    }
}

/// The name and the path of a share that changes.
fn changed(name: &str) -> (String, Vec<String>) {
    (name.to_owned(), vec![format!("spec.shares[{name}]")])
}
