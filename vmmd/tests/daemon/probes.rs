//! Periodic checks of guests: what follows by `spec.probes`.

use std::sync::{
    Arc,
    atomic::{AtomicI32, Ordering},
};

use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use vmmd_api::v1::{self, ConditionStatus, ExitReason, RunPolicy, VmPhase, VmStatus};

use crate::{
    agent::{guest, reply},
    harness::{Daemon, status},
    policies::{self, LONG, waits},
    verbs::condition,
};

/// The probes of a manifest.
pub fn probes(json: Value) -> Option<v1::ProbesSpec> {
    Some(serde_json::from_value(json).unwrap())
}

/// Status and reason of `Ready`.
pub fn ready(status: &VmStatus) -> (ConditionStatus, &str) {
    let ready = condition(status, "Ready");
    (ready.status(), ready.reason.as_str())
}

/// A guest with one program, `check`, whose exit code is changed by the test.
#[derive(Clone)]
struct Program {
    code: Arc<AtomicI32>,
    /// One permit for each run.
    runs: Arc<Semaphore>,
}

impl Program {
    /// A program that ends with this code.
    fn with(code: i32) -> Self {
        Self {
            code: Arc::new(code.into()),
            runs: Arc::new(Semaphore::new(0)),
        }
    }

    fn ends_with(&self, code: i32) {
        self.code.store(code, Ordering::SeqCst);
    }

    /// Waits until it runs.
    async fn runs(&self) {
        self.runs.acquire().await.unwrap().forget();
    }

    /// Number of its runs that were not waited for.
    fn forget_runs(&self) -> usize {
        self.runs.forget_permits(usize::MAX)
    }
}

/// The agent of a guest with these programs; the number of a process is that of its program.
fn agent(programs: Vec<(&'static str, Program)>) -> impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static {
    move |question| {
        let arguments = &question["arguments"];
        match question["execute"].as_str().unwrap() {
            "guest-exec" => {
                let path = arguments["path"].as_str().unwrap();
                let index = programs.iter().position(|(name, _)| *name == path).unwrap();
                programs[index].1.runs.add_permits(1);
                reply(&json!({"pid": index}))
            }
            "guest-exec-status" => {
                let index = usize::try_from(arguments["pid"].as_u64().unwrap()).unwrap();
                let code = programs[index].1.code.load(Ordering::SeqCst);
                reply(&json!({"exited": true, "exitcode": code}))
            }
            other => panic!("{other}"),
        }
    }
}

/// A probe by a program, each second.
fn by(program: &str, more: &Value) -> Value {
    let mut probe = json!({"exec": {"command": [program]}, "periodSeconds": 1, "failureThreshold": 1});
    let more = more.as_object().unwrap().clone();
    probe.as_object_mut().unwrap().extend(more);
    probe
}

async fn set(daemon: &Daemon, json: Value) {
    let set = probes(json);
    let changed = daemon.change("web", |spec| spec.probes = set);
    changed.await.unwrap();
}

#[tokio::test]
async fn readiness_probe_decides_about_ready() {
    let mut daemon = Daemon::start().await;
    let program = Program::with(4);
    let vm = guest(&daemon, agent(vec![("check", program.clone())])).await;
    assert_eq!(ready(status(&vm)), (ConditionStatus::True, "Running"));
    set(&daemon, json!({"readiness": by("check", &json!({}))})).await;
    let failed = |status: &VmStatus| ready(status) == (ConditionStatus::False, "ProbeFailed");
    let state = daemon.wait("web", failed).await;
    let message = &condition(&state, "Ready").message;
    assert!(message.contains("the command ended with code 4"), "{message}");
    program.ends_with(0);
    let is_ready = |status: &VmStatus| ready(status).0 == ConditionStatus::True;
    daemon.wait("web", is_ready).await;
    // The next daemon asks again, and the guest is not ready before it has an answer.
    program.ends_with(1);
    daemon.kill_and_restart().await;
    daemon.wait("web", failed).await;
    // Without probes the guest is ready.
    daemon.change("web", |spec| spec.probes = None).await.unwrap();
    daemon.wait("web", is_ready).await;
}

#[rstest]
#[case::always(RunPolicy::AlwaysOnUnlessStopped, true)]
#[case::failure(RunPolicy::RerunOnFailure, true)]
#[case::manual(RunPolicy::Manual, false)]
#[tokio::test]
async fn failed_liveness_probe_ends_the_run(#[case] policy: RunPolicy, #[case] again: bool) {
    let mut daemon = Daemon::configured(LONG).await;
    let program = Program::with(0);
    guest(&daemon, agent(vec![("check", program.clone())])).await;
    let set = probes(json!({"liveness": by("check", &json!({"failureThreshold": 2}))}));
    let changed = daemon.change("web", |spec| {
        spec.probes = set;
        spec.run_policy = policy.into();
    });
    changed.await.unwrap();
    program.ends_with(1);
    let ended = daemon.wait_phase("web", VmPhase::Failed).await;
    let exit = ended.last_exit.as_ref().unwrap();
    assert_eq!(exit.reason(), ExitReason::ProbeFailed, "{exit:?}");
    assert_eq!(ended.counts.unwrap().probe_failures, 1);
    assert_eq!(waits(&ended), again, "{ended:?}");
    daemon.told_exactly("Unhealthy", 1).await;
    daemon.kill_and_restart().await;
    assert_eq!(waits(status(&daemon.get("web").await.unwrap())), again);
}

#[tokio::test]
async fn a_silent_agent_fails_a_liveness_probe() {
    let daemon = Daemon::configured(LONG).await;
    // The mock's agent never answers.
    let probe = json!({"liveness": {"agent": {}, "timeoutSeconds": 1, "failureThreshold": 1}});
    let with_agent = |spec: &mut v1::VmSpec| {
        spec.guest_agent = Some(v1::GuestAgentSpec {});
        spec.probes = probes(probe);
    };
    daemon.run_with("web", "", with_agent).await;
    let ended = daemon.wait_phase("web", VmPhase::Failed).await;
    assert_eq!(ended.reason, "ProbeFailed");
}

#[tokio::test]
async fn other_probes_wait_for_the_startup_probe() {
    let mut daemon = Daemon::start().await;
    let (started, alive) = (Program::with(1), Program::with(0));
    let programs = vec![("started", started.clone()), ("alive", alive.clone())];
    let vm = guest(&daemon, agent(programs)).await;
    let startup = by("started", &json!({"failureThreshold": 1000}));
    set(
        &daemon,
        json!({"startup": startup, "liveness": by("alive", &json!({}))}),
    )
    .await;
    // Its second run begins when the first one has its result.
    started.runs().await;
    started.runs().await;
    let state = daemon.get("web").await.unwrap();
    assert_eq!(ready(status(&state)), (ConditionStatus::False, "Probing"));
    assert_eq!(alive.forget_runs(), 0);
    started.ends_with(0);
    let is_ready = |status: &VmStatus| ready(status).0 == ConditionStatus::True;
    daemon.wait("web", is_ready).await;
    daemon.told_exactly("Healthy", 1).await;
    alive.runs().await;
    // The guest of an earlier daemon has started. Its reset begins another start.
    started.forget_runs();
    daemon.kill_and_restart().await;
    daemon.wait("web", is_ready).await;
    alive.forget_runs();
    alive.runs().await;
    assert_eq!(started.forget_runs(), 0);
    started.ends_with(1);
    policies::end(&daemon, &vm, "triple");
    daemon.wait("web", |status| !is_ready(status)).await;
    started.ends_with(0);
    daemon.wait("web", is_ready).await;
    assert_ne!(started.forget_runs(), 0);
}

/// The VM "web" with a socket device and these probes.
async fn notifying(daemon: &Daemon, json: Value) -> v1::Vm {
    daemon
        .run_with("web", "", |spec| {
            spec.vsock = Some(v1::VsockSpec::default());
            spec.probes = probes(json);
        })
        .await
}

#[tokio::test]
async fn notifications_of_systemd_decide_whether_a_guest_is_ready() {
    let mut daemon = Daemon::start().await;
    let vm = notifying(
        &daemon,
        json!({"readiness": {"notify": {}, "periodSeconds": 300}}),
    )
    .await;
    assert_eq!(ready(status(&vm)), (ConditionStatus::False, "Probing"));
    policies::end(&daemon, &vm, "notify STATUS=booting");
    policies::end(
        &daemon,
        &vm,
        "notify READY=1 X_SYSTEMD_UNIT_ACTIVE=multi-user.target",
    );
    let is_ready = |status: &VmStatus| ready(status).0 == ConditionStatus::True;
    daemon.wait("web", is_ready).await;
    // The next daemon knows it without a notification.
    daemon.kill_and_restart().await;
    daemon.wait("web", is_ready).await;
    policies::end(&daemon, &vm, "notify STOPPING=1");
    let stops = daemon.wait("web", |status| !is_ready(status)).await;
    assert!(condition(&stops, "Ready").message.contains("the guest stops"));
    policies::end(&daemon, &vm, "reset");
    daemon
        .wait("web", |status| {
            ready(status) == (ConditionStatus::False, "Probing")
        })
        .await;
    policies::end(&daemon, &vm, "notify READY=1");
    daemon.wait("web", is_ready).await;
}

#[tokio::test]
async fn guest_that_never_notifies_fails_its_startup_probe() {
    let daemon = Daemon::start().await;
    let startup = json!({"startup": {"notify": {}, "periodSeconds": 1, "failureThreshold": 1}});
    let vm = notifying(&daemon, startup).await;
    policies::end(&daemon, &vm, "notify STATUS=emergency");
    let ended = |status: &VmStatus| {
        let exit = status.last_exit.as_ref();
        exit.is_some_and(|exit| exit.reason() == ExitReason::ProbeFailed)
    };
    daemon.wait("web", ended).await;
    let told = daemon.told_exactly("Unhealthy", 1).await;
    assert!(
        format!("{told:?}").contains("no READY=1 of the guest: emergency"),
        "{told:?}"
    );
}
