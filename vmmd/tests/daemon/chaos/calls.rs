//! What clients ask for, and what the answers say of the VM.

use std::collections::BTreeMap;

use proptest::prelude::*;
use prost::Message;
use proto::{
    v1::{self, VmPhase, vm_service_client::VmServiceClient},
    well_known,
};
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt;

use super::model::{Look, Op, Run, Step, Time};

/// VMs there are at most.
pub const VMS: u8 = 4;
/// The label that tells one spec from another.
pub const MARK: &str = "mark";

/// The end of what nobody waits for.
pub const NEVER: Time = Time::MAX;

/// What one client does next.
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
}

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
    Get,
    List,
    /// The `vmm` process is killed.
    Die,
    /// What can't be right, of several kinds.
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
        2 => Just(Kind::Get),
        1 => Just(Kind::List),
        1 => Just(Kind::Die),
        1 => (0..6_u8).prop_map(Kind::Illegal),
    ];
    let often = proptest::bool::weighted;
    (0..VMS, kind, often(0.8), often(0.2), often(0.2)).prop_map(|(vm, kind, id, twice, generation)| Call {
        vm,
        kind,
        id,
        twice: id && twice,
        generation,
    })
}

pub type Client = VmServiceClient<Channel>;

/// An answer in its encoded form.
pub type Answer = Result<Vec<u8>, Status>;

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
                        answer.map(|response| response.into_inner().encode_to_vec())
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
}

pub fn name(vm: u8) -> String {
    format!("vm{vm}")
}

impl Call {
    /// The request, when it changes something; `mark` and `id` are its own, `generation` is what the VM had.
    pub fn request(&self, manifest: v1::Vm, mark: u64, id: String, generation: u64) -> Option<Request> {
        let mut vm = manifest;
        let metadata = vm.metadata.as_mut().unwrap();
        metadata.name = name(self.vm);
        metadata.labels = [(MARK.to_owned(), mark.to_string())].into();
        let request_id = if self.id { id } else { String::new() };
        let preconditions = self.generation.then(|| v1::Preconditions {
            generation: Some(generation),
            ..Default::default()
        });
        let name = name(self.vm);
        let grace_period = Some(well_known::Duration {
            seconds: 0,
            nanos: 30_000_000,
        });
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
                preconditions,
                request_id,
                ..Default::default()
            }),
            Kind::Get | Kind::List | Kind::Die | Kind::Illegal(_) => return None,
        };
        Some(request)
    }

    /// What the request does when it is carried out.
    pub fn steps(&self, mark: u64, uid: Option<String>) -> Vec<Step> {
        match self.kind {
            Kind::Create { .. } => vec![Step::Create { uid, mark }],
            Kind::Start => vec![Step::Start],
            Kind::Stop | Kind::Kill | Kind::Die => vec![Step::Stop],
            Kind::Restart => vec![Step::Wake, Step::Stop, Step::Start],
            Kind::Pause => vec![Step::Pause],
            Kind::Resume => vec![Step::Resume],
            Kind::Delete { force: true } => vec![Step::Stop, Step::Remove],
            Kind::Delete { force: false } => vec![Step::Look(Look::Down), Step::Remove],
            Kind::Update => vec![Step::Update { mark }],
            Kind::Get | Kind::List | Kind::Illegal(_) => Vec::new(),
        }
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

/// Whether a retry gets the same answer whatever has happened since.
pub fn is_final(answer: &Answer) -> bool {
    let Err(status) = answer else { return true };
    let reason = reason(status).unwrap_or_default();
    match status.code() {
        Code::NotFound | Code::AlreadyExists => true,
        Code::FailedPrecondition => reason != "BUSY",
        _ => reason == "GENERATION_MISMATCH",
    }
}

/// What a refusal says of the VM; whether others must have been under way; whether it may have been done in part.
pub fn refused(call: &Call, status: &Status, generation: u64) -> (Look, bool, bool) {
    let reason = reason(status).unwrap_or_default();
    let (look, disturbed, partial) = match reason.as_str() {
        "VM_NOT_FOUND" => (Look::Absent, false, false),
        "VM_EXISTS" => (Look::Present, false, false),
        "VM_PAUSED" => (Look::Paused, false, false),
        "NOT_RUNNING" => (Look::Down, false, false),
        "GENERATION_MISMATCH" => (Look::Not(generation), false, false),
        // Also of one that is on its way up or down.
        "STILL_RUNNING" => (Look::Present, false, false),
        "BUSY" | "BEING_DELETED" => (Look::Present, true, false),
        "SUPERSEDED" | "START_CANCELLED" => (Look::Present, true, true),
        // The process was killed while it was being made, or asked.
        "VMM_FAILED" | "VMM_GONE" | "INTERNAL" => (Look::Present, true, true),
        _ => panic!("{call:?} was refused as {status:?}"),
    };
    (look, disturbed, partial)
}

pub fn look(vm: &v1::Vm) -> Look {
    let (metadata, status) = (vm.metadata.clone().unwrap(), vm.status.as_ref().unwrap());
    Look::Whole {
        uid: metadata.uid,
        generation: metadata.generation,
        mark: metadata.labels[MARK].parse().unwrap(),
        run: match status.phase() {
            VmPhase::Running => Some(Run::Up),
            VmPhase::Paused => Some(Run::Paused),
            VmPhase::Stopped | VmPhase::Failed => Some(Run::Down),
            _ => None,
        },
    }
}

/// What each name stands for.
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

/// Makes a call that can't be right, and sees that it is refused as such.
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
