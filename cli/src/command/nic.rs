//! `nic`: NICs of a VM come, go and change.

use vmmd_api::v1;

use super::{
    disk_spec::usage,
    nic_spec,
    update::{self, Change, How},
};
use crate::{
    args::nic::{Nic, NicChange},
    client::Client,
    failure::{Code, Failure, Result},
    output,
};

/// Changes a VM's NICs as the command line asks for; the name of the one that changes, and the paths of an update mask for that.
type NicsChange = Box<dyn Fn(&mut Vec<v1::NicSpec>) -> Result<(String, Vec<String>)>>;

/// Does it.
pub async fn nic(client: &Client, what: &Nic) -> Result<()> {
    let (vm, change, options) = match what {
        Nic::Ls(args) => {
            let vm = client.get(&args.vm).await?;
            return output::print(&output::nic::table(&vm));
        }
        Nic::Attach(args) => {
            let nic = nic_spec::from_text(0, &args.nic)?;
            (args.vm.clone(), attach(nic), &args.options)
        }
        Nic::Detach(args) => (args.vm.clone(), detach(&args.name), &args.options),
        Nic::Update(args) => {
            // Reports errors in the keys before any call to the daemon.
            nic_spec::apply(&mut v1::NicSpec::default(), &args.nic, "KEY=VALUE")?;
            let change = change(&args.name, &args.nic);
            (args.vm.clone(), change, &args.options)
        }
    };
    let changed = change_part(client, &vm, options, "nic", |spec| change(&mut spec.nics));
    changed.await.map_err(in_option)
}

/// Changes a part of a VM's spec and prints the result. `change` returns the name of the part and
/// the paths that it changes.
pub async fn change_part(
    client: &Client,
    vm: &str,
    options: &NicChange,
    what: &str,
    change: impl Fn(&mut v1::VmSpec) -> Result<(String, Vec<String>)>,
) -> Result<()> {
    let client = client.with_timeout(options.timeout.timeout);
    let how = How {
        dry_run: options.dry_run,
        restart: options.restart,
        grace: None,
    };
    let mut changed = String::new();
    let done = update::rewrite(&client, vm, how, |there| {
        let mut vm = there.clone();
        let (name, paths) = change(vm.spec.get_or_insert_default())?;
        changed = name;
        Ok(Change { vm, paths })
    });
    let done = done.await?;
    output::line(format!("vm/{vm} {what} {changed} {}", done.text))?;
    done.lines
        .iter()
        .try_for_each(|line| output::line(format!("  {line}")))
}

/// The daemon says where the NIC is in the spec, which the command line does not.
fn in_option(mut failure: Failure) -> Failure {
    let begins = failure.message.strip_prefix("spec.nics[");
    if let Some((_, said)) = begins.and_then(|rest| rest.split_once("]."))
        && let Some((field, said)) = said.split_once(": ")
    {
        failure.message = format!("{field}=: {said}");
    }
    failure
}

fn attach(nic: v1::NicSpec) -> NicsChange {
    Box::new(move |nics| {
        let mut nic = nic.clone();
        if nic.name == "eth0" && nics.iter().any(|other| other.name == nic.name) {
            // No name was given, most likely: the first one that is free.
            let free = |name: &String| nics.iter().all(|other| other.name != *name);
            nic.name = (0..)
                .map(|index| format!("eth{index}"))
                .find(free)
                .unwrap_or_default();
        }
        let paths = vec![format!("spec.nics[{}]", nic.name)];
        if nics.iter().any(|other| other.name == nic.name) {
            let message = format!("the VM has a NIC \"{}\" already", nic.name);
            return Err(Failure::new(Code::Invalid, message));
        }
        let name = nic.name.clone();
        nics.push(nic);
        Ok((name, paths))
    })
}

fn detach(name: &str) -> NicsChange {
    let name = name.to_owned();
    Box::new(move |nics| {
        let before = nics.len();
        nics.retain(|nic| nic.name != name);
        if nics.len() == before {
            return Err(not_found(&name));
        }
        Ok((name.clone(), vec![format!("spec.nics[{name}]")]))
    })
}

fn change(name: &str, text: &str) -> NicsChange {
    let (name, text) = (name.to_owned(), text.to_owned());
    Box::new(move |nics| {
        let nic = nics.iter_mut().find(|nic| nic.name == name);
        let nic = nic.ok_or_else(|| not_found(&name))?;
        nic_spec::apply(nic, &text, "KEY=VALUE")?;
        if nic.name != name {
            return Err(usage(
                "the name of a NIC can't be changed: detach it and attach another one".to_owned(),
            ));
        }
        let fields = nic_spec::fields(&text);
        let paths = fields.map(|field| format!("spec.nics[{name}].{field}")).collect();
        Ok((name.clone(), paths))
    })
}

fn not_found(name: &str) -> Failure {
    Failure::new(Code::NotFound, format!("the VM has no NIC \"{name}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attached_nic_has_the_first_free_name() {
        let mut nics = vec![nic_spec::from_text(0, "network=lan").unwrap()];
        let change = attach(nic_spec::from_text(0, "network=dmz").unwrap());
        let (name, paths) = change(&mut nics).unwrap();
        assert_eq!(
            (name.as_str(), paths),
            ("eth1", vec!["spec.nics[eth1]".to_owned()])
        );
        assert_eq!(nics[1].name, "eth1");
    }

    #[test]
    fn refusal_names_the_key_of_the_nic() {
        let of = |message: &str| in_option(Failure::new(Code::Precondition, message)).message;
        assert_eq!(
            of("spec.nics[1].bridge: there is no network interface \"br9\" on the node"),
            "bridge=: there is no network interface \"br9\" on the node"
        );
        assert_eq!(of("NIC \"eth1\": taken"), "NIC \"eth1\": taken");
    }
}
