//! `edit`: the manifest of a VM, a disk or a network in the user's editor.

use std::{
    env, fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use vmmd_api::v1;

use super::{
    apply,
    update::{self, Done, How},
};
use crate::{
    args::vm::EditVm,
    client::Client,
    failure::{Code, Failure, Result},
    manifest::{self, Object, emit, schema},
    output,
};

/// Maximum number of attempts to find an unused file name.
const TRIES: u32 = 100;

/// Lets the user change a VM.
pub async fn vm(client: &Client, args: &EditVm) -> Result<()> {
    let there = client.get(&args.name).await?;
    let mut vm = there.clone();
    manifest::strip(&mut vm);
    let text = emit::yaml(&emit::manifest(&vm)?, schema::VM)?;
    let how = How {
        restart: args.restart.restart,
        grace: args.restart.grace,
        dry_run: false,
        force_media: false,
    };
    object("vm", &args.name, text, async |object| {
        let Object::Vm(mut vm) = object else {
            return Err(wrong_kind("VM"));
        };
        let known = there.metadata.clone().unwrap_or_default();
        let metadata = vm.metadata.get_or_insert_default();
        (metadata.uid, metadata.generation) = (known.uid, known.generation);
        update::update(client, *vm, &there, how).await
    })
    .await
}

/// Lets the user change a disk.
pub async fn disk(client: &Client, name: &str) -> Result<()> {
    let mut disk: v1::Disk = client.object(name).await?;
    let known = disk.metadata.clone().unwrap_or_default();
    manifest::disk::strip(&mut disk);
    let text = emit::yaml(&emit::manifest(&disk)?, schema::DISK)?;
    object("disk", name, text, async |object| {
        let Object::Disk(request) = object else {
            return Err(wrong_kind("disk"));
        };
        apply::one_disk(client, &request, false, Some(seen(known))).await
    })
    .await
}

/// Lets the user change a network.
pub async fn network(client: &Client, name: &str) -> Result<()> {
    let mut network: v1::Network = client.object(name).await?;
    let known = network.metadata.clone().unwrap_or_default();
    manifest::network::strip(&mut network);
    let text = emit::yaml(&emit::manifest(&network)?, schema::NETWORK)?;
    object("network", name, text, async |object| {
        let Object::Network(network) = object else {
            return Err(wrong_kind("network"));
        };
        apply::one_network(client, *network, false, Some(seen(known))).await
    })
    .await
}

/// Only the object in the state that the user has seen is changed.
fn seen(known: v1::ObjectMetadata) -> v1::Preconditions {
    v1::Preconditions {
        uid: known.uid,
        generation: Some(known.generation),
    }
}

fn wrong_kind(kind: &str) -> Failure {
    Failure::new(
        Code::Invalid,
        format!("the edited text must be the manifest of one {kind}"),
    )
}

/// Lets the user change the manifest `before`, and applies the result. Keeps a text that cannot be applied.
async fn object(
    kind: &str,
    name: &str,
    before: String,
    apply: impl AsyncFnOnce(Object) -> Result<Done>,
) -> Result<()> {
    let file = write(name, &before).map_err(|error| {
        let folder = env::temp_dir();
        let message = format!("cannot write a file in {}: {error}", folder.display());
        Failure::new(Code::Other, message).hint("the environment variable TMPDIR selects another folder")
    })?;
    let edited = edit(&file).and_then(|()| {
        fs::read_to_string(&file)
            .map_err(|error| Failure::new(Code::Other, format!("cannot read {}: {error}", file.display())))
    });
    let done = match edited {
        Ok(after) if after == before => Ok(Done {
            text: update::UNCHANGED.to_owned(),
            lines: Vec::new(),
        }),
        Ok(_) => applied(kind, name, &file, apply).await,
        Err(failure) => Err(failure),
    };
    match done {
        Ok(done) => {
            let _ = fs::remove_file(&file);
            output::line(format!("{kind}/{name} {}", done.text))?;
            output::indented(&done.lines)
        }
        Err(mut failure) => {
            if ["GENERATION_MISMATCH", "UID_MISMATCH"].contains(&&*failure.reason) {
                failure.message = format!("another client has changed {kind}/{name} in the meantime");
            }
            // An editor that did not start has written nothing.
            if fs::read_to_string(&file).is_ok_and(|after| after == before) {
                let _ = fs::remove_file(&file);
            } else {
                failure
                    .details
                    .push(format!("the edited text is in {}", file.display()));
            }
            Err(failure)
        }
    }
}

/// Applies the manifest in an edited file.
async fn applied(
    kind: &str,
    name: &str,
    file: &Path,
    apply: impl AsyncFnOnce(Object) -> Result<Done>,
) -> Result<Done> {
    let documents = manifest::read(file)?;
    let [document] = documents.as_slice() else {
        return Err(wrong_kind(kind));
    };
    if document.name() != name {
        let message = format!("the name of {kind}/{name} cannot be changed");
        return Err(Failure::new(Code::Invalid, message));
    }
    let done = apply(document.object.clone()).await;
    done.map_err(|failure| document.locate(failure))
}

/// A new file that only this user can read.
fn write(name: &str, text: &str) -> io::Result<PathBuf> {
    let mut number = 0;
    loop {
        let path = env::temp_dir().join(format!("vmmctl-{name}-{}-{number}.yaml", std::process::id()));
        let file = fs::File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        match file {
            Ok(mut file) => {
                file.write_all(text.as_bytes())?;
                return Ok(path);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < TRIES => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Runs $VISUAL, $EDITOR or vi; these may have options.
fn edit(file: &Path) -> Result<()> {
    let editor = ["VISUAL", "EDITOR"]
        .into_iter()
        .find_map(|name| env::var(name).ok().filter(|editor| !editor.trim().is_empty()))
        .unwrap_or_else(|| "vi".to_owned());
    let status = Command::new("sh")
        .arg("-c")
        .arg(format!("{editor} \"$1\""))
        .arg("sh")
        .arg(file)
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(
            Failure::new(Code::Other, format!("the editor `{editor}` ended with {status}"))
                .hint("the environment variable EDITOR selects another editor"),
        ),
        Err(error) => Err(Failure::new(
            Code::Other,
            format!("cannot run `{editor}`: {error}"),
        )),
    }
}
