//! Completion of words of the command line, with queries to the daemon.
//!
//! Shells call this program for it (clap_complete's dynamic engine). An empty answer is better than
//! a late one.

use std::{env, ffi::OsStr, path::PathBuf, time::Duration};

use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use vmmd_api::v1;

use crate::{
    client::{Client, Kind, Query},
    contexts::{Connection, Contexts, OPTIONS},
    failure::Result,
};

/// The environment variable by which shells ask for completions.
pub const VARIABLE: &str = "VMMCTL_COMPLETE";
/// Time limit for an answer to a shell.
const PATIENCE: Duration = Duration::from_secs(1);

/// Answers a request of a shell and ends the program, if a shell has started the program.
pub fn answer(command_line: fn() -> clap::Command) {
    clap_complete::CompleteEnv::with_factory(command_line)
        .var(VARIABLE)
        .complete();
}

/// Names of objects of a kind.
pub fn names<K: Kind>() -> ArgValueCompleter {
    ArgValueCompleter::new(|word: &OsStr| {
        candidates(word, K::WORD, &async |client: &Client| {
            let query = Query {
                only_names: true,
                ..Query::default()
            };
            let objects: Vec<K> = client.objects(&query).await?;
            Ok(objects.iter().map(|object| object.name().to_owned()).collect())
        })
    })
}

/// Names of VMs.
pub fn vms() -> ArgValueCompleter {
    names::<v1::Vm>()
}

/// Names of disks that vmmd manages.
pub fn disks() -> ArgValueCompleter {
    names::<v1::Disk>()
}

/// Names of snapshots.
pub fn snapshots() -> ArgValueCompleter {
    names::<v1::Snapshot>()
}

/// Names of images.
pub fn images() -> ArgValueCompleter {
    names::<v1::Image>()
}

/// Ids of operations in progress.
pub fn operations() -> ArgValueCompleter {
    ArgValueCompleter::new(|word: &OsStr| {
        candidates(word, "operation", &async |client: &Client| {
            let active = v1::OperationFilter {
                active: true,
                ..Default::default()
            };
            let operations = client.operations(active).await?;
            Ok(operations.into_iter().map(|operation| operation.id).collect())
        })
    })
}

/// Names of contexts.
pub fn contexts() -> ArgValueCompleter {
    ArgValueCompleter::new(|word: &OsStr| {
        let contexts = Contexts::load().map(|contexts| contexts.contexts.into_keys().collect());
        beginning_with(word, "", contexts.unwrap_or_default())
    })
}

/// Returns the daemon's objects whose name starts with the word.
fn candidates(
    word: &OsStr,
    kind: &str,
    names: &impl AsyncFn(&Client) -> Result<Vec<String>>,
) -> Vec<CompletionCandidate> {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let given = connection(env::args().skip_while(|arg| arg != "--").skip(1));
    let found = runtime.block_on(async {
        let asked = async { names(&Client::connect(&given).await?).await };
        tokio::time::timeout(PATIENCE, asked).await
    });
    // Does not wait for a name lookup in progress.
    runtime.shutdown_background();
    match found {
        Ok(Ok(names)) => beginning_with(word, kind, names),
        _ => Vec::new(),
    }
}

fn beginning_with(word: &OsStr, kind: &str, names: Vec<String>) -> Vec<CompletionCandidate> {
    let word = word.to_string_lossy();
    let prefix = format!("{kind}/");
    let whole = |name: String| {
        if !kind.is_empty() && word.starts_with(&prefix) {
            format!("{prefix}{name}")
        } else {
            name
        }
    };
    let fitting = names
        .into_iter()
        .map(whole)
        .filter(|name| name.starts_with(&*word));
    fitting.map(CompletionCandidate::new).collect()
}

/// The daemon that the words typed so far select.
fn connection(words: impl Iterator<Item = String>) -> Connection {
    let mut given = Connection::default();
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        let (option, value) = match word.split_once('=') {
            Some((option, value)) => (option.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        if !OPTIONS.contains(&option.as_str()) {
            continue;
        }
        let Some(value) = value.or_else(|| words.next()) else {
            break;
        };
        let path = Some(PathBuf::from(&value));
        match option.as_str() {
            "--context" => given.context = Some(value),
            "--socket" => given.socket = path,
            "--endpoint" => given.endpoint = Some(value),
            "--ca" => given.ca = path,
            "--cert" => given.cert = path,
            _ => given.key = path,
        }
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typed_options_select_the_daemon() {
        let words = "vmmctl start --context=far --socket /s a --ca ca.crt --key"
            .split(' ')
            .map(str::to_owned);
        let given = connection(words);
        assert_eq!(given.context.as_deref(), Some("far"));
        assert_eq!(given.socket, Some(PathBuf::from("/s")));
        assert_eq!((given.ca, given.key), (Some(PathBuf::from("ca.crt")), None));
    }
}
