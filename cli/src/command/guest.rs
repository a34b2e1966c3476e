//! Guests of running VMs, by their agents.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read},
    path::Path,
};

use vmmd_api::v1;

use super::cloud_init::ssh_keys;
use crate::{
    args::{
        Output,
        kind::{GetGuest, SshKeys},
        vm::SetPassword,
    },
    client::{Client, WORK, about_vm, call, empty_answer},
    console::terminal::HiddenInput,
    failure::{Code, Failure, Result},
    manifest::schema,
    output::{self, format},
};

/// Longest password that is read, in bytes.
const PASSWORD: u64 = 4096;

/// Prints the description of the guest by its agent.
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

/// Reads a password: the first line of the file or of standard input. A terminal does not show it.
pub fn read_password(file: &Path) -> Result<String> {
    let failed = |error: io::Error| Failure::new(Code::Other, format!("{}: {error}", file.display()));
    let mut input: Box<dyn Read> = match file.as_os_str() == "-" {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(file).map_err(failed)?),
    };
    let hidden = match file.as_os_str() == "-" {
        true => HiddenInput::enter().map_err(failed)?,
        false => None,
    };
    if hidden.is_some() {
        eprint!("Password: ");
    }
    let mut line = String::new();
    let read = BufReader::new(input.by_ref().take(PASSWORD)).read_line(&mut line);
    if hidden.is_some() {
        eprintln!();
    }
    drop(hidden);
    read.map_err(failed)?;
    let password = line.strip_suffix('\n').unwrap_or(&line);
    let password = password.strip_suffix('\r').unwrap_or(password);
    if password.is_empty() {
        return Err(Failure::new(Code::Usage, "the password is empty"));
    }
    Ok(password.to_owned())
}

/// Sets the password of a user.
pub async fn set_password(client: &Client, args: &SetPassword, password: String) -> Result<()> {
    let request = v1::SetGuestPasswordRequest {
        name: args.vm.clone(),
        user: args.user.clone(),
        password,
        crypted: args.crypted,
    };
    let answer = call(WORK, client.vms.clone().set_guest_password(request)).await;
    answer.map_err(|failure| about_vm(failure, &args.vm))?;
    output::line(format!("password of {} in vm/{} set", args.user, args.vm))
}

/// The keys that the command line gives, or names files of.
pub fn read_keys(given: &[String]) -> Result<Vec<String>> {
    let keys = given.iter().map(|given| ssh_keys(given));
    Ok(keys.collect::<Result<Vec<_>>>()?.concat())
}

/// Prints the keys of a user.
pub async fn keys(client: &Client, args: &SshKeys) -> Result<()> {
    let request = v1::ListGuestSshKeysRequest {
        name: args.vm.clone(),
        user: args.user.clone(),
    };
    let answer = call(WORK, client.vms.clone().list_guest_ssh_keys(request)).await;
    let answer = answer.map_err(|failure| about_vm(failure, &args.vm))?;
    answer.keys.into_iter().try_for_each(output::line)
}

/// Adds keys of a user.
pub async fn add_keys(client: &Client, of: &SshKeys, keys: Vec<String>) -> Result<()> {
    change_keys(client, of, keys, Vec::new()).await?;
    output::line(format!("ssh keys of {} in vm/{} added", of.user, of.vm))
}

/// Removes keys of a user.
pub async fn remove_keys(client: &Client, of: &SshKeys, keys: Vec<String>) -> Result<()> {
    change_keys(client, of, Vec::new(), keys).await?;
    output::line(format!("ssh keys of {} in vm/{} removed", of.user, of.vm))
}

async fn change_keys(client: &Client, of: &SshKeys, add: Vec<String>, remove: Vec<String>) -> Result<()> {
    let request = v1::UpdateGuestSshKeysRequest {
        name: of.vm.clone(),
        user: of.user.clone(),
        add,
        remove,
    };
    let answer = call(WORK, client.vms.clone().update_guest_ssh_keys(request)).await;
    answer.map(drop).map_err(|failure| about_vm(failure, &of.vm))
}
