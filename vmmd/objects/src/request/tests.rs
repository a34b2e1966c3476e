use tonic::Status;
use vmmd_api::{rule::MethodEffect, v1};
use vmmd_host::failure::Failure;

use super::{answer::Answer, made, *};

fn key() -> Key {
    Key::of(&[7; 32])
}

fn mark<Q: Mutation>(request: &Q) -> RequestMark {
    super::mark(request, &Initiator::Daemon, &key())
}

fn start(id: &str, name: &str) -> v1::StartVmRequest {
    v1::StartVmRequest {
        name: name.into(),
        request_id: id.into(),
        ..Default::default()
    }
}

#[test]
fn a_mark_is_the_same_for_the_same_content_whatever_the_id() {
    let same = |a: &RequestMark, b: &RequestMark| super::same(Some(a), b);
    let first = mark(&start("1", "a"));
    assert!(same(&first, &mark(&start("2", "a"))));
    assert!(!same(&first, &mark(&start("1", "b"))));
    let pause = v1::PauseVmRequest {
        name: "a".into(),
        request_id: "1".into(),
        ..Default::default()
    };
    assert!(
        !same(&first, &mark(&pause)),
        "the bytes are the same, the method is not"
    );
}

#[test]
fn a_mark_tells_nothing_of_the_content_to_who_has_no_key() {
    let request = start("1", "a");
    let mark = mark(&request);
    let mut content = request.clone();
    content.set_request_id(String::new());
    let hash = Sha256::digest(content.encode_to_vec());
    let written = mark.encode_to_vec();
    assert!(
        !written
            .windows(hash.len())
            .any(|window| window == hash.as_slice())
    );
    let other = super::mark(&request, &Initiator::Daemon, &Key::of(&[8; 32]));
    assert_ne!(mark.fingerprint, other.fingerprint);
}

#[test]
fn an_id_is_short_printable_text() {
    let check = |id: &str| context(&tonic::Request::new(start(id, "a")));
    for right in [
        "",
        "a",
        "0198c1d2-0000-7000-8000-000000000000",
        "a b~!",
        &"x".repeat(128),
    ] {
        assert_eq!(check(right).unwrap().request_id, right);
    }
    for wrong in ["\n", "ä", "\u{7f}", &"x".repeat(129)] {
        let failure = check(wrong).unwrap_err();
        assert_eq!(failure.violations.0[0].field, "requestId", "{wrong:?}");
    }
}

#[test]
fn refusal_of_any_reason_is_not_kept() {
    for (kind, reason) in [
        (Kind::NotFound, "VM_NOT_FOUND"),
        (Kind::Exists, "VM_EXISTS"),
        (Kind::Precondition, "NODE_CORDONED"),
        (Kind::Precondition, "DISK_IN_USE"),
        (Kind::Aborted, "GENERATION_MISMATCH"),
        (Kind::Invalid, "INVALID_FIELDS"),
        (Kind::Exhausted, "STORE_FULL"),
        (Kind::Internal, "INTERNAL"),
    ] {
        let answer = Answer::from(Status::from(Failure::new(kind, reason, "m")));
        assert_eq!(answer.record(RequestMark::default()), None, "{reason}");
    }
    let answer = Answer::of(&v1::DeleteVmResponse::default());
    assert!(answer.record(RequestMark::default()).is_some());
}

fn vm(uid: Uuid) -> v1::Vm {
    v1::Vm {
        metadata: Some(v1::ObjectMetadata {
            name: "web".into(),
            uid: uid.to_string(),
            generation: 3,
            annotations: [("big".to_owned(), "x".repeat(60_000))].into(),
            ..Default::default()
        }),
        spec: Some(v1::VmSpec::default()),
        ..Default::default()
    }
}

#[test]
fn kept_answer_of_a_large_vm_has_only_what_names_it() {
    let operation = Some(v1::Operation {
        id: "o".into(),
        ..Default::default()
    });
    let response = v1::StartVmResponse {
        vm: Some(vm(Uuid::from_u128(1))),
        operation: operation.clone(),
    };
    let mark = mark(&start("1", "web"));
    let record = Answer::of(&response).record(mark).unwrap();
    assert!(record.encoded_len() < 300, "{}", record.encoded_len());
    let kept = v1::StartVmResponse::decode(record.response.as_slice()).unwrap();
    assert_eq!(kept.operation, operation);
    let metadata = kept.vm.unwrap().metadata.unwrap();
    assert_eq!((metadata.name.as_str(), metadata.generation), ("web", 3));
    assert_eq!(metadata.uid, Uuid::from_u128(1).to_string());
}

#[test]
fn each_method_about_a_vm_is_shown_or_known_to_show_none() {
    let rules = vmmd_api::rule::METHOD_RULES.iter();
    let of_vms = rules.filter(|rule| rule.effect == MethodEffect::Change && rule.kind == "vm");
    let mut names: Vec<_> = of_vms.filter_map(|rule| rule.method.split_once('/')).collect();
    names.sort_unstable();
    let without = [
        "ConnectChannel",
        "ConnectVsock",
        "Console",
        "CreateVncTicket",
        "DeleteVm",
        "MigrateVm",
        "OfferVm",
        "ExecVm",
        "SetGuestPassword",
        "UpdateGuestSshKeys",
        "WriteGuestFile",
        "PortForward",
        "ReceiveVm",
        "ResolveMigration",
        "SettleVm",
        "Vnc",
    ];
    for (_, name) in names {
        assert!(
            shown::METHODS.contains(&name) || without.contains(&name),
            "{name}: does its response show a VM?"
        );
    }
}

#[test]
fn each_method_that_makes_something_is_known() {
    let rules = vmmd_api::rule::METHOD_RULES.iter();
    let changes = rules.filter(|rule| rule.effect == MethodEffect::Change);
    let names = changes.filter_map(|rule| rule.method.split_once('/'));
    let makes = |name: &&str| {
        let verbs = ["Create", "Import", "Restore"];
        // A ticket is no object.
        *name != "CreateVncTicket" && verbs.iter().any(|verb| name.starts_with(verb))
    };
    let mut making: Vec<_> = names.map(|(_, name)| name).filter(makes).collect();
    making.sort_unstable();
    let mut known = made::METHODS;
    known.sort_unstable();
    assert_eq!(making, known);
}

#[test]
fn an_answer_says_what_was_made_unless_that_has_only_begun() {
    let uid = Uuid::from_u128(1);
    let disk = |phase: Option<v1::OperationPhase>| {
        let operation = phase.map(|phase| v1::Operation {
            phase: phase.into(),
            ..Default::default()
        });
        let metadata = Some(v1::ObjectMetadata {
            name: "d".into(),
            uid: uid.to_string(),
            ..Default::default()
        });
        let disk = v1::Disk {
            metadata,
            ..Default::default()
        };
        let response = v1::CreateDiskResponse {
            disk: Some(disk),
            operation,
        };
        response.encode_to_vec()
    };
    let made = Some(Object::Disk("d".into(), uid));
    assert_eq!(made::object("CreateDisk", &disk(None)), made);
    let completed = Some(v1::OperationPhase::Completed);
    assert_eq!(made::object("CreateDisk", &disk(completed)), made);
    let begun = Some(v1::OperationPhase::InProgress);
    assert_eq!(made::object("CreateDisk", &disk(begun)), None);
    // Failures have no response.
    assert_eq!(made::object("CreateDisk", &[]), None);
    assert_eq!(made::object("UpdateDisk", &disk(None)), None);
    let failure = made::gone(&Object::Vm("web".into(), uid));
    assert_eq!((failure.kind, failure.reason), (Kind::NotFound, "OBJECT_GONE"));
    assert!(
        failure
            .message
            .contains(&format!("VM \"web\" with the uid {uid}"))
    );
}

#[test]
fn marks_are_kept_while_their_request_has_no_answer() {
    let requests = Requests::default();
    let context = |id: &str| Context {
        request_id: id.to_owned(),
        ..Context::default()
    };
    let mut begun = vec![mark(&start("answered", "a"))];
    requests.adopt(&[mark(&start("left", "a"))], &[1]);
    begun.push(mark(&start("left", "a")));
    let Entered::Begun(_sender) = requests.enter(&mark(&start("now", "a"))).unwrap() else {
        panic!("it is new");
    };
    requests.note(&context("now"), &mut begun);
    requests.note(&context("now"), &mut begun);
    requests.note(&context(""), &mut begun);
    let ids: Vec<_> = begun.iter().map(|mark| mark.id.as_str()).collect();
    assert_eq!(ids, ["left", "now"]);
    assert!(matches!(
        requests.enter(&mark(&start("now", "a"))),
        Ok(Entered::Waiting(_))
    ));
    for id in ["left", "now"] {
        let failure = requests.enter(&mark(&start(id, "b"))).err().unwrap();
        assert_eq!(failure.reason, "REQUEST_ID_REUSED", "{id}");
    }
}

#[test]
fn an_id_is_its_callers_own() {
    let requests = Requests::default();
    let by = |caller| super::mark(&start("1", "a"), &caller, &key());
    let callers = [
        Initiator::User(0),
        Initiator::User(1),
        Initiator::Certificate("uid:0".into()),
    ];
    let mut senders = Vec::new();
    for caller in &callers {
        let Entered::Begun(sender) = requests.enter(&by(caller.clone())).unwrap() else {
            panic!("{caller:?} waits for the request of another");
        };
        senders.push(sender);
    }
    assert!(matches!(
        requests.enter(&by(Initiator::User(0))),
        Ok(Entered::Waiting(_))
    ));
}
