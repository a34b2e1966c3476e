//! The test node's command line.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use vmmd_tests::node::{
    DEFAULT_NAME, KEEPER_VARIABLE, Keeper, NODE_VARIABLE, Node, RUNNER_VARIABLE, Size, images,
    newest_package, retried_log, run_test,
};
use vmmd_tests::{guest, paths};

/// Builds, boots and uses the test node.
#[derive(Parser)]
#[command(name = "node", version)]
struct Arguments {
    /// The node's name. Nodes with different names run beside each other.
    #[arg(long, global = true, default_value = DEFAULT_NAME)]
    name: String,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Build the node image and the guest images, as far as they are not there yet.
    Build,
    /// Boot a node and keep it running; one that runs already is kept.
    Up(SizeArguments),
    /// Install vmmd's newest package in the running node, or newer programs from a folder.
    Sync {
        /// Copy vmmd, vmm and vmmctl from this folder (target/debug, target/release) over the installed ones.
        #[arg(long, value_name = "FOLDER", conflicts_with = "package")]
        from: Option<PathBuf>,
        /// Install this package instead of the newest one in target/deb.
        #[arg(long, value_name = "FILE")]
        package: Option<PathBuf>,
    },
    /// Run a command in the node, or open a shell there.
    Ssh {
        /// The command and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Boot a node and run a command beside it with VMMD_NODE set to it; take the node down when the command ends.
    With {
        #[command(flatten)]
        size: SizeArguments,
        /// The command and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Run a program of tests, and an end-to-end test once more when the emulator lost the node under it.
    #[command(hide = true)]
    Test {
        /// The program.
        program: String,
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Report whether the node runs, and how to reach it
    Status,
    /// End the node.
    Down,
}

#[derive(clap::Args)]
struct SizeArguments {
    /// Processors of the node.
    #[arg(long, default_value_t = Size::default().cpus)]
    cpus: u32,
    /// Memory of the node in MiB.
    #[arg(long, default_value_t = Size::default().memory_mib)]
    memory: u32,
}

impl SizeArguments {
    fn size(&self) -> Size {
        Size {
            cpus: self.cpus,
            memory_mib: self.memory,
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match act(&arguments.name, arguments.action) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("node: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn act(name: &str, action: Action) -> Result<ExitCode> {
    match action {
        Action::Build => {
            let (node, guests) = images()?;
            guest::prepare()?;
            println!("node image: {}", node.disk.display());
            println!("guest images: {}", guests.tree().display());
        }
        Action::Up(size) => {
            if let Some(node) = Node::attach(&paths::run_dir(name))? {
                println!("the node {name} runs already");
                status(name, Some(&node));
            } else {
                let node = boot(name, size.size(), false)?;
                status(name, Some(&node));
            }
        }
        Action::Sync { from, package } => {
            let node = running(name)?;
            match from {
                Some(dir) => println!("copied {}", node.install_programs(&dir)?.join(", ")),
                None => {
                    let package = match package {
                        Some(package) => package,
                        None => newest_package()?.context("there is no package yet: run `make deb`")?,
                    };
                    node.install(&package)?;
                    println!("installed {}", package.display());
                }
            }
        }
        Action::Ssh { command } => {
            let mut ssh = running(name)?.ssh_command();
            if command.is_empty() {
                ssh.arg("-t");
            }
            return Err(ssh.args(command).exec()).context("start ssh");
        }
        Action::With { size, command } => return with(name, size.size(), &command),
        Action::Test { program, arguments } => return Ok(exit_code(run_test(&program, &arguments)?)),
        Action::Status => status(name, Node::attach(&paths::run_dir(name))?.as_ref()),
        Action::Down => match Node::attach(&paths::run_dir(name))? {
            Some(node) => node.stop()?,
            None => println!("no node {name} runs"),
        },
    }
    Ok(ExitCode::SUCCESS)
}

fn boot(name: &str, size: Size, tied: bool) -> Result<Node> {
    images()?;
    let began = Instant::now();
    let node = Node::boot(name, size, tied)?;
    eprintln!(
        "the node {name} is up after {:.1} s",
        began.elapsed().as_secs_f32()
    );
    match newest_package()? {
        Some(package) => {
            node.install(&package)?;
            eprintln!(
                "installed {} after {:.1} s",
                package.display(),
                began.elapsed().as_secs_f32()
            );
        }
        None => {
            eprintln!("vmmd is not installed in it: there is no package yet (`make deb`, then `node sync`)");
        }
    }
    Ok(node)
}

/// The command runs while the node boots: what needs the node waits for it ([`Node::get`]).
fn with(name: &str, size: Size, command: &[String]) -> Result<ExitCode> {
    let (program, arguments) = command.split_first().context("no command")?;
    let dir = paths::run_dir(name);
    ensure!(
        Node::attach(&dir)?.is_none(),
        "the node {name} runs already: end it with `node --name {name} down`"
    );
    match fs::remove_file(retried_log(&dir)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).context("remove the list of tests that were run again");
        }
        _ => {}
    }
    let owned = name.to_owned();
    let keeper = Keeper::start(dir.clone(), move || boot(&owned, size, true))?;
    let mut runner = std::env::current_exe()
        .context("find this program")?
        .into_os_string();
    runner.push(" test");
    let status = Command::new(program)
        .args(arguments)
        .env(RUNNER_VARIABLE, runner)
        .env(NODE_VARIABLE, &dir)
        .env(KEEPER_VARIABLE, keeper.socket())
        .status();
    let up = keeper.wait();
    if let Some(node) = Node::attach(&dir)? {
        node.stop()?;
    }
    let status = status.with_context(|| format!("start {program}"))?;
    up?;
    Ok(exit_code(status))
}

fn exit_code(status: ExitStatus) -> ExitCode {
    status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from)
}

fn running(name: &str) -> Result<Node> {
    Node::attach(&paths::run_dir(name))?
        .with_context(|| format!("no node {name} runs: start it with `node up`"))
}

fn status(name: &str, node: Option<&Node>) {
    match node {
        None => println!("no node {name} runs"),
        Some(node) => {
            println!("node     {name}, QEMU pid {}", node.machine().pid);
            println!("logs     {}", node.dir().display());
            println!("vmmd     {}", node.grpc_socket().display());
            println!("tests    {NODE_VARIABLE}={}", node.dir().display());
        }
    }
}
