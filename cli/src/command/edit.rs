//! `edit`: a VM's manifest in the user's editor.

use std::{
    env, fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use vmmd_api::v1;

use super::update::{self, How};
use crate::{
    args::EditVm,
    client::Client,
    failure::{Code, Failure, Result},
    manifest::{self, Object, emit, schema},
    output,
};

/// Names that are tried for the file before it is given up.
const TRIES: u32 = 100;

/// Lets the user change a VM. The edited text is kept when it cannot be applied.
pub async fn vm(client: &Client, args: &EditVm) -> Result<()> {
    let name = args.name.as_deref().unwrap_or_default();
    let there = client.get(name).await?;
    let mut vm = there.clone();
    manifest::strip(&mut vm);
    let before = emit::yaml(&emit::vm(&vm)?, schema::VM)?;
    let file = write(name, &before).map_err(|error| {
        let folder = env::temp_dir();
        let message = format!("can't write a file in {}: {error}", folder.display());
        Failure::new(Code::Other, message).hint("TMPDIR names another folder")
    })?;
    let edited = edit(&file).and_then(|()| {
        fs::read_to_string(&file)
            .map_err(|error| Failure::new(Code::Other, format!("can't read {}: {error}", file.display())))
    });
    let done = match edited {
        Ok(after) if after == before => Ok(None),
        Ok(_) => apply(client, &there, &file, args).await.map(Some),
        Err(failure) => Err(failure),
    };
    match done {
        Ok(done) => {
            let _ = fs::remove_file(&file);
            let (text, lines) = match done {
                Some(done) => (done.text, done.lines),
                None => ("unchanged".to_owned(), Vec::new()),
            };
            output::line(format!("vm/{name} {text}"))?;
            lines
                .iter()
                .try_for_each(|line| output::line(format!("  {line}")))
        }
        Err(mut failure) => {
            if ["GENERATION_MISMATCH", "UID_MISMATCH"].contains(&&*failure.reason) {
                failure.message = format!("vm/{name} was changed by somebody else meanwhile");
            }
            // An editor that did not start has written nothing.
            if fs::read_to_string(&file).is_ok_and(|after| after == before) {
                let _ = fs::remove_file(&file);
            } else {
                let kept = format!("what you wrote is in {}", file.display());
                failure.details.push(kept);
            }
            Err(failure)
        }
    }
}

async fn apply(client: &Client, there: &v1::Vm, file: &Path, args: &EditVm) -> Result<update::Done> {
    let documents = manifest::read(file)?;
    let [document] = documents.as_slice() else {
        let message = format!("{} must hold one VM", file.display());
        return Err(Failure::new(Code::Invalid, message));
    };
    let Object::Vm(vm) = &document.object else {
        let message = format!("{} must hold one VM, it holds a disk", file.display());
        return Err(Failure::new(Code::Invalid, message));
    };
    let name = args.name.as_deref().unwrap_or_default();
    if document.name() != name {
        let message = format!("a VM's name can't be changed: it is \"{name}\"");
        return Err(Failure::new(Code::Invalid, message));
    }
    let mut vm = vm.as_ref().clone();
    let known = there.metadata.clone().unwrap_or_default();
    if let Some(metadata) = &mut vm.metadata {
        metadata.uid = known.uid;
        metadata.generation = known.generation;
    }
    let how = How {
        restart: args.restart,
        grace: args.grace,
        dry_run: false,
    };
    let done = update::update(client, vm, there, how).await;
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
                .hint("$EDITOR names another"),
        ),
        Err(error) => Err(Failure::new(
            Code::Other,
            format!("can't run `{editor}`: {error}"),
        )),
    }
}
