//! Implementation of each verb.

mod act;
mod apply;
mod cloud_init;
mod config;
mod confirm;
mod create;
mod delete;
mod diagnose;
mod diff;
mod difference;
mod disk;
mod disk_spec;
mod edit;
mod events;
mod generate;
pub mod habits;
mod image;
mod interrupt;
mod label;
mod logs;
mod memory;
mod metadata;
mod migration;
mod network;
mod nic;
mod nic_spec;
mod node;
mod objects;
mod operation;
mod parallel;
mod patch;
mod port_forward;
mod progress;
mod run;
mod share;
mod share_spec;
mod snapshot;
mod ssh;
mod top;
mod update;
mod vm_disk;
mod wait;
mod watch;

use vmmd_api::v1;

use crate::{
    args::{
        Cli, Command, Create, CreateVm, CreateWhat, DeleteObjects, DeleteVm, DeleteWhat, Describe,
        DescribeWhat, Edit, EditWhat, Get, GetVm, GetWhat, List, Output, Patch, Resize, Timeout, UpdateWhat,
        WatchedList,
        disk::{CreateDisk, ResizeDisk},
        image::Image,
        label::Label,
        memory::Set,
        network::{ListNetworks, Network},
        nic::Nic,
        node::NodeVerb,
        operation::Operation,
        share::Share,
        snapshot::Snapshot,
    },
    client::{Client, Query, Watched},
    console,
    contexts::Connection,
    failure::{Failure, Result},
    manifest::{self, emit, quantity, schema},
    output::{
        self, Show,
        format::{self, Document, Layout},
    },
    screen,
};

/// Runs the command line. A command on several VMs may fail for several reasons.
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
            let client = connect(given, args.timeout).await?;
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
            let client = connect(given, args.timeout).await?;
            vm_disk::attach(&client, &args.vm, disk).await.map_err(one)
        }
        Command::Limit(args) => {
            let target = vm_disk::target(&args).map_err(one)?;
            let client = connect(given, args.timeout).await?;
            let done = vm_disk::limit(&client, &args, target).await;
            done.map_err(disk_spec::in_options).map_err(one)
        }
        Command::Diff(args) => {
            let documents = apply::read(&args.files)?;
            let client = Client::connect(given).await.map_err(one)?;
            diff::diff(&client, &documents).await
        }
        Command::Delete(args) => delete(given, args).await,
        Command::Label(args) => label(given, label::What::Labels, &args).await,
        Command::Annotate(args) => label(given, label::What::Annotations, &args).await,
        Command::Patch(args) => patch(given, &args).await,
        Command::Update {
            what: UpdateWhat::Vm(args),
        } => patch(given, &args).await,
        Command::Ssh(args) => {
            let client = Client::connect(given).await.map_err(one)?;
            ssh::ssh(&client, given, &args).await.map_err(one)
        }
        Command::Scp(args) => {
            let client = Client::connect(given).await.map_err(one)?;
            ssh::scp(&client, given, &args).await.map_err(one)
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

/// Connects; changes may take that long.
async fn connect(given: &Connection, timeout: Timeout) -> Result<Client, Vec<Failure>> {
    let client = Client::connect(given).await.map_err(one)?;
    Ok(client.with_timeout(timeout.timeout))
}

async fn delete(given: &Connection, args: DeleteObjects) -> Result<(), Vec<Failure>> {
    let what = match args.what {
        None => return delete_vms(given, &args.vms).await,
        Some(DeleteWhat::Vm(args)) => return delete_vms(given, &args).await,
        Some(what) => what,
    };
    let client = Client::connect(given).await.map_err(one)?;
    match what {
        // Done above.
        DeleteWhat::Vm(_) => Ok(()),
        DeleteWhat::Disk(args) => delete::disks(&client, &args).await,
        DeleteWhat::Image(args) => objects::delete(&client, &args).await,
        DeleteWhat::Network(args) => objects::delete(&client, &args).await,
        DeleteWhat::Snapshot(args) => objects::delete(&client, &args).await,
        DeleteWhat::Nic(args) => nic::nic(&client, &Nic::Detach(args)).await.map_err(one),
        DeleteWhat::Share(args) => share::share(&client, &Share::Rm(args)).await.map_err(one),
    }
}

async fn delete_vms(given: &Connection, args: &DeleteVm) -> Result<(), Vec<Failure>> {
    let documents = apply::read(&args.doomed.files)?;
    let client = connect(given, args.timeout).await?;
    if args.doomed.files.is_empty() {
        delete::vms(&client, args).await
    } else {
        delete::files(&client, &documents, args).await
    }
}

async fn label(given: &Connection, what: label::What, args: &Label) -> Result<(), Vec<Failure>> {
    let labelling = label::read(args).map_err(one)?;
    let client = connect(given, args.timeout).await?;
    label::label(&client, what, &labelling).await
}

async fn patch(given: &Connection, args: &Patch) -> Result<(), Vec<Failure>> {
    let merge = patch::read(args).map_err(one)?;
    let client = connect(given, args.timeout).await?;
    patch::patch(&client, args, merge.as_ref()).await.map_err(one)
}

async fn create(given: &Connection, args: Create) -> Result<(), Vec<Failure>> {
    let what = match args.what {
        None => return create_vm(given, &args.vm).await,
        Some(CreateWhat::Vm(args)) => return create_vm(given, &args).await,
        Some(CreateWhat::Disk(args)) => return create_disk(given, &args).await,
        Some(what) => what,
    };
    let client = Client::connect(given).await.map_err(one)?;
    let created = match what {
        // Done above.
        CreateWhat::Vm(_) | CreateWhat::Disk(_) => Ok(()),
        CreateWhat::Image(args) => image::import(&client, &args).await,
        CreateWhat::Network(args) => network::create(&client, &args).await,
        CreateWhat::Snapshot(args) => snapshot::create(&client, &args).await,
        CreateWhat::Nic(args) => nic::nic(&client, &Nic::Attach(args)).await,
        CreateWhat::Share(args) => share::share(&client, &Share::Add(args)).await,
    };
    created.map_err(one)
}

async fn create_disk(given: &Connection, args: &CreateDisk) -> Result<(), Vec<Failure>> {
    let request = disk::from_flags(args).map_err(one)?;
    let client = connect(given, args.timeout).await?;
    let made = disk::create(&client, request).await;
    let (made, operation) = made.map_err(disk_spec::in_options).map_err(one)?;
    disk::report(&made, operation.as_ref(), args.output.as_ref()).map_err(one)
}

async fn create_vm(given: &Connection, args: &CreateVm) -> Result<(), Vec<Failure>> {
    if args.files.is_empty() {
        let vm = create::from_flags(args).map_err(one)?;
        let client = connect(given, args.timeout).await?;
        create::vm(&client, vm, args).await.map_err(one)
    } else {
        let documents = apply::read(&args.files)?;
        let client = connect(given, args.timeout).await?;
        create::files(&client, &documents, args).await
    }
}

async fn with_daemon(client: &Client, command: Command) -> Result<(), Vec<Failure>> {
    if let Some((targets, timeout, verb)) = act::verb_of(&command) {
        return act::targets(&client.with_timeout(timeout.timeout), targets, &verb).await;
    }
    match command {
        Command::Get(args) => get(client, args).await,
        Command::Describe(args) => describe(client, args).await,
        Command::Edit(args) => edit(client, args).await,
        Command::Detach(args) => vm_disk::detach(client, &args).await,
        Command::Resize {
            what: Resize::Disk(args),
        } => resize(client, &args).await.map_err(one),
        Command::Update { what } => update(client, what).await,
        Command::Top(args) => top::top(client, &args).await.map_err(one),
        Command::Events(args) => events::events(client, &args).await.map_err(one),
        Command::Logs(args) => logs::logs(client, &args).await.map_err(one),
        Command::Diagnose(args) => diagnose::diagnose(client, &args).await.map_err(one),
        Command::Network { what } => network(client, what).await,
        Command::Run(args) => run::run(client, &args).await.map_err(one),
        Command::Image { what } => image(client, what).await,
        Command::Nic { what } => nic::nic(client, &what).await.map_err(one),
        Command::Share { what } => share::share(client, &what).await.map_err(one),
        Command::Set {
            what: Set::Memory(args),
        } => memory::set(&client.with_timeout(args.timeout.timeout), &args)
            .await
            .map_err(one),
        Command::Stats(args) => vm_disk::stats(client, &args).await,
        Command::Wait(args) => wait::wait(client, &args).await,
        Command::Operation {
            what: Operation::Cancel { id, timeout },
        } => {
            let client = &client.with_timeout(timeout.timeout);
            operation::cancel(client, &id).await.map_err(one)
        }
        Command::Console(args) => console::run(client, &args).await.map_err(one),
        Command::Vnc(args) => screen::vnc(client, &args).await.map_err(one),
        Command::PortForward(args) => port_forward::port_forward(client, &args).await.map_err(one),
        Command::Screenshot(args) => screen::screenshot(client, &args).await.map_err(one),
        Command::SendKey(args) => screen::send_key(client, &args).await.map_err(one),
        Command::Type(args) => screen::type_text(client, &args).await.map_err(one),
        Command::Node(args) => match args.what {
            Some(verb) => node::run(client, verb).await,
            None => show_node(client, args.output.as_ref()).await.map_err(one),
        },
        Command::Snapshot { what } => snapshot(client, what).await,
        Command::Restore(args) => snapshot::restore(client, &args).await.map_err(one),
        Command::Clone(args) => snapshot::clone(client, &args).await,
        Command::Migrate(args) => migration::run(client, args).await.map_err(one),
        Command::Version { .. } => version(Some(client)).await.map_err(one),
        // Done before, or in `run`, without a daemon or before it is asked.
        Command::Start(_)
        | Command::Stop(_)
        | Command::Restart(_)
        | Command::Reset(_)
        | Command::Pause(_)
        | Command::Resume(_)
        | Command::Apply(_)
        | Command::Create(_)
        | Command::Attach(_)
        | Command::Limit(_)
        | Command::Diff(_)
        | Command::Delete(_)
        | Command::Label(_)
        | Command::Annotate(_)
        | Command::Patch(_)
        | Command::Ssh(_)
        | Command::Scp(_)
        | Command::Completion { .. }
        | Command::Config { .. }
        | Command::Generate { .. } => Ok(()),
    }
}

async fn get(client: &Client, Get { what, vms }: Get) -> Result<(), Vec<Failure>> {
    match what {
        None => get_vms(client, &vms).await,
        Some(GetWhat::Vm(args)) => get_vms(client, &args).await,
        Some(GetWhat::Disk(args)) => list(client, &args).await,
        Some(GetWhat::Operation(args)) => operation::get(client, &args).await.map_err(one),
        Some(GetWhat::Node(args)) => show_node(client, args.output.as_ref()).await.map_err(one),
        Some(GetWhat::Image(args)) => list(client, &args).await,
        Some(GetWhat::Network(args)) => networks(client, args).await,
        Some(GetWhat::Snapshot(args)) => objects::get(client, &args, &objects::query(&args)).await,
        Some(GetWhat::Nic(args)) => nic::nic(client, &Nic::Ls(args)).await.map_err(one),
        Some(GetWhat::Share(args)) => share::share(client, &Share::Ls(args)).await.map_err(one),
        Some(GetWhat::Event(args)) => events::events(client, &args).await.map_err(one),
        Some(GetWhat::All) => get_all(client).await,
    }
}

async fn get_vms(client: &Client, args: &GetVm) -> Result<(), Vec<Failure>> {
    let query = Query {
        phases: args.phases.iter().map(|phase| phase.wire()).collect(),
        ..objects::query(&args.all.list)
    };
    get_or_watch(client, &args.all, &query).await
}

/// Lists objects of a kind once, or watches them.
async fn list<K: Watched + Show>(client: &Client, args: &WatchedList<K>) -> Result<(), Vec<Failure>> {
    get_or_watch(client, args, &objects::query(&args.list)).await
}

async fn get_or_watch<K: Watched + Show>(
    client: &Client,
    args: &WatchedList<K>,
    query: &Query,
) -> Result<(), Vec<Failure>> {
    match args.watch {
        true => watch::watch(client, &args.list, query).await.map_err(one),
        false => objects::get(client, &args.list, query).await,
    }
}

async fn networks(client: &Client, ListNetworks { mut all, json }: ListNetworks) -> Result<(), Vec<Failure>> {
    if json {
        all.list.output = Some(Output::Json);
    }
    list(client, &all).await
}

async fn network(client: &Client, what: Network) -> Result<(), Vec<Failure>> {
    match what {
        Network::Create(args) => network::create(client, &args).await.map_err(one),
        Network::Ls(args) => networks(client, args).await,
        Network::Describe(args) => objects::describe(client, &args).await,
        Network::Update(args) => network::update(client, &args).await.map_err(one),
        Network::Rm(args) => objects::delete(client, &args).await,
    }
}

async fn image(client: &Client, what: Image) -> Result<(), Vec<Failure>> {
    match what {
        Image::Import(args) => image::import(client, &args).await.map_err(one),
        Image::Upload(args) => image::upload(client, &args).await.map_err(one),
        Image::Ls(args) => list(client, &args).await,
        Image::Describe(args) => objects::describe(client, &args).await,
        Image::Rm(args) => objects::delete(client, &args).await,
        Image::Prune(args) => image::prune(client, &args).await.map_err(one),
    }
}

async fn snapshot(client: &Client, what: Snapshot) -> Result<(), Vec<Failure>> {
    match what {
        Snapshot::Create(args) => snapshot::create(client, &args).await.map_err(one),
        Snapshot::Ls(args) => objects::get(client, &args, &objects::query(&args)).await,
        Snapshot::Describe(args) => objects::describe(client, &args).await,
        Snapshot::Rm(args) => objects::delete(client, &args).await,
        Snapshot::Export(args) => snapshot::archive::export(client, &args).await.map_err(one),
        Snapshot::Import(args) => {
            let client = client.with_timeout(args.timeout.timeout);
            snapshot::archive::import(&client, &args).await.map_err(one)
        }
    }
}

/// Lists of each kind, one below the other.
async fn get_all(client: &Client) -> Result<(), Vec<Failure>> {
    get_vms(client, &GetVm::default()).await?;
    output::line("").map_err(one)?;
    list(client, &WatchedList::<v1::Disk>::default()).await?;
    output::line("").map_err(one)?;
    list(client, &WatchedList::<v1::Image>::default()).await?;
    output::line("").map_err(one)?;
    list(client, &WatchedList::<v1::Network>::default()).await?;
    output::line("").map_err(one)?;
    objects::get(client, &List::<v1::Snapshot>::default(), &Query::default()).await
}

async fn describe(client: &Client, Describe { what, vms }: Describe) -> Result<(), Vec<Failure>> {
    match what {
        None => objects::describe(client, &vms).await,
        Some(DescribeWhat::Vm(args)) => objects::describe(client, &args).await,
        Some(DescribeWhat::Disk(args)) => objects::describe(client, &args).await,
        Some(DescribeWhat::Image(args)) => objects::describe(client, &args).await,
        Some(DescribeWhat::Network(args)) => objects::describe(client, &args).await,
        Some(DescribeWhat::Snapshot(args)) => objects::describe(client, &args).await,
        Some(DescribeWhat::Node) => show_node(client, None).await.map_err(one),
    }
}

async fn edit(client: &Client, Edit { what, vm }: Edit) -> Result<(), Vec<Failure>> {
    let args = match what {
        Some(EditWhat::Vm(args)) => args,
        None => vm,
    };
    let client = &client.with_timeout(args.timeout.timeout);
    edit::vm(client, &args).await.map_err(one)
}

async fn update(client: &Client, what: UpdateWhat) -> Result<(), Vec<Failure>> {
    match what {
        // Done in `run`, before the daemon is asked.
        UpdateWhat::Vm(_) => Ok(()),
        UpdateWhat::Disk(args) => resize(client, &args).await.map_err(one),
        UpdateWhat::Network(args) => network::update(client, &args).await.map_err(one),
        UpdateWhat::Nic(args) => nic::nic(client, &Nic::Update(args)).await.map_err(one),
        UpdateWhat::Node(args) => node::run(client, NodeVerb::Label(args)).await,
    }
}

async fn resize(client: &Client, args: &ResizeDisk) -> Result<()> {
    let client = &client.with_timeout(args.timeout.timeout);
    match &args.vm {
        Some(vm) => {
            let resized = vm_disk::resize(client, vm, &args.name, args.size).await;
            resized.map_err(disk_spec::in_options)
        }
        None => {
            let disk = disk::resize(client, &args.name, args.size.unwrap_or_default()).await;
            let disk = disk.map_err(disk_spec::in_options)?;
            let size = quantity::show(manifest::disk::size(&disk));
            output::line(format!("disk/{} resized to {size}", args.name))
        }
    }
}

async fn version(client: Option<&Client>) -> Result<()> {
    match client {
        None => output::line(format!("vmmctl {}", env!("CARGO_PKG_VERSION"))),
        Some(client) => output::line(format!(
            "vmmd   {}",
            client.node().await?.status.unwrap_or_default().version
        )),
    }
}

async fn show_node(client: &Client, output: Option<&Output>) -> Result<()> {
    let node = client.node().await?;
    match output {
        None | Some(Output::Wide) => output::print(&output::node::node(&node, jiff::Timestamp::now())),
        Some(output) => {
            let document = Document {
                title: format!("node/{}", node.metadata.clone().unwrap_or_default().name),
                json: emit::json(&node)?,
                schema: schema::NODE,
            };
            format::documents(&[document], output, Layout::default())
        }
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
