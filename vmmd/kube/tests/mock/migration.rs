//! Migrations of the mock: as between two vmmds, with what each keeps when it ends in between.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use vmmd_api::v1::{
    self, ExitReason, OperationPhase, VmPhase, WatchEventType, migration_service_server::MigrationService,
};

use super::{
    pods::not_connected,
    vmmd::{State, lock, move_id},
};

/// Point at which a migration waits for the test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hold {
    #[default]
    Nowhere,
    /// The VM is offered, and runs at the source.
    Offered,
    /// It is handed over, and runs nowhere.
    Given,
}

/// A vmmd's state of migrations.
#[derive(Clone, Default)]
pub struct Moves {
    /// VMs about which only a migration may decide.
    under_way: Arc<Mutex<BTreeMap<String, ()>>>,
    /// Answers, by the ids of requests, with the requests.
    answered: Arc<Mutex<BTreeMap<String, (v1::MigrateVmRequest, v1::Operation)>>>,
    /// Whether the daemon runs, and how often it has begun to.
    pub up: Arc<AtomicBool>,
    pub lives: Arc<AtomicU32>,
    pub hold: Arc<Mutex<Hold>>,
    /// Refusal of a migration.
    pub refusal: Arc<Mutex<Option<Status>>>,
    /// Uids of pods whose VM has moved away, which their launchers know.
    left: Arc<Mutex<BTreeSet<String>>>,
}

impl Moves {
    pub fn concern(&self, vm: &str) -> bool {
        lock(&self.under_way).contains_key(vm)
    }

    /// Whether the VM of a pod has moved away.
    pub fn has_left(&self, pod: &str) -> bool {
        lock(&self.left).contains(pod)
    }

    /// Waits until the daemon runs.
    fn wait_up(&self) {
        until(|| self.up.load(Ordering::SeqCst));
    }
}

/// A refusal with a reason.
pub fn refused(reason: &str, message: &str) -> Status {
    let details = ErrorDetails::with_error_info(reason, "vmmd", std::collections::HashMap::new());
    Status::with_error_details(Code::FailedPrecondition, message, details)
}

pub fn migrating() -> Status {
    refused("MIGRATING", "it is being migrated")
}

fn until(mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !is() && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
}

#[tonic::async_trait]
impl MigrationService for State {
    async fn migrate_vm(
        &self,
        request: Request<v1::MigrateVmRequest>,
    ) -> Result<Response<v1::MigrateVmResponse>, Status> {
        let request = request.into_inner();
        self.called(format!("migrate {} to {}", request.name, request.target));
        let mut answered = lock(&self.moves.answered);
        if let Some((before, operation)) = answered.get(&request.request_id) {
            if *before != request {
                return Err(refused("REQUEST_ID_REUSED", "it was another request"));
            }
            let operation = Some(operation.clone());
            return Ok(Response::new(v1::MigrateVmResponse { operation }));
        }
        if let Some(refusal) = lock(&self.moves.refusal).clone() {
            return Err(refusal);
        }
        if request.target_pod.is_empty() {
            return Err(refused("MIGRATION_POD", "the VM has a pod"));
        }
        let target = self.ledger.node(&request.target);
        if !target.is_some_and(|target| target.pods.is_connected(&request.target_pod)) {
            return Err(not_connected());
        }
        let wanted = request.preconditions.clone().unwrap();
        {
            let vms = lock(&self.vms);
            let vm = vms
                .get(&request.name)
                .ok_or_else(|| Status::not_found("there is none"))?;
            let metadata = vm.metadata.as_ref().unwrap();
            if self.moves.concern(&request.name) {
                return Err(migrating());
            }
            if metadata.uid != wanted.uid || Some(metadata.generation) != wanted.generation {
                return Err(refused("GENERATION_MISMATCH", "it has changed"));
            }
            if vm.status.as_ref().unwrap().phase() != VmPhase::Running {
                return Err(refused("VM_NOT_RUNNING", "it does not run"));
            }
        }
        lock(&self.moves.under_way).insert(request.name.clone(), ());
        let operation = v1::Operation {
            id: request.request_id.clone(),
            phase: OperationPhase::InProgress.into(),
            ..v1::Operation::default()
        };
        self.storage.put_operation(operation.clone());
        answered.insert(request.request_id.clone(), (request.clone(), operation.clone()));
        let source = self.clone();
        thread::spawn(move || source.carry_out(&request));
        let operation = Some(operation);
        Ok(Response::new(v1::MigrateVmResponse { operation }))
    }

    async fn resolve_migration(
        &self,
        _: Request<v1::ResolveMigrationRequest>,
    ) -> Result<Response<v1::ResolveMigrationResponse>, Status> {
        Err(Status::unimplemented("the agent does not use it"))
    }
}

impl State {
    fn carry_out(&self, request: &v1::MigrateVmRequest) {
        let name = request.name.as_str();
        let end = |phase: OperationPhase, message: &str| {
            let mut operation = v1::Operation {
                id: request.request_id.clone(),
                ..v1::Operation::default()
            };
            operation.set_phase(phase);
            operation.error = Some(vmmd_api::rpc::Status {
                code: Code::Unavailable.into(),
                message: message.to_owned(),
                ..vmmd_api::rpc::Status::default()
            });
            self.moves.wait_up();
            self.storage.put_operation(operation);
        };
        let back = |message: &str| {
            self.moves.wait_up();
            lock(&self.moves.under_way).remove(name);
            end(OperationPhase::Failed, message);
        };
        let Some(target) = self.ledger.node(&request.target) else {
            return back("the other node can't be reached");
        };
        if !target.moves.up.load(Ordering::SeqCst) || !target.offered(self, name, &request.target_pod) {
            return back("the other node does not take it");
        }
        let lives = || {
            let of = |moves: &Moves| {
                (
                    moves.up.load(Ordering::SeqCst),
                    moves.lives.load(Ordering::SeqCst),
                )
            };
            (of(&self.moves), of(&target.moves))
        };
        let began = lives();
        let sent = Instant::now() + Duration::from_millis(60);
        let mut failure = None;
        until(|| {
            if lives() != began {
                failure = Some("a daemon was restarted meanwhile".to_owned());
            }
            if self.phase(name) != Some(VmPhase::Running) {
                failure = Some("it has ended meanwhile".to_owned());
            }
            if !target.pods.is_connected(&request.target_pod) {
                failure = Some("the launcher has gone".to_owned());
            }
            let held = *lock(&self.moves.hold) == Hold::Offered;
            failure.is_some() || !held && Instant::now() >= sent
        });
        // Under the lock, no other call can end it at this moment.
        let given = failure.is_none() && {
            let mut vms = lock(&self.vms);
            let vm = vms.get_mut(name);
            let vm = vm.filter(|vm| vm.status.as_ref().unwrap().phase() == VmPhase::Running);
            if let Some(vm) = vm {
                let status = vm.status.get_or_insert_default();
                status.set_phase(VmPhase::Paused);
                status.reason = "HandedOver".to_owned();
                self.ledger.end(&move_id(vm), &self.node);
                self.tell(WatchEventType::Modified, vm);
                true
            } else {
                false
            }
        };
        if !given {
            target.moves.wait_up();
            target.forget(name);
            return back(&failure.unwrap_or_default());
        }
        until(|| *lock(&self.moves.hold) != Hold::Given);
        // The source's daemon says so, and the target's hears it.
        until(|| self.moves.up.load(Ordering::SeqCst) && target.moves.up.load(Ordering::SeqCst));
        {
            let mut vms = lock(&target.vms);
            let vm = vms.get_mut(name).unwrap();
            lock(&target.moves.under_way).remove(name);
            // The VM ends with its launcher.
            if target.pods.is_connected(&request.target_pod) {
                let status = vm.status.get_or_insert_default();
                status.set_phase(VmPhase::Running);
                status.reason.clear();
                target.ledger.moved(&move_id(vm), &self.node, &target.node);
                target.tell(WatchEventType::Modified, vm);
            } else {
                target.finish(vm, ExitReason::Killed);
            }
        }
        self.moves.wait_up();
        if let Some(pod) = self.forget(name) {
            lock(&self.moves.left).insert(pod);
        }
        end(OperationPhase::Completed, "");
    }

    fn phase(&self, name: &str) -> Option<VmPhase> {
        Some(lock(&self.vms).get(name)?.status.as_ref()?.phase())
    }

    /// Keeps the VM of another node, which cannot be started here.
    fn offered(&self, source: &State, name: &str, pod: &str) -> bool {
        let Some(mut vm) = lock(&source.vms).get(name).cloned() else {
            return false;
        };
        let mut vms = lock(&self.vms);
        if vms.contains_key(name) {
            return false;
        }
        lock(&self.moves.under_way).insert(name.to_owned(), ());
        let status = vm.status.get_or_insert_default();
        status.set_phase(VmPhase::Paused);
        status.reason = "Migrating".to_owned();
        vm.metadata.as_mut().unwrap().generation = 1;
        pod.clone_into(&mut vm.spec.as_mut().unwrap().pod.as_mut().unwrap().uid);
        vms.insert(name.to_owned(), vm.clone());
        self.tell(WatchEventType::Added, &vm);
        true
    }

    /// Removes the VM completely, and returns the uid of its pod.
    fn forget(&self, name: &str) -> Option<String> {
        let gone = lock(&self.vms).remove(name);
        lock(&self.moves.under_way).remove(name);
        let vm = gone?;
        self.tell(WatchEventType::Deleted, &vm);
        Some(vm.spec?.pod?.uid)
    }
}
