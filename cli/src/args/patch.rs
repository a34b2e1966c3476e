//! Arguments of `update vm`: a merge patch, or fields with their values.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use serde_json::Value as Json;

use super::{Timeout, vm::Restarted, vm_name};
use crate::complete;

/// `update vm`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").required(true).multiple(true))]
#[command(after_help = "\
Examples:
  vmmctl update vm web --set spec.cpu.cores=4
  vmmctl update vm web --set spec.memory.sizeBytes=2Gi --restart
  vmmctl update vm web --set 'spec.disks[data].rateLimit.operationsPerSecond=500'
  vmmctl update vm web --set metadata.labels.tier=null
  vmmctl update vm web -p '{spec: {runPolicy: manual}}'")]
pub struct UpdateVm {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Merge patch (RFC 7396) in JSON or YAML: its fields replace those of the VM, null removes a field, a list replaces a list
    #[arg(short, long, value_name = "PATCH", group = "change")]
    pub patch: Option<String>,
    /// File with a merge patch; `-` is standard input
    #[arg(long, value_name = "FILE", group = "change", conflicts_with = "patch")]
    pub patch_file: Option<PathBuf>,
    /// Field and value, as in `spec.cpu.cores=4`. Items of lists by name or number: `spec.disks[data].readOnly=true`. `null`
    /// removes the field; a dot in a key is written `\\.`. May be given several times
    #[arg(long, value_name = "PATH=VALUE", group = "change")]
    pub set: Vec<Set>,
    #[command(flatten)]
    pub restart: Restarted,
    /// Let the daemon check everything, print the changes, and change nothing
    #[arg(long, conflicts_with = "restart")]
    pub dry_run: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// A step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Into a field.
    Field(String),
    /// Into an item of a list: its name, or its number.
    Item(String),
}

/// A field and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Set {
    /// Where it is.
    pub path: Vec<Step>,
    /// Its value; null removes the field.
    pub value: Json,
}

impl std::str::FromStr for Set {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, value) = steps(text)?;
        let value = serde_saphyr::from_str(value).map_err(|error| format!("the value: {error}"))?;
        Ok(Self { path, value })
    }
}

/// Parses the steps of a path up to the `=`; also returns the text after the `=`.
fn steps(text: &str) -> Result<(Vec<Step>, &str), String> {
    let syntax = || "must be PATH=VALUE, as in spec.cpu.cores=4".to_owned();
    let (mut path, mut word) = (Vec::new(), String::new());
    // Where a name is complete: after an item.
    let mut after_item = false;
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '\\' => word.push(letters.next().ok_or_else(syntax)?.1),
            '.' | '[' | '=' => {
                match std::mem::take(&mut word) {
                    field if !field.is_empty() && !after_item => path.push(Step::Field(field)),
                    field if field.is_empty() && after_item => {}
                    _ => return Err(syntax()),
                }
                after_item = false;
                if letter == '=' {
                    return Ok((path, text.get(at + 1..).unwrap_or_default()));
                }
                if letter == '[' {
                    let item: String = letters
                        .by_ref()
                        .map(|(_, letter)| letter)
                        .take_while(|letter| *letter != ']')
                        .collect();
                    if item.is_empty() {
                        return Err(syntax());
                    }
                    path.push(Step::Item(item));
                    after_item = true;
                }
            }
            letter => word.push(letter),
        }
    }
    Err(syntax())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_without_a_field_or_value_is_refused() {
        for wrong in ["", "spec", "=1", "a..b=1", "a[]=1", "a[0]b=1", ".a=1"] {
            assert!(wrong.parse::<Set>().is_err(), "{wrong}");
        }
    }
}
