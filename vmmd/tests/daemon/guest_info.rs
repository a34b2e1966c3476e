//! Guests as their agents describe them, and the condition `AgentReady`.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use serde_json::{Value, json};
use tonic::{Code, Status};
use vmmd_api::v1::{self, ConditionStatus, VmStatus};

use crate::{
    agent::{about, guest, listen, refuse, reply},
    harness::{Daemon, assert_refused, status},
    policies,
    verbs::condition,
};

impl Daemon {
    async fn guest_info(&self, name: &str) -> Result<v1::GuestInfo, Status> {
        let request = v1::GetGuestInfoRequest { name: name.into() };
        Ok(self
            .client()
            .get_guest_info(request)
            .await?
            .into_inner()
            .guest
            .unwrap())
    }
}

/// A program of the guest "web" opens the channel of the agent, or closes it.
async fn agent(daemon: &Daemon, word: &str) {
    policies::end(daemon, &daemon.get("web").await.unwrap(), word);
}

fn ready(status: &VmStatus) -> (ConditionStatus, &str) {
    let ready = condition(status, "AgentReady");
    (ready.status(), ready.reason.as_str())
}

fn is_described(status: &VmStatus) -> bool {
    ready(status) == (ConditionStatus::True, "AgentConnected") && status.guest.is_some()
}

/// An honest agent, in the words of qemu-guest-agent 7.2.
fn honest(question: &Value) -> Vec<u8> {
    match question["execute"].as_str().unwrap() {
        "guest-info" => about(&[
            "guest-get-osinfo",
            "guest-get-host-name",
            "guest-get-timezone",
            "guest-network-get-interfaces",
            "guest-get-fsinfo",
            "guest-get-users",
        ]),
        "guest-get-osinfo" => reply(&json!({
            "name": "Debian GNU/Linux", "kernel-release": "6.1.0-18-amd64", "version": "12 (bookworm)",
            "pretty-name": "Debian GNU/Linux 12 (bookworm)", "version-id": "12", "id": "debian",
            "kernel-version": "#1 SMP", "machine": "x86_64",
        })),
        "guest-get-host-name" => reply(&json!({"host-name": "web"})),
        "guest-get-timezone" => reply(&json!({"zone": "CET", "offset": 3600})),
        "guest-network-get-interfaces" => reply(&json!([
            {"name": "lo", "ip-addresses": [
                {"ip-address-type": "ipv4", "ip-address": "127.0.0.1", "prefix": 8}]},
            {"name": "eth0", "hardware-address": "52:54:00:00:00:01", "ip-addresses": [
                {"ip-address-type": "ipv4", "ip-address": "10.0.0.5", "prefix": 24},
                {"ip-address-type": "ipv6", "ip-address": "fe80::1%eth0", "prefix": 64}]},
        ])),
        "guest-get-fsinfo" => reply(&json!([
            {"name": "vda1", "mountpoint": "/", "type": "ext4", "used-bytes": 5, "total-bytes": 9, "disk": []},
            {"name": "sr0", "mountpoint": "/mnt", "type": "iso9660", "disk": []},
        ])),
        "guest-get-users" => reply(&json!([{"user": "ann", "login-time": 1_700_000_000.5}])),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn agent_is_ready_and_its_guest_known_while_it_is_connected() {
    let mut daemon = Daemon::start().await;
    let vm = guest(&daemon, honest).await;
    let state = status(&vm);
    assert_eq!(ready(state), (ConditionStatus::False, "AgentNotConnected"));
    assert_eq!(state.guest, None);
    agent(&daemon, "open").await;
    let told = daemon.wait("web", is_described).await.guest.unwrap();
    let os = told.os.clone().unwrap();
    assert_eq!(
        (os.id.as_str(), os.kernel_release.as_str()),
        ("debian", "6.1.0-18-amd64")
    );
    assert_eq!(os.pretty_name, "Debian GNU/Linux 12 (bookworm)");
    assert_eq!(
        (told.agent_version.as_str(), told.host_name.as_str()),
        ("7.2.0", "web")
    );
    assert_eq!((told.time_zone.as_str(), told.utc_offset_seconds), ("CET", 3600));
    assert_eq!(told.interfaces[1].mac, "52:54:00:00:00:01");
    assert_eq!(told.interfaces[1].addresses, ["10.0.0.5/24", "fe80::1/64"]);
    let [root, cd] = told.file_systems.as_slice() else {
        panic!("{told:?}")
    };
    assert_eq!(
        (root.total_bytes, root.used_bytes, cd.total_bytes),
        (Some(9), Some(5), None)
    );
    assert_eq!(told.users[0].login_time.unwrap().nanos, 500_000_000);
    assert!(!told.incomplete && told.query_time.is_some());

    // The next daemon learns it from the vmm.
    daemon.kill_and_restart().await;
    daemon.wait("web", is_described).await;
    agent(&daemon, "close").await;
    let closed = |status: &VmStatus| ready(status) == (ConditionStatus::False, "AgentNotConnected");
    assert_eq!(daemon.wait("web", closed).await.guest, None);
    daemon.kill_vm("web").await.unwrap();
    let stopped = daemon.get("web").await.unwrap();
    assert_eq!(ready(status(&stopped)), (ConditionStatus::False, "NotRunning"));
}

#[tokio::test]
async fn vm_without_a_channel_has_no_agent() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let mut conditions = status(&vm).conditions.iter();
    assert!(conditions.all(|condition| condition.r#type != "AgentReady"));
    let refused = daemon.guest_info("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NO_GUEST_AGENT");
    let refused = daemon.guest_info("nobody").await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
}

#[tokio::test]
async fn fresh_guest_is_asked_once_and_is_then_in_the_status() {
    let daemon = Daemon::start().await;
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    guest(&daemon, move |question| {
        if question["execute"] == "guest-get-host-name" {
            let number = count.fetch_add(1, Ordering::SeqCst);
            return reply(&json!({"host-name": format!("host-{number}")}));
        }
        honest(question)
    })
    .await;
    agent(&daemon, "open").await;
    daemon.wait("web", is_described).await;
    let answers = futures_of(&daemon, 20).await;
    assert!(answers.iter().all(|told| told.host_name.starts_with("host-")));
    // The first question, and one or two for all callers at once.
    assert!(asked.load(Ordering::SeqCst) <= 3, "{asked:?}");
}

/// Asks so many times at once.
async fn futures_of(daemon: &Daemon, count: usize) -> Vec<v1::GuestInfo> {
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..count {
        let mut client = daemon.client();
        asking.spawn(async move {
            let request = v1::GetGuestInfoRequest { name: "web".into() };
            client
                .get_guest_info(request)
                .await
                .unwrap()
                .into_inner()
                .guest
                .unwrap()
        });
    }
    asking.join_all().await
}

#[tokio::test]
async fn description_by_a_hostile_agent_is_bounded() {
    let daemon = Daemon::start().await;
    let long = "\u{1b}[2J\n".repeat(10_000);
    guest(&daemon, move |question| {
        match question["execute"].as_str().unwrap() {
            "guest-info" => {
                let names = ["osinfo", "host-name", "timezone", "fsinfo", "users"];
                let names: Vec<_> = names.iter().map(|name| format!("guest-get-{name}")).collect();
                let mut names: Vec<_> = names.iter().map(String::as_str).collect();
                names.push("guest-network-get-interfaces");
                names.extend(["x"; 5000]);
                about(&names)
            }
            "guest-get-osinfo" => reply(&json!({"name": long, "pretty-name": long, "id": "\u{202e}x"})),
            "guest-get-host-name" => reply(&json!({"host-name": long})),
            "guest-get-timezone" => reply(&json!({"zone": [1], "offset": 1e300})),
            "guest-network-get-interfaces" => {
                let address =
                    |number: usize| json!({"ip-address": format!("10.0.{}.1", number % 256), "prefix": 24});
                let addresses: Vec<_> = (0..1000).map(address).collect();
                let wrong = json!({"name": "wrong", "ip-addresses": [{"ip-address": "no address"}]});
                let many = json!({"name": long, "ip-addresses": addresses});
                reply(&Value::Array([vec![wrong], vec![many; 20]].concat()))
            }
            "guest-get-fsinfo" => {
                reply(&json!([{"name": "a", "mountpoint": long, "type": "b", "used-bytes": -1}]))
            }
            "guest-get-users" => refuse("GenericError", "no"),
            other => panic!("{other}"),
        }
    })
    .await;
    agent(&daemon, "open").await;
    let told = daemon.wait("web", is_described).await.guest.unwrap();
    let os = told.os.clone().unwrap();
    assert_eq!(
        (os.name.len(), os.pretty_name.len(), os.id.as_str()),
        (64, 128, " x")
    );
    assert!(!os.name.contains(char::is_control) && !told.host_name.contains(char::is_control));
    assert_eq!((told.time_zone.as_str(), told.utc_offset_seconds), ("", 0));
    assert_eq!(told.interfaces.len(), 16);
    assert!(told.interfaces[0].addresses.is_empty());
    assert_eq!(
        (told.interfaces[1].addresses.len(), told.interfaces[1].name.len()),
        (8, 64)
    );
    assert!(told.incomplete && told.file_systems.is_empty() && told.users.is_empty());
}

#[tokio::test]
async fn agent_that_does_not_answer_is_not_ready_until_it_does() {
    let daemon = Daemon::start().await;
    let is_awake = Arc::new(AtomicUsize::new(0));
    let awake = Arc::clone(&is_awake);
    guest(&daemon, move |question| match awake.load(Ordering::SeqCst) {
        0 => b"{\"return\": 1}\n".to_vec(),
        _ => honest(question),
    })
    .await;
    agent(&daemon, "open").await;
    let silent = |status: &VmStatus| ready(status) == (ConditionStatus::False, "AgentSilent");
    let told = daemon.wait("web", silent).await;
    assert!(condition(&told, "AgentReady").message.contains("invalid answer"));
    assert_eq!(told.guest, None);
    is_awake.store(1, Ordering::SeqCst);
    daemon.guest_info("web").await.unwrap();
    daemon.wait("web", is_described).await;
}

#[tokio::test]
async fn channel_that_is_opened_again_and_again_causes_few_questions() {
    let daemon = Daemon::start().await;
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    guest(&daemon, move |question| {
        if question["execute"] == "guest-info" {
            count.fetch_add(1, Ordering::SeqCst);
        }
        honest(question)
    })
    .await;
    let begin = std::time::Instant::now();
    agent(&daemon, &"close\nopen\n".repeat(300)).await;
    agent(&daemon, "open").await;
    daemon.wait("web", is_described).await;
    let most = 2 + usize::try_from(begin.elapsed().as_secs()).unwrap();
    assert!(asked.load(Ordering::SeqCst) <= most, "{asked:?} of {most}");
}

#[tokio::test]
async fn paused_guest_is_described_when_it_runs_again() {
    let daemon = Daemon::start().await;
    guest(&daemon, honest).await;
    daemon.pause("web").await.unwrap();
    agent(&daemon, "open").await;
    let connected = |status: &VmStatus| ready(status).1 == "AgentConnected";
    assert_eq!(daemon.wait("web", connected).await.guest, None);
    let refused = daemon.guest_info("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    daemon.resume("web").await.unwrap();
    daemon.wait("web", is_described).await;
}

#[tokio::test]
async fn agent_powers_off_a_guest_that_ignores_its_button() {
    let daemon = Daemon::start().await;
    daemon.fault("power-button");
    let with_agent = |spec: &mut v1::VmSpec| spec.guest_agent = Some(v1::GuestAgentSpec {});
    let vm = daemon.run_with("web", "mock.power=ignore", with_agent).await;
    let (sender, mut asked) = tokio::sync::mpsc::unbounded_channel();
    listen(&daemon, &vm, move |question| {
        if question["execute"] == "guest-shutdown" {
            sender.send(question["arguments"]["mode"].clone()).unwrap();
            // The agent does not answer.
            return Vec::new();
        }
        honest(question)
    });
    agent(&daemon, "open").await;
    daemon.wait("web", is_described).await;
    let stop = daemon.stop("web", Some(std::time::Duration::from_secs(3600)));
    let (stopped, ()) = tokio::join!(stop, async {
        assert_eq!(asked.recv().await.unwrap(), "powerdown");
        policies::end(&daemon, &vm, "poweroff");
    });
    let exit = status(&stopped.unwrap()).last_exit.clone().unwrap();
    assert_eq!(exit.reason(), v1::ExitReason::Stopped);
}
