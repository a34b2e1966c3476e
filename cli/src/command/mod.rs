//! What each verb does.

mod act;
mod apply;
mod config;
mod create;
mod diagnose;
mod difference;
mod disk;
mod disk_spec;
mod edit;
mod events;
mod generate;
mod get;
mod logs;
mod memory;
mod node;
mod operation;
mod top;
mod update;
mod vm_disk;

use crate::{
    args::{
        Cli, Command, Connection, Create, CreateVm, CreateWhat, DeleteVm, DeleteWhat, Describe, Edit, Get,
        NodeOutput, Resize, disk::ResizeDisk, memory::Set, operation::Operation,
    },
    client::Client,
    console,
    failure::{Failure, Result},
    manifest::{emit, quantity, schema},
    output,
};

/// Does what the command line says. A command on several VMs may fail for several reasons.
pub async fn run(cli: Cli) -> Result<(), Vec<Failure>> {
    let given = &cli.connection;
    match cli.command {
        Command::Config { what } => config::run(&what, given).map_err(one),
        Command::Completion { shell } => generate::completion(shell).map_err(one),
        Command::Generate { directory } => generate::all(&directory).map_err(one),
        Command::Version { client: true } => version(None).await.map_err(one),
        // Files are read before the daemon is asked, so that their mistakes show without one.
        Command::Apply(args) => {
            let documents = apply::read(&args.files)?;
            let client = Client::connect(given).await.map_err(one)?;
            let how = update::How {
                dry_run: args.dry_run,
                restart: args.restart,
                grace: args.grace,
            };
            apply::apply(&client, &documents, args.start, how).await
        }
        Command::Create(args) => create(given, *args).await,
        Command::Attach(args) => {
            let disk = disk_spec::from_flags(&args).map_err(one)?;
            let client = Client::connect(given).await.map_err(one)?;
            vm_disk::attach(&client, &args.vm, disk).await.map_err(one)
        }
        Command::Limit(args) => {
            let target = vm_disk::target(&args).map_err(one)?;
            let client = Client::connect(given).await.map_err(one)?;
            let done = vm_disk::limit(&client, &args, target).await;
            done.map_err(disk_spec::in_options).map_err(one)
        }
        command => {
            if let Command::Version { .. } = command {
                output::line(format!("vmmctl {}", env!("CARGO_PKG_VERSION"))).map_err(one)?;
            }
            let client = Client::connect(given).await.map_err(one)?;
            with_daemon(&client, command).await
        }
    }
}

async fn create(given: &Connection, args: Create) -> Result<(), Vec<Failure>> {
    match args.what {
        Some(CreateWhat::Disk(args)) => {
            let request = disk::from_flags(&args).map_err(one)?;
            let client = Client::connect(given).await.map_err(one)?;
            let made = disk::create(&client, request).await;
            let made = made.map_err(disk_spec::in_options).map_err(one)?;
            disk::report(&made, args.output).map_err(one)
        }
        Some(CreateWhat::Vm(args)) => create_vm(given, &args).await,
        None => create_vm(given, &args.vm).await,
    }
}

async fn create_vm(given: &Connection, args: &CreateVm) -> Result<(), Vec<Failure>> {
    if args.files.is_empty() {
        let vm = create::from_flags(args).map_err(one)?;
        let client = Client::connect(given).await.map_err(one)?;
        create::flags(&client, vm, args).await.map_err(one)
    } else {
        let documents = apply::read(&args.files)?;
        let client = Client::connect(given).await.map_err(one)?;
        create::files(&client, &documents, args).await
    }
}

async fn with_daemon(client: &Client, command: Command) -> Result<(), Vec<Failure>> {
    match command {
        Command::Get { what } => match what {
            Get::Vm(args) => get::get(client, &args).await,
            Get::Disk(args) => disk::list(client, &args).await,
            Get::Operation(args) => operation::get(client, &args).await.map_err(one),
        },
        Command::Describe { what } => match what {
            Describe::Vm(args) => get::describe(client, &args.names).await,
            Describe::Disk(args) => disk::describe(client, &args.names).await,
        },
        Command::Edit { what: Edit::Vm(args) } => edit::vm(client, &args).await.map_err(one),
        Command::Detach(args) => vm_disk::detach(client, &args).await,
        Command::Resize {
            what: Resize::Disk(args),
        } => resize(client, &args)
            .await
            .map_err(disk_spec::in_options)
            .map_err(one),
        Command::Top(args) => top::top(client, &args).await.map_err(one),
        Command::Events(args) => events::events(client, &args).await.map_err(one),
        Command::Logs(args) => logs::logs(client, &args).await.map_err(one),
        Command::Diagnose(args) => diagnose::diagnose(client, &args).await.map_err(one),
        Command::Set {
            what: Set::Memory(args),
        } => memory::set(client, &args).await.map_err(one),
        Command::Stats(args) => vm_disk::stats(client, &args).await,
        Command::Start(args) => {
            let no_wait = args.no_wait;
            act::each(client, &args.names.names, &act::Verb::Start { no_wait }).await
        }
        Command::Stop(args) if args.all => act::stop_all(client, args.ending, args.evacuate).await,
        Command::Stop(args) => {
            let verb = act::Verb::Stop(args.ending, args.evacuate);
            act::each(client, &args.names, &verb).await
        }
        Command::Reset(args) => act::each(client, &args.names, &act::Verb::Reset).await,
        Command::Operation {
            what: Operation::Cancel { id },
        } => operation::cancel(client, &id).await.map_err(one),
        Command::Restart(args) => {
            act::each(client, &args.names.names, &act::Verb::Restart(args.ending)).await
        }
        Command::Pause(args) => act::each(client, &args.names, &act::Verb::Pause).await,
        Command::Resume(args) => act::each(client, &args.names, &act::Verb::Resume).await,
        Command::Delete(args) => match args.what {
            Some(DeleteWhat::Disk(args)) => {
                disk::delete(client, &args.names.names, args.ignore_not_found).await
            }
            Some(DeleteWhat::Vm(args)) => delete(client, &args).await,
            None => delete(client, &args.vms).await,
        },
        Command::Console(args) => console::run(client, &args.name, args.no_replay)
            .await
            .map_err(one),
        Command::Node(args) => match args.what {
            Some(verb) => node::run(client, verb).await,
            None => show_node(client, args.output).await.map_err(one),
        },
        Command::Version { .. } => version(Some(client)).await.map_err(one),
        // Done in `run`, without a daemon or before it is asked.
        Command::Apply(_)
        | Command::Create(_)
        | Command::Attach(_)
        | Command::Limit(_)
        | Command::Completion { .. }
        | Command::Config { .. }
        | Command::Generate { .. } => Ok(()),
    }
}

async fn delete(client: &Client, args: &DeleteVm) -> Result<(), Vec<Failure>> {
    let verb = act::Verb::Delete {
        force: args.force,
        ignore_not_found: args.ignore_not_found,
        no_wait: args.no_wait,
    };
    act::each(client, &args.names.names, &verb).await
}

async fn resize(client: &Client, args: &ResizeDisk) -> Result<()> {
    match &args.vm {
        Some(vm) => vm_disk::resize(client, vm, &args.name, args.size).await,
        None => {
            let disk = disk::resize(client, &args.name, args.size.unwrap_or_default()).await?;
            let size = quantity::show(disk.size_bytes);
            output::line(format!("disk/{} resized to {size}", args.name))
        }
    }
}

async fn version(client: Option<&Client>) -> Result<()> {
    match client {
        None => output::line(format!("vmmctl {}", env!("CARGO_PKG_VERSION"))),
        Some(client) => output::line(format!("vmmd   {}", client.node().await?.version)),
    }
}

async fn show_node(client: &Client, format: Option<NodeOutput>) -> Result<()> {
    let node = client.node().await?;
    match format {
        None => output::print(&output::node::node(&node, jiff::Timestamp::now())),
        Some(NodeOutput::Yaml) => output::print(&emit::yaml(&node, schema::NODE)?),
        Some(NodeOutput::Json) => output::line(format!("{:#}", emit::json(&node)?)),
    }
}

fn one(failure: Failure) -> Vec<Failure> {
    vec![failure]
}

/// The failures, if there are any.
fn all(failures: Vec<Failure>) -> Result<(), Vec<Failure>> {
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures)
    }
}
