//! Completion scripts and man pages, from the definition of the command line.

use std::{fs, io, path::Path};

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::{
    args::Cli,
    failure::{Code, Failure, Result},
    output,
};

/// Prints a shell's completion script.
pub fn completion(shell: Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "vmmctl", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

/// Writes `man1/*.1` and the scripts of all packaged shells under the names by which these find them.
pub fn all(directory: &Path) -> Result<()> {
    write_all(directory).map_err(|error| {
        Failure::new(
            Code::Other,
            format!("can't write to {}: {error}", directory.display()),
        )
    })
}

fn write_all(directory: &Path) -> io::Result<()> {
    let man = directory.join("man1");
    fs::create_dir_all(&man)?;
    clap_mangen::generate_to(Cli::command(), &man)?;
    for (shell, file) in [
        (Shell::Bash, "bash/vmmctl"),
        (Shell::Zsh, "zsh/_vmmctl"),
        (Shell::Fish, "fish/vmmctl.fish"),
    ] {
        let file = directory.join(file);
        fs::create_dir_all(file.parent().unwrap_or(directory))?;
        clap_complete::generate(shell, &mut Cli::command(), "vmmctl", &mut fs::File::create(file)?);
    }
    Ok(())
}
