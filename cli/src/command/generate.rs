//! Completion scripts and man pages, from the definition of the command line.

use std::{fs, io, path::Path};

use clap::CommandFactory as _;
use clap_complete::{
    Shell,
    env::{Bash, EnvCompleter, Fish, Shells, Zsh},
};

use crate::{
    args::Cli,
    complete,
    failure::{Code, Failure, Result},
    output,
};

/// Prints a shell's completion script. It asks this program, by the name under which the shell finds it.
pub fn completion(shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    let shells = Shells::builtins();
    let written = match shells.completer(&shell.to_string()) {
        Some(completer) => script(completer, &mut text),
        None => Err(io::ErrorKind::Unsupported.into()),
    };
    written.map_err(|error| Failure::new(Code::Other, format!("no completion for {shell}: {error}")))?;
    output::print(&String::from_utf8_lossy(&text))
}

fn script(shell: &dyn EnvCompleter, text: &mut dyn io::Write) -> io::Result<()> {
    shell.write_registration(complete::VARIABLE, "vmmctl", "vmmctl", "vmmctl", text)
}

/// Writes `man1/*.1` and the scripts of all packaged shells under the names by which these find them.
pub fn all(directory: &Path) -> Result<()> {
    write_all(directory).map_err(|error| {
        Failure::new(
            Code::Other,
            format!("cannot write to {}: {error}", directory.display()),
        )
    })
}

fn write_all(directory: &Path) -> io::Result<()> {
    let man = directory.join("man1");
    fs::create_dir_all(&man)?;
    clap_mangen::generate_to(Cli::command(), &man)?;
    let shells: [(&dyn EnvCompleter, &str); 3] = [
        (&Bash, "bash/vmmctl"),
        (&Zsh, "zsh/_vmmctl"),
        (&Fish, "fish/vmmctl.fish"),
    ];
    for (shell, file) in shells {
        let file = directory.join(file);
        fs::create_dir_all(file.parent().unwrap_or(directory))?;
        script(shell, &mut fs::File::create(file)?)?;
    }
    Ok(())
}
