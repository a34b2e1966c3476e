//! Calls of clients, and the VM state that their answers imply.

use std::{collections::BTreeMap, path::Path};

use proptest::prelude::*;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt;
use vmmd_api::{
    v1::{self, VmPhase, vm_service_client::VmServiceClient},
    well_known,
};

use super::model::{Look, Op, Policy, Run, Spec, Step, Time};

/// VMs there are at most.
pub const VMS: u8 = 4;
/// Label that identifies a spec.
pub const MARK: &str = "mark";

/// How long a guest may take for anything.
pub const SHORT: well_known::Duration = well_known::Duration {
    seconds: 0,
    nanos: 30_000_000,
};

/// End time of a call that is not waited for.
pub const NEVER: Time = Time::MAX;

/// Next call of a client.
#[derive(Clone, Debug)]
pub struct Call {
    pub vm: u8,
    pub kind: Kind,
    /// With a request id.
    pub id: bool,
    /// Sent twice at the same time, when it has one.
    pub twice: bool,
    /// With the generation that the VM had when the round began.
    pub generation: bool,
    /// Run policy and disk in the spec, for calls that write the spec.
    pub policy: Policy,
    pub disk: bool,
}

/// The VM's disk.
pub const DISK: &str = "data";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Create {
        start: bool,
    },
    Start,
    Stop,
    Kill,
    Restart,
    Pause,
    Resume,
    Delete {
        force: bool,
    },
    Update,
    Attach,
    Detach {
        force: bool,
    },
    /// The VM's operation in progress is cancelled.
    Cancel,
    /// All VMs make room; then the node takes VMs again.
    Drain,
    /// The VM's actor panics.
    Panic,
    Get,
    List,
    /// The `vmm` process is killed.
    Die,
    /// An invalid call, of several kinds.
    Illegal(u8),
}

pub fn call() -> impl Strategy<Value = Call> {
    let kind = prop_oneof![
        4 => any::<bool>().prop_map(|start| Kind::Create { start }),
        4 => Just(Kind::Start),
        2 => Just(Kind::Stop),
        1 => Just(Kind::Kill),
        2 => Just(Kind::Restart),
        2 => Just(Kind::Pause),
        2 => Just(Kind::Resume),
        3 => any::<bool>().prop_map(|force| Kind::Delete { force }),
        3 => Just(Kind::Update),
        2 => Just(Kind::Attach),
        2 => any::<bool>().prop_map(|force| Kind::Detach { force }),
        1 => Just(Kind::Cancel),
        1 => Just(Kind::Panic),
        2 => Just(Kind::Get),
        1 => Just(Kind::List),
        1 => Just(Kind::Die),
        1 => (0..6_u8).prop_map(Kind::Illegal),
    ];
    // Not often: all VMs are stopped by it.
    let kind = prop_oneof![99 => kind, 1 => Just(Kind::Drain)];
    let policy = prop_oneof![
        4 => Just(Policy::Manual),
        2 => Just(Policy::UnlessStopped),
        1 => Just(Policy::OnFailure),
        1 => Just(Policy::Always),
        1 => Just(Policy::Off),
    ];
    let often = proptest::bool::weighted;
    (
        0..VMS,
        kind,
        [often(0.8), often(0.2), often(0.2), often(0.3)],
        policy,
    )
        .prop_map(|(vm, kind, [id, twice, generation, disk], policy)| Call {
            vm,
            kind,
            id,
            twice: id && twice,
            generation,
            policy,
            disk,
        })
}

pub type Client = VmServiceClient<Channel>;

/// An answer as JSON: the encoded form of a map has no order.
pub type Answer = Result<serde_json::Value, Status>;

macro_rules! requests {
    ($($name:ident($request:ident) = $method:ident),* $(,)?) => {
        /// A request that changes something.
        #[derive(Clone, Debug)]
        pub enum Request {
            $($name(v1::$request)),*
        }

        impl Request {
            pub fn id(&self) -> &str {
                match self {
                    $(Self::$name(request) => &request.request_id),*
                }
            }

            pub async fn send(&self, client: &mut Client) -> Answer {
                match self {
                    $(Self::$name(request) => {
                        let answer = client.$method(request.clone()).await;
                        answer.map(|response| serde_json::to_value(response.into_inner()).unwrap())
                    })*
                }
            }
        }
    };
}

requests! {
    Create(CreateVmRequest) = create_vm,
    Start(StartVmRequest) = start_vm,
    Stop(StopVmRequest) = stop_vm,
    Restart(RestartVmRequest) = restart_vm,
    Pause(PauseVmRequest) = pause_vm,
    Resume(ResumeVmRequest) = resume_vm,
    Delete(DeleteVmRequest) = delete_vm,
    Update(UpdateVmRequest) = update_vm,
    Attach(AttachDiskRequest) = attach_disk,
    Detach(DetachDiskRequest) = detach_disk,
}

pub fn name(vm: u8) -> String {
    format!("vm{vm}")
}

impl Call {
    fn spec(&self, mark: u64) -> Spec {
        Spec {
            mark,
            policy: self.policy,
            disk: self.disk,
        }
    }

    /// The request, when it changes something. `mark` and `id` are its own, `generation` is the
    /// VM's generation at the beginning of the round, and `disks` the folder with a disk for each
    /// VM.
    pub fn request(
        &self,
        manifest: v1::Vm,
        mark: u64,
        id: String,
        generation: u64,
        disks: &Path,
    ) -> Option<Request> {
        let mut vm = manifest;
        let disk = v1::DiskSpec {
            name: DISK.into(),
            source: Some(v1::disk_spec::Source::Path(
                disks.join(name(self.vm)).to_str().unwrap().into(),
            )),
            format: v1::DiskFormat::Raw.into(),
            ..Default::default()
        };
        let spec = vm.spec.as_mut().unwrap();
        spec.run_policy = policy_name(self.policy).into();
        spec.disks.extend(self.disk.then(|| disk.clone()));
        let metadata = vm.metadata.as_mut().unwrap();
        metadata.name = name(self.vm);
        metadata.labels = [(MARK.to_owned(), mark.to_string())].into();
        let request_id = if self.id { id } else { String::new() };
        let preconditions = (self.generation && generation != 0).then(|| v1::Preconditions {
            generation: Some(generation),
            ..Default::default()
        });
        let name = name(self.vm);
        let grace_period = Some(SHORT);
        macro_rules! plain {
            ($variant:ident($request:ident) $($field:ident: $value:expr),*) => {
                Request::$variant(v1::$request { name, preconditions, request_id, $($field: $value,)* ..Default::default() })
            };
        }
        #[allow(clippy::needless_update, reason = "some requests have nothing else")]
        let request = match self.kind {
            Kind::Create { start } => Request::Create(v1::CreateVmRequest {
                vm: Some(vm),
                start,
                dry_run: false,
                request_id,
            }),
            Kind::Start => plain!(Start(StartVmRequest)),
            Kind::Stop => plain!(Stop(StopVmRequest) grace_period: grace_period),
            Kind::Kill => plain!(Stop(StopVmRequest) force: true),
            Kind::Restart => plain!(Restart(RestartVmRequest) grace_period: grace_period),
            Kind::Pause => plain!(Pause(PauseVmRequest)),
            Kind::Resume => plain!(Resume(ResumeVmRequest)),
            Kind::Delete { force } => plain!(Delete(DeleteVmRequest) force: force),
            Kind::Update => Request::Update(v1::UpdateVmRequest {
                vm: Some(vm),
                grace_period,
                preconditions,
                request_id,
                ..Default::default()
            }),
            Kind::Attach => Request::Attach(v1::AttachDiskRequest {
                vm: name,
                disk: Some(disk),
                preconditions,
                request_id,
            }),
            Kind::Detach { force } => Request::Detach(v1::DetachDiskRequest {
                vm: name,
                disk: DISK.into(),
                timeout: Some(SHORT),
                force,
                preconditions,
                request_id,
            }),
            Kind::Cancel
            | Kind::Drain
            | Kind::Panic
            | Kind::Get
            | Kind::List
            | Kind::Die
            | Kind::Illegal(_) => return None,
        };
        Some(request)
    }

    /// Steps of a request that was carried out.
    pub fn steps(&self, mark: u64, uid: Option<String>) -> Vec<Step> {
        match self.kind {
            Kind::Create { start } => vec![Step::Create {
                uid,
                spec: self.spec(mark),
                wanted: start,
            }],
            Kind::Start => vec![Step::Start],
            Kind::Stop | Kind::Kill => vec![Step::Stop],
            Kind::Die | Kind::Panic => vec![Step::End],
            // A paused guest is woken to hear of it.
            Kind::Drain => vec![Step::Wake, Step::End],
            Kind::Restart => vec![Step::Wake, Step::End, Step::Start],
            Kind::Pause => vec![Step::Pause],
            Kind::Resume => vec![Step::Resume],
            Kind::Delete { force: true } => vec![Step::End, Step::Remove],
            Kind::Delete { force: false } => vec![Step::Look(Look::Down), Step::Remove],
            Kind::Update => vec![Step::Update {
                spec: self.spec(mark),
            }],
            Kind::Attach => vec![Step::Attach],
            Kind::Detach { .. } => vec![Step::Detach],
            // Depends on the cancelled operation: a start ends, a stop is reverted.
            Kind::Cancel => vec![Step::Wake, Step::Stop, Step::Want],
            Kind::Get | Kind::List | Kind::Illegal(_) => Vec::new(),
        }
    }

    /// Steps of a request that was carried out in part: a VM that was to start is wanted, and an
    /// attached disk is detached again.
    pub fn steps_of_part(&self, mark: u64) -> Vec<Step> {
        match self.kind {
            Kind::Start => vec![Step::Want, Step::Start],
            Kind::Restart => vec![Step::Wake, Step::End, Step::Want, Step::Start],
            Kind::Attach => vec![Step::Attach, Step::Detach],
            _ => self.steps(mark, None),
        }
    }

    /// Whether it is no request, and may have its effect after the answer.
    pub fn is_felt_later(&self) -> bool {
        matches!(self.kind, Kind::Die | Kind::Panic | Kind::Drain | Kind::Cancel)
    }
}

/// The reason of a refusal; nothing when the connection broke.
pub fn reason(status: &Status) -> Option<String> {
    let info = status.get_error_details().error_info().cloned();
    match info {
        Some(info) => Some(info.reason),
        None if status.code() == Code::InvalidArgument => Some("INVALID".into()),
        None => None,
    }
}

/// Whether a retry gets the same answer regardless of later changes.
pub fn is_final(answer: &Answer) -> bool {
    answer.is_ok()
}

/// Whether a creation was carried out before, and its VM is gone.
pub fn is_gone(answer: &Answer) -> bool {
    let reason = answer.as_ref().err().and_then(reason);
    reason.as_deref() == Some("OBJECT_GONE")
}

/// Returns the VM state that a refusal implies, whether other calls must have been under way, and
/// whether the call may have been carried out in part.
pub fn refused(call: &Call, status: &Status, generation: u64) -> (Look, bool, bool) {
    let reason = reason(status).unwrap_or_default();
    let (look, disturbed, partial) = match reason.as_str() {
        "VM_NOT_FOUND" => (Look::Absent, false, false),
        "VM_EXISTS" => (Look::Present, false, false),
        "VM_PAUSED" => (Look::Paused, false, false),
        // The machine has ended meanwhile.
        "NOT_RUNNING" if matches!(call.kind, Kind::Attach | Kind::Detach { .. }) => {
            (Look::Present, false, true)
        }
        "NOT_RUNNING" => (Look::Down, false, false),
        "GENERATION_MISMATCH" => (Look::Not(generation), false, false),
        "RUN_POLICY" if call.kind == Kind::Start => (Look::Policy(Policy::Off), false, false),
        // It may have stopped the VM before.
        "RUN_POLICY" if call.kind == Kind::Restart => (Look::Present, false, true),
        "RUN_POLICY" if matches!(call.kind, Kind::Create { .. }) => (Look::Anything, false, false),
        // Said before it is looked whether there is such a VM, which may be the user.
        "DISK_IN_USE" if matches!(call.kind, Kind::Create { .. }) => (Look::Anything, false, false),
        "RUN_POLICY" => (Look::Policy(Policy::Always), false, false),
        "NODE_CORDONED" => (Look::Anything, false, false),
        "DISK_NOT_FOUND" => (Look::NoDisk, false, false),
        // For a disk that a guest has not released yet.
        "BUSY" if matches!(call.kind, Kind::Attach | Kind::Detach { .. }) => (Look::Present, false, false),
        // Also of one that is on its way up or down.
        "STILL_RUNNING" => (Look::Present, false, false),
        "BUSY" | "BEING_DELETED" => (Look::Present, true, false),
        "SUPERSEDED" | "START_CANCELLED" | "CANCELLED" => (Look::Present, true, true),
        // The process was killed while it was being made, or asked; or the actor has panicked.
        "VMM_FAILED" | "VMM_GONE" | "INTERNAL" => (Look::Present, true, true),
        "VM_UNAVAILABLE" | "OPERATION_GIVEN_UP" | "VMM_UNRESPONSIVE" | "UNREACHABLE" => {
            (Look::Present, false, true)
        }
        "EJECT_TIMEOUT" | "NOT_NOW" => (Look::Present, false, true),
        _ => panic!("{call:?} was refused as {status:?}"),
    };
    (look, disturbed, partial)
}

pub fn look(vm: &v1::Vm) -> Look {
    let (metadata, status) = (vm.metadata.clone().unwrap(), vm.status.as_ref().unwrap());
    Look::Whole {
        uid: metadata.uid,
        generation: metadata.generation,
        spec: Spec {
            mark: metadata.labels[MARK].parse().unwrap(),
            policy: policy(vm),
            disk: vm.spec.as_ref().is_some_and(|spec| !spec.disks.is_empty()),
        },
        run: match status.phase() {
            VmPhase::Running => Some(Run::Up),
            VmPhase::Paused => Some(Run::Paused),
            VmPhase::Stopped | VmPhase::Failed => Some(Run::Down),
            _ => None,
        },
    }
}

fn policy_name(policy: Policy) -> v1::RunPolicy {
    match policy {
        Policy::UnlessStopped => v1::RunPolicy::AlwaysOnUnlessStopped,
        Policy::Always => v1::RunPolicy::AlwaysOn,
        Policy::OnFailure => v1::RunPolicy::RerunOnFailure,
        Policy::Manual => v1::RunPolicy::Manual,
        Policy::Off => v1::RunPolicy::AlwaysOff,
    }
}

fn policy(vm: &v1::Vm) -> Policy {
    match vm.spec.as_ref().unwrap().run_policy() {
        v1::RunPolicy::Unspecified | v1::RunPolicy::AlwaysOnUnlessStopped => Policy::UnlessStopped,
        v1::RunPolicy::AlwaysOn => Policy::Always,
        v1::RunPolicy::RerunOnFailure => Policy::OnFailure,
        v1::RunPolicy::Manual => Policy::Manual,
        v1::RunPolicy::AlwaysOff => Policy::Off,
    }
}

/// State of each name.
pub fn looks(vms: &[v1::Vm]) -> BTreeMap<u8, Look> {
    let find = |vm| {
        let mut named = vms
            .iter()
            .filter(|found| found.metadata.as_ref().unwrap().name == name(vm));
        let found = named.next().map_or(Look::Absent, look);
        assert!(named.next().is_none(), "two VMs are called {}", name(vm));
        (vm, found)
    };
    (0..VMS).map(find).collect()
}

pub fn seen(begin: Time, end: Time, look: Look) -> Op {
    Op {
        name: "look".into(),
        begin,
        end,
        ways: vec![vec![Step::Look(look)]],
        partial: false,
        repeats: None,
        disturbed: false,
    }
}

/// Makes an invalid call, and checks its refusal.
pub async fn wrong(client: &mut Client, which: u8, manifest: v1::Vm) -> Result<(), Status> {
    let mut create = v1::CreateVmRequest {
        vm: Some(manifest),
        ..Default::default()
    };
    let vm = create.vm.as_mut().unwrap();
    let (answer, expected) = match which {
        0 => {
            vm.metadata.as_mut().unwrap().name = "A_".into();
            (client.create_vm(create).await.map(drop), Code::InvalidArgument)
        }
        1 => {
            vm.spec.as_mut().unwrap().cpu.as_mut().unwrap().cores = 100_000;
            (client.create_vm(create).await.map(drop), Code::InvalidArgument)
        }
        2 => {
            let start = v1::StartVmRequest {
                name: "ghost".into(),
                ..Default::default()
            };
            (client.start_vm(start).await.map(drop), Code::NotFound)
        }
        3 => {
            let stop = v1::StopVmRequest {
                name: name(0),
                grace_period: Some(well_known::Duration {
                    seconds: -1,
                    nanos: 0,
                }),
                ..Default::default()
            };
            (client.stop_vm(stop).await.map(drop), Code::InvalidArgument)
        }
        4 => {
            let pause = v1::PauseVmRequest {
                name: name(0),
                request_id: "x".repeat(1000),
                ..Default::default()
            };
            (client.pause_vm(pause).await.map(drop), Code::InvalidArgument)
        }
        _ => {
            let list = v1::ListVmsRequest {
                page_token: "nonsense".into(),
                ..Default::default()
            };
            (client.list_vms(list).await.map(drop), Code::InvalidArgument)
        }
    };
    match answer {
        Err(status) if reason(&status).is_none() => Err(status),
        Err(status) if status.code() == expected => Ok(()),
        other => panic!("wrong call {which} was answered {other:?}"),
    }
}
