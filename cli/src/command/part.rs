//! Parts of a VM's spec with a name, NICs and shares: added, removed and changed.

use vmmd_api::v1;

use super::{
    keys::usage,
    nic_spec,
    update::{self, Change, How},
};
use crate::{
    args::part::{Applied, RemovePart, UpdateNic},
    client::Client,
    failure::{Code, Failure, Result},
    output,
};

/// A part of a VM's spec.
pub trait Part: Clone {
    /// Word for users.
    const WORD: &'static str;
    /// Field of the spec.
    const FIELD: &'static str;

    /// Name of the part, unique in the VM.
    fn name(&self) -> &str;
    /// All parts of a VM.
    fn all(spec: &mut v1::VmSpec) -> &mut Vec<Self>;
    /// Selects a name for a new part that was given none.
    fn complete(&mut self, _others: &[Self]) {}
}

impl Part for v1::NicSpec {
    const WORD: &'static str = "NIC";
    const FIELD: &'static str = "nics";

    fn name(&self) -> &str {
        &self.name
    }

    fn all(spec: &mut v1::VmSpec) -> &mut Vec<Self> {
        &mut spec.nics
    }

    /// `eth0` is the name of a NIC that was probably given none: the first free name.
    fn complete(&mut self, others: &[Self]) {
        let is_free = |name: &String| others.iter().all(|other| other.name != *name);
        if self.name == "eth0" {
            let mut names = (0..).map(|index| format!("eth{index}"));
            self.name = names.find(is_free).unwrap_or_default();
        }
    }
}

impl Part for v1::ShareSpec {
    const WORD: &'static str = "share";
    const FIELD: &'static str = "shares";

    fn name(&self) -> &str {
        &self.name
    }

    fn all(spec: &mut v1::VmSpec) -> &mut Vec<Self> {
        &mut spec.shares
    }
}

/// Adds a part.
pub async fn add<P: Part>(client: &Client, vm: &str, part: P, options: &Applied) -> Result<()> {
    change::<P>(client, vm, options, |parts| insert(parts, part)).await
}

fn insert<P: Part>(parts: &mut Vec<P>, mut part: P) -> Result<(String, Vec<String>)> {
    part.complete(parts);
    let name = part.name().to_owned();
    if parts.iter().any(|other| other.name() == name) {
        let message = format!("the VM has a {} \"{name}\" already", P::WORD);
        return Err(Failure::new(Code::Invalid, message));
    }
    parts.push(part);
    let path = path::<P>(&name);
    Ok((name, vec![path]))
}

/// Removes a part.
pub async fn remove<P: Part>(client: &Client, args: &RemovePart) -> Result<()> {
    let remove = |parts: &mut Vec<P>| {
        let before = parts.len();
        parts.retain(|part| part.name() != args.name);
        if parts.len() == before {
            return Err(not_found::<P>(&args.name));
        }
        Ok((args.name.clone(), vec![path::<P>(&args.name)]))
    };
    change::<P>(client, &args.vm, &args.options, remove).await
}

/// Changes a NIC.
pub async fn update_nic(client: &Client, args: &UpdateNic) -> Result<()> {
    let UpdateNic {
        vm,
        name,
        nic,
        options,
    } = args;
    let update = |nics: &mut Vec<v1::NicSpec>| {
        let there = nics.iter_mut().find(|there| there.name == *name);
        let there = there.ok_or_else(|| not_found::<v1::NicSpec>(name))?;
        nic_spec::apply(there, nic, "KEY=VALUE")?;
        if there.name != *name {
            let message = "the name of a NIC cannot be changed: delete the NIC and create another one";
            return Err(usage(message));
        }
        let fields = nic_spec::fields(nic);
        let path = path::<v1::NicSpec>(name);
        Ok((
            name.clone(),
            fields.map(|field| format!("{path}.{field}")).collect(),
        ))
    };
    change::<v1::NicSpec>(client, vm, options, update).await
}

fn path<P: Part>(name: &str) -> String {
    format!("spec.{}[{name}]", P::FIELD)
}

fn not_found<P: Part>(name: &str) -> Failure {
    Failure::new(Code::NotFound, format!("the VM has no {} \"{name}\"", P::WORD))
}

/// Changes parts of a VM and prints the result. `change` returns the name of the part and the paths that it changes.
async fn change<P: Part>(
    client: &Client,
    vm: &str,
    options: &Applied,
    change: impl FnOnce(&mut Vec<P>) -> Result<(String, Vec<String>)>,
) -> Result<()> {
    let how = How {
        dry_run: options.dry_run,
        restart: options.restart,
        ..How::default()
    };
    let mut changed = String::new();
    let done = update::rewrite(client, vm, how, |there| {
        let mut vm = there.clone();
        let (name, paths) = change(P::all(vm.spec.get_or_insert_default()))?;
        changed = name;
        Ok(Change { vm, paths })
    });
    let done = done.await.map_err(in_option)?;
    output::line(format!(
        "vm/{vm} {} {changed} {}",
        P::WORD.to_lowercase(),
        done.text
    ))?;
    output::indented(&done.lines)
}

/// Replaces the path of a NIC in a message by the key of the command line.
fn in_option(mut failure: Failure) -> Failure {
    let begins = failure.message.strip_prefix("spec.nics[");
    if let Some((_, said)) = begins.and_then(|rest| rest.split_once("]."))
        && let Some((field, said)) = said.split_once(": ")
    {
        failure.message = format!("{field}=: {said}");
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_nic_has_the_first_free_name() {
        let mut nics = vec![nic_spec::from_text(0, "network=lan").unwrap()];
        let (name, paths) = insert(&mut nics, nic_spec::from_text(0, "network=dmz").unwrap()).unwrap();
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
