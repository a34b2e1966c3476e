//! `share`: directories of the node that a VM's guest can mount come and go.

use proto::v1;

use super::{
    share_spec,
    update::{self, Change, How},
};
use crate::{
    args::{nic::NicChange, share::Share},
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
            let name = share.name.clone();
            let add = |shares: &mut Vec<v1::ShareSpec>| {
                if shares.iter().any(|other| other.name == share.name) {
                    let message = format!("the VM has a share \"{}\" already", share.name);
                    return Err(Failure::new(Code::Invalid, message));
                }
                shares.push(share.clone());
                Ok(())
            };
            change(client, &args.vm, &name, &args.options, add).await
        }
        Share::Rm(args) => {
            let remove = |shares: &mut Vec<v1::ShareSpec>| {
                let before = shares.len();
                shares.retain(|share| share.name != args.name);
                if shares.len() == before {
                    let message = format!("the VM has no share \"{}\"", args.name);
                    return Err(Failure::new(Code::NotFound, message));
                }
                Ok(())
            };
            change(client, &args.vm, &args.name, &args.options, remove).await
        }
    }
}

/// Changes a VM's shares, of which the one called `name` is another then.
async fn change(
    client: &Client,
    vm: &str,
    name: &str,
    options: &NicChange,
    change: impl Fn(&mut Vec<v1::ShareSpec>) -> Result<()>,
) -> Result<()> {
    let client = client.with_timeout(options.timeout.timeout);
    let how = How {
        dry_run: options.dry_run,
        restart: options.restart,
        grace: None,
    };
    let done = update::rewrite(&client, vm, how, |there| {
        let mut vm = there.clone();
        change(&mut vm.spec.get_or_insert_default().shares)?;
        let paths = vec![format!("spec.shares[{name}]")];
        Ok(Change { vm, paths })
    })
    .await?;
    output::line(format!("vm/{vm} share {name} {}", done.text))?;
    for line in done.lines {
        output::line(format!("  {line}"))?;
    }
    Ok(())
}
