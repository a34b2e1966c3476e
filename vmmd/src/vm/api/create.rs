//! Makes a VM's record.

use std::sync::Arc;

use tokio::sync::oneshot;
use uuid::Uuid;
use vm_lifecycle::policy::{Decision, Occasion, decide, refuses};
use vmmd_api::v1;
use vmmd_host::{
    capacity::placement::{self, Problem},
    failure::Failure,
    text,
};
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
    operation::Type,
    request,
};
use vmmd_spec::{
    Violations, cloud_init, metadata,
    nic::Mac,
    vm::{Manifest, Nic, VmSpec},
};
use vmmd_store::store_failure;
use vmmd_store::{AccessKeysRecord, HandoverRecord, Hardware, Intent, VmRecord};

use super::describe::View;
use crate::{
    files,
    host::Host,
    node::check::{self, Question},
    registry::vms::{
        Entry,
        command::{Command, Life, Request},
    },
    share,
    vm::{
        access_keys,
        actor::{Actor, Attachments},
        machine::{self, secret},
    },
};

/// Makes a VM of a manifest, and with `start` sees to it that it is started: that operation is returned too. With `dry_run`
/// everything is checked and nothing changed.
pub async fn create(
    host: Arc<Host>,
    vm: v1::Vm,
    start: bool,
    dry_run: bool,
    context: &Context,
) -> Result<(Arc<v1::Vm>, Option<v1::Operation>), Failure> {
    create_with(host, vm, Starts::ByPolicy, start, dry_run, context).await
}

/// Makes a VM whose machine has these addresses, or new ones. Its run policy does not start it: the caller does.
pub async fn create_as(
    host: Arc<Host>,
    vm: v1::Vm,
    hardware: Option<Hardware>,
    context: &Context,
) -> Result<Arc<v1::Vm>, Failure> {
    let made = create_with(host, vm, Starts::ByCaller(hardware), false, false, context).await?;
    Ok(made.0)
}

/// A VM that comes from another node.
#[derive(Debug)]
pub struct Incoming {
    /// Its UUID there.
    pub uid: Uuid,
    /// Where its devices are.
    pub hardware: Hardware,
    /// Whose it is.
    pub handover: HandoverRecord,
    /// SSH keys that the guest may have because of its spec.
    pub access_keys: Vec<AccessKeysRecord>,
}

/// Creates a VM that another node sends. A client cannot start it.
pub async fn create_incoming(
    host: &Arc<Host>,
    vm: v1::Vm,
    incoming: Incoming,
    context: &Context,
) -> Result<(), Failure> {
    let starts = Starts::Elsewhere(incoming);
    create_with(Arc::clone(host), vm, starts, false, false, context).await?;
    Ok(())
}

/// Source of a new VM's first start.
enum Starts {
    /// It runs on another node and comes from there.
    Elsewhere(Incoming),
    /// Its run policy, or the request that creates it.
    ByPolicy,
    /// The caller, with these addresses if they are given.
    ByCaller(Option<Hardware>),
}

async fn create_with(
    host: Arc<Host>,
    mut vm: v1::Vm,
    starts: Starts,
    start: bool,
    dry_run: bool,
    context: &Context,
) -> Result<(Arc<v1::Vm>, Option<v1::Operation>), Failure> {
    if let Some(made) = host.requests.made(context, "CreateVm") {
        let uid = Uuid::from_slice(&made).unwrap_or_default();
        let name = vm.metadata.map(|metadata| metadata.name).unwrap_or_default();
        let created = made_before(&host, uid, start, context).await;
        return created.ok_or_else(|| request::made::gone(&Object::Vm(name, uid)));
    }
    for disk in vm.spec.iter_mut().flat_map(|spec| &mut spec.disks) {
        host.disks.fill_in(disk);
    }
    if let Some(spec) = &mut vm.spec {
        secret::restore(spec, None, host.store.key())?;
    }
    let manifest = validate(&vm)?;
    let policy = manifest.spec.run_policy;
    if let Some(hint) = refuses(policy, Request::Start).filter(|_| start) {
        let message = format!("the VM has the run policy {}: {hint}", policy.name());
        return Err(Failure::precondition("RUN_POLICY", message));
    }
    let question = match starts {
        Starts::Elsewhere(_) => Some(Question::Receive),
        _ if start => Some(Question::Start),
        _ if dry_run => Some(Question::Create),
        // Whether the files are there is asked at the start: they may come later.
        _ => None,
    };
    let held = admit(&host, &manifest, question).await?;
    let name = manifest.metadata.name.to_string();
    let _reservation = host.vms.reserve(&name, manifest.spec.pod.as_ref()).await?;
    host.disks.take(&name, &manifest.spec.disks, |index| {
        format!("spec.disks[{index}].disk")
    })?;
    let made = make(&host, (vm.spec, starts), manifest, start, dry_run, context).await;
    if dry_run || made.is_err() {
        host.disks.give_back(&name, None);
    }
    if let (Ok((vm, _)), false) = (&made, dry_run || held.is_empty()) {
        let uid = vm
            .metadata
            .as_ref()
            .and_then(|metadata| metadata.uid.parse().ok());
        let held: Vec<_> = held.into_iter().map(|problem| problem.message).collect();
        let message = format!("a start would be refused now: {}", held.join("; "));
        let object = Object::Vm(name, uid.unwrap_or_default());
        let draft = Draft::warning(object, "StartWouldBeRefused", message);
        host.events.emit(draft.of(context.clone()));
    }
    made
}

async fn make(
    host: &Arc<Host>,
    (wire, starts): (Option<v1::VmSpec>, Starts),
    manifest: Manifest,
    start: bool,
    dry_run: bool,
    context: &Context,
) -> Result<(Arc<v1::Vm>, Option<v1::Operation>), Failure> {
    let name = manifest.metadata.name.to_string();
    let mut uid = Uuid::new_v4();
    let mut handover = None;
    // The disks of a clone may have the keys of its origin.
    let mut access_keys = wire.as_ref().map(access_keys::of_spec).unwrap_or_default();
    let (follows_policy, given) = match starts {
        Starts::ByPolicy => (true, None),
        Starts::ByCaller(hardware) => (false, hardware),
        Starts::Elsewhere(incoming) => {
            uid = incoming.uid;
            handover = Some(incoming.handover);
            access_keys = access_keys::joined(access_keys, incoming.access_keys);
            (false, Some(incoming.hardware))
        }
    };
    let hardware = given.unwrap_or_else(|| machine::allocate(&manifest.spec, |nic| chosen_mac(host, nic)));
    let (made_run, made_revision) = host.vms.now();
    let record = VmRecord {
        uid: uid.as_bytes().to_vec(),
        name: name.clone(),
        generation: host.vms.first_generation(),
        created_ms: text::now_ms(),
        labels: manifest.metadata.labels,
        annotations: manifest.metadata.annotations,
        owner: manifest.metadata.owner,
        spec: wire,
        hardware: Some(hardware),
        intent: if start { Intent::Running } else { Intent::Stopped }.into(),
        begun: host.requests.mark(context).into_iter().collect(),
        handover,
        made_run,
        made_revision,
        access_keys,
        ..VmRecord::default()
    };
    let by_policy = decide(manifest.spec.run_policy, Occasion::Created, Intent::Stopped) == Decision::Start;
    let runs = start || (follows_policy && by_policy);
    let mut view = if runs {
        View::new(v1::VmPhase::Pending, "Created", "")
    } else {
        View::new(v1::VmPhase::Stopped, "Created", "")
    };
    if dry_run {
        let attached = Attachments::default();
        let vm = view.describe(host, uid, &record, &manifest.spec, None, &attached);
        return Ok((Arc::new(vm), None));
    }
    host.store.put(&record).await.map_err(store_failure)?;
    let object = Object::Vm(name.clone(), uid);
    host.events
        .emit(Draft::normal(object.clone(), "Created", "the VM was created").of(context.clone()));
    if let Some(draft) = unknown_user_data(object.clone(), &manifest.spec) {
        host.events.emit(draft.of(context.clone()));
    }
    // A start by request comes in a moment.
    let occasion = (!start && follows_policy).then_some((Occasion::Created, 0));
    Actor::spawn(host, uid, record, manifest.spec, view, None, occasion);
    let entry = host.vms.get(&name).ok_or_else(|| Failure::no_vm(&name))?;
    let created = Arc::clone(&entry.state.borrow());
    if !start {
        return Ok((created, None));
    }
    let operation = begin_start(host, &entry, &name, context).await;
    host.operations.recorded_for(context).await;
    Ok((created, operation))
}

/// The event of a VM whose user data its guest most likely ignores.
pub fn unknown_user_data(object: Object, spec: &VmSpec) -> Option<Draft> {
    let init = spec.cloud_init.as_ref()?;
    let unknown = init.kind.is_for_cloud_init() && !cloud_init::is_known_user_data(&init.user_data);
    unknown.then(|| Draft::warning(object, "UserDataUnknown", cloud_init::UNKNOWN_USER_DATA))
}

/// Starts a VM. A refused start becomes a failed operation and an event, because the creation
/// itself has succeeded. Returns `None` if the VM runs already.
async fn begin_start(host: &Host, entry: &Entry, name: &str, context: &Context) -> Option<v1::Operation> {
    let (reply, answer) = oneshot::channel();
    let life = Life::new(context.clone(), Request::Start, reply);
    let sent = entry.mailbox.send(Command::Life(life)).await;
    let answered = match sent {
        Ok(()) => answer.await.ok(),
        Err(_) => None,
    };
    let failure = match answered {
        Some(Ok(answer)) => return Some(answer.pending?.operation()),
        Some(Err(failure)) => failure,
        None => Failure::unavailable(name),
    };
    let vm = Object::Vm(name.to_owned(), entry.uid);
    let operation = host.operations.begin(Type::VmStart, &vm, context, None);
    let pending = operation.pending();
    let message = format!(
        "the VM was created, but its start was refused: {}",
        failure.message
    );
    let mut draft = Draft::warning(vm, "StartRefused", message);
    draft.operation = operation.id().to_owned();
    host.events.emit(draft.of(context.clone()));
    operation.fail(&failure);
    Some(pending.operation())
}

/// The VM that the same request made under an earlier daemon, if it is still there. A start that the other daemon did not
/// come to is made up for.
async fn made_before(
    host: &Host,
    uid: Uuid,
    start: bool,
    context: &Context,
) -> Option<(Arc<v1::Vm>, Option<v1::Operation>)> {
    let entry = host.vms.find(uid)?;
    let vm = Arc::clone(&entry.state.borrow());
    let status = vm.status.as_ref();
    let never = status.is_some_and(|status| status.instance.is_none() && status.last_exit.is_none());
    let operation = if start && never {
        let name = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
        begin_start(host, &entry, name, context).await
    } else {
        None
    };
    Some((vm, operation))
}

fn validate(vm: &v1::Vm) -> Result<Manifest, Failure> {
    let mut found = Violations::default();
    if vm.status.is_some() {
        found.add("status", "is set by the daemon: leave it out");
    }
    metadata::refuse_given(&mut found, "metadata", &vm.metadata.clone().unwrap_or_default());
    match Manifest::try_from(vm) {
        Ok(manifest) => Ok(found.or(manifest)?),
        Err(more) => {
            found.0.extend(more.0);
            Err(found.into())
        }
    }
}

/// Whether the node takes such a VM. Returns what other VMs have of it at present, where no start follows.
async fn admit(
    host: &Arc<Host>,
    manifest: &Manifest,
    question: Option<Question>,
) -> Result<Vec<Problem>, Failure> {
    check::could_ever(host, &manifest.spec).await?;
    let mut held = Vec::new();
    let problems = match question {
        Some(question) => check::problems(host, manifest, question).await?,
        None => {
            host.schedulable()?;
            let mut problems = files::outside(&manifest.spec, &host.config.roots, None);
            problems.extend(share::check(host, &manifest.spec, None).await?);
            let name = manifest.metadata.name.as_str();
            let (refused, others) = check::created(host, name, &manifest.spec).await?;
            problems.extend(refused);
            held = others;
            problems
        }
    };
    placement::refuse(&problems)?;
    Ok(held)
}

/// Chooses the MAC address of a NIC without `mac`: the one of its reservation, or a locally administered address that is unique on the
/// node.
pub fn chosen_mac(host: &Host, nic: &Nic) -> Mac {
    if let Some(mac) = vmmd_network::reserved_mac(&host.networks, nic) {
        return mac;
    }
    let vms = host.vms.list();
    let taken = |mac: &str| {
        let mut nics = vms
            .iter()
            .flat_map(|vm| vm.status.iter().flat_map(|status| &status.nics));
        nics.any(|nic| nic.mac == mac)
    };
    loop {
        // 46 bits of a random UUID; its version and variant bits are in bytes 6 and 8.
        let [a, b, c, d, e, f, ..] = Uuid::new_v4().into_bytes();
        let mac = Mac::local([a, b, c, d, e, f]);
        if !taken(&mac.to_string()) {
            return mac;
        }
    }
}
