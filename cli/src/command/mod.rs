//! Implementation of each verb.

mod act;
mod apply;
mod cloud_init;
mod config;
mod cp;
mod create;
mod credential;
mod delete;
mod diagnose;
mod difference;
mod disk;
mod disk_spec;
mod edit;
mod events;
mod exec;
mod generate;
mod guest;
pub mod habits;
mod image;
mod keys;
mod label;
mod logs;
mod migration;
mod network;
mod nic_spec;
mod node;
mod objects;
mod operation;
mod part;
mod patch;
mod port_forward;
mod probe_spec;
mod progress;
mod run;
mod share_spec;
mod snapshot;
mod ssh;
mod top;
mod update;
mod vm_disk;
mod wait;
mod watch;
mod work;

use vmmd_api::v1;

use self::act::Verb;
use crate::{
    args::{
        Cli, Command, Label, Operation, Output, Timeout,
        disk::UpdateDisk,
        image::Image,
        kind::{Create, Delete, Describe, Edit, Get, GetVm, List, Update, WatchedList},
        snapshot::Snapshot,
        verbs::Channel,
        verbs::{Restart, Start, Stop},
        vm::Set,
    },
    client::{Client, Query},
    console,
    contexts::Connection,
    failure::{Failure, Result},
    manifest::{self, quantity},
    output, screen,
};

/// Runs the command line. A command on several VMs may fail for several reasons. Files are read before the connection to the
/// daemon, so that their errors show without a daemon.
pub async fn run(cli: Cli) -> Result<(), Vec<Failure>> {
    let given = &cli.connection;
    let client = async || Client::connect(given).await;
    match cli.command {
        Command::Get(kind) => get(&client().await?, kind).await?,
        Command::Describe(kind) => describe(&client().await?, kind).await?,
        Command::Create(kind) => create(given, kind).await?,
        Command::Update(kind) => update(given, kind).await?,
        Command::Edit(Edit::Vm(args)) => edit::vm(&limited(given, args.timeout).await?, &args).await?,
        Command::Edit(Edit::Disk(args)) => {
            edit::disk(&limited(given, args.timeout).await?, &args.name).await?;
        }
        Command::Edit(Edit::Network(args)) => {
            edit::network(&limited(given, args.timeout).await?, &args.name).await?;
        }
        Command::Delete(kind) => delete(given, kind).await?,
        Command::Apply(args) => {
            let documents = apply::read(&args.files.files)?;
            let client = limited(given, args.timeout).await?;
            let how = update::How {
                dry_run: args.dry_run,
                restart: args.restart,
                grace: args.grace,
                force_media: false,
            };
            apply::apply(&client, &documents, args.start, how).await?;
        }
        Command::Diff(args) => {
            let documents = apply::read(&args.files)?;
            apply::diff(&client().await?, &documents).await?;
        }
        Command::Run(args) => run::run(&client().await?, &args).await?,
        Command::Start(Start {
            act,
            no_wait,
            reset_nvram,
        }) => {
            let verb = Verb::Start { no_wait, reset_nvram };
            act::run(&client().await?, &act, &verb).await?;
        }
        Command::Stop(Stop {
            act,
            evacuate,
            ending,
        }) => act::run(&client().await?, &act, &Verb::Stop(ending, evacuate)).await?,
        Command::Restart(Restart { act, ending }) => {
            act::run(&client().await?, &act, &Verb::Restart(ending)).await?;
        }
        Command::Nmi(act) => act::run(&client().await?, &act, &Verb::Nmi).await?,
        Command::Reset(act) => act::run(&client().await?, &act, &Verb::Reset).await?,
        Command::Pause(act) => act::run(&client().await?, &act, &Verb::Pause).await?,
        Command::Resume(act) => act::run(&client().await?, &act, &Verb::Resume).await?,
        Command::Wait(args) => wait::wait(&client().await?, &args).await?,
        Command::Attach(args) => {
            let disk = disk_spec::from_flags(&args)?;
            vm_disk::attach(&limited(given, args.timeout).await?, &args.vm, disk).await?;
        }
        Command::Detach(args) => vm_disk::detach(&client().await?, &args).await?,
        Command::Insert(args) => {
            let medium = Some(args.medium.as_str());
            vm_disk::medium(&client().await?, (&args.vm, &args.drive), medium, args.force).await?;
        }
        Command::Eject(args) => {
            vm_disk::medium(&client().await?, (&args.vm, &args.drive), None, args.force).await?;
        }
        Command::Limit(args) => {
            let target = vm_disk::target(&args)?;
            let client = limited(given, args.timeout).await?;
            let done = vm_disk::limit(&client, &args, target).await;
            done.map_err(disk_spec::in_options)?;
        }
        Command::Set(Set::Memory(args)) => {
            update::memory(&limited(given, args.timeout).await?, &args).await?;
        }
        Command::Set(Set::Password(args)) => {
            let password = guest::read_password(&args.file)?;
            guest::set_password(&client().await?, &args, password).await?;
        }
        Command::Label(args) => label::label(given, label::Map::Labels, &args).await?,
        Command::Annotate(args) => label::label(given, label::Map::Annotations, &args).await?,
        Command::Stats(args) => vm_disk::stats(&client().await?, &args).await?,
        Command::Top(args) => top::top(&client().await?, &args).await?,
        Command::Logs(args) => logs::logs(&client().await?, &args).await?,
        Command::Diagnose(args) => diagnose::diagnose(&client().await?, &args).await?,
        Command::Console(args) => console::run(&client().await?, &args).await?,
        Command::Vnc(args) => screen::vnc(&client().await?, &args).await?,
        Command::Screenshot(args) => screen::screenshot(&client().await?, &args).await?,
        Command::SendKey(args) => screen::send_key(&client().await?, &args).await?,
        Command::Type(args) => screen::type_text(&client().await?, &args).await?,
        Command::PortForward(args) => port_forward::port_forward(&client().await?, &args).await?,
        Command::Vsock(verb) => port_forward::vsock(&client().await?, &verb).await?,
        Command::Channel(Channel::Connect(place)) => port_forward::channel(&client().await?, &place).await?,
        Command::Cp(args) => cp::cp(&client().await?, &args).await?,
        Command::Exec(args) => exec::exec(&client().await?, args).await?,
        Command::Shell(args) => ssh::shell(&client().await?, given, args).await?,
        Command::Ssh(args) => ssh::ssh(&client().await?, given, &args).await?,
        Command::Scp(args) => ssh::scp(&client().await?, given, &args).await?,
        Command::Restore(args) => snapshot::restore(&limited(given, args.timeout).await?, &args).await?,
        Command::Clone(args) => snapshot::clone(&limited(given, args.timeout).await?, &args).await?,
        Command::Migrate(verb) => migration::run(&client().await?, verb).await?,
        Command::Image(Image::Upload(args)) => image::upload(&client().await?, &args).await?,
        Command::Image(Image::Prune(args)) => image::prune(&client().await?, &args).await?,
        Command::Snapshot(Snapshot::Export(args)) => {
            snapshot::archive::export(&client().await?, &args).await?;
        }
        Command::Snapshot(Snapshot::Import(args)) => {
            snapshot::archive::import(&limited(given, args.timeout).await?, &args).await?;
        }
        Command::Node(verb) => node::run(given, verb).await?,
        Command::Operation(Operation::Cancel { id, timeout }) => {
            operation::cancel(&limited(given, timeout).await?, &id).await?;
        }
        Command::Config(verb) => config::run(&verb, given)?,
        Command::Completion { shell } => generate::completion(shell)?,
        Command::Version { client: only } => {
            output::line(format!("vmmctl {}", env!("CARGO_PKG_VERSION")))?;
            if !only {
                let status = client().await?.node().await?.status.unwrap_or_default();
                output::line(format!("vmmd   {}", status.version))?;
            }
        }
        Command::Generate { directory } => generate::all(&directory)?,
    }
    Ok(())
}

/// Connects; changes may take `timeout`.
async fn limited(given: &Connection, timeout: Timeout) -> Result<Client> {
    Ok(Client::connect(given).await?.with_timeout(timeout.timeout))
}

async fn get(client: &Client, kind: Get) -> Result<(), Vec<Failure>> {
    match kind {
        Get::Vm(args) => get_vms(client, &args).await?,
        Get::Disk(args) => objects::list(client, &args).await?,
        Get::Image(args) => objects::list(client, &args).await?,
        Get::Network(mut args) => {
            if args.json {
                args.all.list.output = Some(Output::Json);
            }
            objects::list(client, &args.all).await?;
        }
        Get::Snapshot(args) => objects::get(client, &args, &objects::query(&args)).await?,
        Get::Nic(args) => output::print(&output::part::nics(&client.get(&args.vm).await?))?,
        Get::Share(args) => output::print(&output::part::shares(&client.get(&args.vm).await?))?,
        Get::Guest(args) => guest::show(client, &args).await?,
        Get::SshKey(args) => guest::keys(client, &args).await?,
        Get::Operation(args) => operation::get(client, &args).await?,
        Get::Event(args) => events::events(client, &args).await?,
        Get::Node(args) => node::show(client, args.output.as_ref()).await?,
        Get::All => {
            get_vms(client, &GetVm::default()).await?;
            output::line("")?;
            objects::list(client, &WatchedList::<v1::Disk>::default()).await?;
            output::line("")?;
            objects::list(client, &WatchedList::<v1::Image>::default()).await?;
            output::line("")?;
            objects::list(client, &WatchedList::<v1::Network>::default()).await?;
            output::line("")?;
            objects::get(client, &List::<v1::Snapshot>::default(), &Query::default()).await?;
        }
    }
    Ok(())
}

async fn get_vms(client: &Client, args: &GetVm) -> Result<(), Vec<Failure>> {
    let query = Query {
        phases: args.phases.clone(),
        ..objects::query(&args.all.list)
    };
    objects::get_or_watch(client, &args.all, &query).await
}

async fn describe(client: &Client, kind: Describe) -> Result<(), Vec<Failure>> {
    match kind {
        Describe::Vm(args) => objects::describe(client, &args).await,
        Describe::Disk(args) => objects::describe(client, &args).await,
        Describe::Image(args) => objects::describe(client, &args).await,
        Describe::Network(args) => objects::describe(client, &args).await,
        Describe::Snapshot(args) => objects::describe(client, &args).await,
        Describe::Node => Ok(node::show(client, None).await?),
    }
}

async fn create(given: &Connection, kind: Create) -> Result<(), Vec<Failure>> {
    match kind {
        Create::Vm(args) if args.files.is_empty() => {
            let vm = create::from_flags(&args)?;
            create::vm(&limited(given, args.timeout).await?, vm, &args).await?;
        }
        Create::Vm(args) => {
            let documents = apply::read(&args.files)?;
            create::files(&limited(given, args.timeout).await?, &documents, &args).await?;
        }
        Create::Disk(args) => {
            let request = disk::from_flags(&args)?;
            let made = disk::create(&limited(given, args.timeout).await?, request).await;
            let (made, operation) = made.map_err(disk_spec::in_options)?;
            disk::report(&made, operation.as_ref(), args.output.as_ref())?;
        }
        Create::Image(args) => image::import(&limited(given, args.timeout).await?, &args).await?,
        Create::Network(args) => network::create(&limited(given, args.timeout).await?, &args).await?,
        Create::Snapshot(args) => snapshot::create(&limited(given, args.timeout).await?, &args).await?,
        Create::Nic(args) => {
            let nic = nic_spec::from_text(0, &args.nic)?;
            let client = limited(given, args.options.timeout).await?;
            part::add(&client, &args.vm, nic, &args.options).await?;
        }
        Create::SshKey(args) => {
            let keys = guest::read_keys(&args.keys)?;
            guest::add_keys(&Client::connect(given).await?, &args.of, keys).await?;
        }
        Create::Share(args) => {
            let share = share_spec::from_text(&args.share)?;
            let client = limited(given, args.options.timeout).await?;
            part::add(&client, &args.vm, share, &args.options).await?;
        }
    }
    Ok(())
}

async fn update(given: &Connection, kind: Update) -> Result<(), Vec<Failure>> {
    match kind {
        Update::Vm(args) => {
            let merge = patch::read(&args)?;
            patch::patch(&limited(given, args.timeout).await?, &args, merge.as_ref()).await?;
        }
        Update::Disk(args) => resize(&limited(given, args.timeout).await?, &args).await?,
        Update::Network(args) => network::update(&limited(given, args.timeout).await?, &args).await?,
        Update::Nic(args) => {
            // Reports invalid keys without a daemon.
            nic_spec::apply(&mut v1::NicSpec::default(), &args.nic, "KEY=VALUE")?;
            part::update_nic(&limited(given, args.options.timeout).await?, &args).await?;
        }
        Update::Node(args) => node::label(&limited(given, args.timeout).await?, args.labels).await?,
    }
    Ok(())
}

async fn resize(client: &Client, args: &UpdateDisk) -> Result<()> {
    let resized = match &args.vm {
        Some(vm) => vm_disk::resize(client, vm, &args.name, args.size).await,
        None => disk::resize(client, &args.name, args.size.unwrap_or_default())
            .await
            .and_then(|disk| {
                let size = quantity::show(manifest::disk::size(&disk));
                output::line(format!("disk/{} resized to {size}", args.name))
            }),
    };
    resized.map_err(disk_spec::in_options)
}

async fn delete(given: &Connection, kind: Delete) -> Result<(), Vec<Failure>> {
    match kind {
        Delete::Vm(args) => {
            let documents = apply::read(&args.which.files)?;
            delete::vms(&limited(given, args.timeout).await?, &documents, &args).await
        }
        Delete::Disk(args) => delete::disks(&limited(given, args.timeout).await?, &args).await,
        Delete::Image(args) => objects::delete(&limited(given, args.timeout).await?, &args).await,
        Delete::Network(args) => objects::delete(&limited(given, args.timeout).await?, &args).await,
        Delete::Snapshot(args) => objects::delete(&limited(given, args.timeout).await?, &args).await,
        Delete::Nic(args) => {
            let client = limited(given, args.options.timeout).await?;
            Ok(part::remove::<v1::NicSpec>(&client, &args).await?)
        }
        Delete::SshKey(args) => {
            let keys = guest::read_keys(&args.keys)?;
            Ok(guest::remove_keys(&Client::connect(given).await?, &args.of, keys).await?)
        }
        Delete::Share(args) => {
            let client = limited(given, args.options.timeout).await?;
            Ok(part::remove::<v1::ShareSpec>(&client, &args).await?)
        }
    }
}

/// Metadata with a name and labels.
fn metadata(name: &str, labels: &[Label]) -> Option<v1::ObjectMetadata> {
    let labels = labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    Some(v1::ObjectMetadata {
        name: name.to_owned(),
        labels: labels.collect(),
        ..Default::default()
    })
}

/// The failures, if there are any.
fn all(failures: Vec<Failure>) -> Result<(), Vec<Failure>> {
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures)
    }
}
