//! `vmmctl network`.

use crate::support::{Daemon, done, line};

/// Runs `vmmctl network`, the earlier form of the commands.
fn run(daemon: &Daemon, args: &str) -> (i32, String, String) {
    line(daemon, &format!("network {args}"))
}

/// A daemon with the networks `back` and `front`.
fn with_two() -> Daemon {
    let daemon = Daemon::start();
    for name in ["front", "back"] {
        let made = run(
            &daemon,
            &format!("create {name} --cidr 10.80.0.0/24 -l tier={name} -l old=1"),
        );
        assert_eq!(
            made,
            done(&format!(
                "network/{name} created, gateway 10.80.0.1 on vmb5e0c3f560a\n"
            ))
        );
    }
    daemon
}

#[test]
fn all_pages_of_networks_are_listed() {
    let daemon = with_two();
    let table = "NAME    READY   MODE   ADDRESSES      GATEWAY     USED   FREE   BRIDGE\n\
                 back    yes     nat    10.80.0.0/24   10.80.0.1   0      253    vmb5e0c3f560a\n\
                 front   yes     nat    10.80.0.0/24   10.80.0.1   0      253    vmb5e0c3f560a\n";
    assert_eq!(run(&daemon, "ls -l tier"), done(table));
    let pages = [
        "list networks [\"tier\"] after \"\"",
        "list networks [\"tier\"] after \"back\"",
    ];
    assert_eq!(daemon.state.calls(), pages);
}

/// A manifest creates a network, changes what differs, and removes the network.
#[test]
fn network_of_a_manifest_is_applied_edited_and_deleted() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lan.yaml");
    let write = |spec: &str| {
        let text = format!(
            "apiVersion: vmmd/v1\nkind: Network\nmetadata: {{name: lan, labels: {{tier: front}}}}\nspec: {{ipv4Cidr: 10.80.0.0/24{spec}}}\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    let verb = |verb: &str| line(&daemon, &format!("{verb} -f {}", file.display()));
    write("");
    assert_eq!(verb("apply"), done("network/lan created\n"));
    assert_eq!(verb("apply"), done("network/lan unchanged\n"));
    write(", dnsServers: [192.0.2.53], reservations: [{name: db, address: 10.80.0.9}]");
    let changes = "  spec.dnsServers: 0 items -> 1 items\n  spec.reservations[db]: added\n";
    let (code, stdout, _) = verb("diff");
    assert_eq!(
        (code, stdout),
        (4, format!("network/lan: to be changed\n{changes}"))
    );
    assert_eq!(verb("apply"), done(&format!("network/lan changed\n{changes}")));
    let call = "update lan: [\"spec.dns_servers\", \"spec.reservations\"], None";
    assert_eq!(daemon.state.calls(), [call]);
    write(", mtu: 9000");
    let (code, _, stderr) = verb("apply");
    assert_eq!(code, 4);
    let expected = "network/lan exists and differs from the manifest in immutable fields";
    assert!(
        stderr.contains(expected) && stderr.contains("spec.mtu: not set -> 9000"),
        "{stderr}"
    );

    let edit = |editor: &str| {
        let mut command = daemon.vmmctl();
        command.args(["edit", "network", "lan"]).env_remove("VISUAL");
        crate::support::output(command.env("EDITOR", editor).env("TMPDIR", folder.path()))
    };
    assert_eq!(edit("true"), done("network/lan unchanged\n"));
    let edited = "network/lan changed\n  metadata.labels.tier: front -> back\n";
    assert_eq!(edit("sed -i s/front/back/"), done(edited));
    let call = "update lan: [\"metadata.labels\"], Some(Preconditions { uid: \"5e0c3f56-0a3a-4c69-8f1d-0d8f6a3f5a10\", generation: Some(1) })";
    assert_eq!(daemon.state.calls().last().unwrap(), call);
    assert_eq!(verb("delete"), done("network/lan deleted\n"));
    assert!(daemon.state.network("lan").is_none());
}

#[test]
fn networks_are_watched() {
    let daemon = with_two();
    let (_, told, failure) = run(&daemon, "ls --watch");
    let phases: Vec<_> = told
        .lines()
        .map(|line| line.split_whitespace().take(2).collect::<Vec<_>>())
        .collect();
    let expected = [
        ["NAME", "READY"],
        ["back", "yes"],
        ["front", "yes"],
        ["back", "Deleted"],
        ["front", "Deleted"],
    ];
    assert_eq!(phases, expected);
    assert!(failure.contains("that was all"), "{failure}");
}

#[test]
fn a_network_is_updated_and_labels_that_are_not_named_stay() {
    let daemon = with_two();
    let (code, _, said) = run(&daemon, "update front");
    assert_eq!((code, said.contains("no change is given")), (2, true), "{said}");
    let updated = done("network/front updated\n");
    assert_eq!(
        run(
            &daemon,
            "update front --mode isolated --dns 10.0.0.53 --dns 10.0.0.54"
        ),
        updated
    );
    assert_eq!(run(&daemon, "update front -l zone=a -l old-"), updated);
    let front = daemon.state.network("front").unwrap();
    let (spec, labels) = (front.spec.unwrap(), front.metadata.unwrap().labels);
    assert_eq!(spec.dns_servers, ["10.0.0.53", "10.0.0.54"]);
    assert_eq!(spec.mode().as_str_name(), "NETWORK_MODE_ISOLATED");
    let mut labels: Vec<_> = labels
        .into_iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    labels.sort();
    assert_eq!(labels, ["tier=front", "zone=a"]);
    assert_eq!(run(&daemon, "update front --dns node"), updated);
    assert!(
        daemon
            .state
            .network("front")
            .unwrap()
            .spec
            .unwrap()
            .dns_servers
            .is_empty()
    );
    let calls = daemon.state.calls();
    assert!(
        calls[0].starts_with("update front: [\"spec.mode\", \"spec.dns_servers\"], None"),
        "{calls:?}"
    );
    assert!(calls[1].contains("generation: Some(1)"), "{calls:?}");
    let (code, _, said) = run(&daemon, "update nowhere -l a=b");
    assert_eq!((code, said.contains("`vmmctl get network`")), (3, true), "{said}");
}

/// Lines of the description of the network `front`, with single spaces.
fn description(daemon: &Daemon) -> String {
    let (_, shown, _) = run(daemon, "describe front");
    let lines = shown
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn routes_options_names_and_reservations_are_set_and_shown() {
    let daemon = Daemon::start();
    let made = run(
        &daemon,
        "create front --cidr 10.80.0.0/24 --route 10.90.0.0/16=10.80.0.9 --route 10.91.0.0/16 --dhcp-option 66=tftp \
         --dhcp-option 43=0x0a50 --domain lan.example --dns-record db=10.80.0.9,fd00::9 --reserve web=10.80.0.9 \
         --reserve db=10.80.0.10,52:54:00:12:34:56",
    );
    assert_eq!(made.0, 0, "{made:?}");
    let shown = description(&daemon);
    for expected in [
        "Routes: 10.90.0.0/16 via 10.80.0.9, 10.91.0.0/16",
        "DHCP options: 66=tftp, 43=0x0a50",
        "Domain: lan.example",
        "db 10.80.0.9, fd00::9",
        "web 10.80.0.9",
        "db 10.80.0.10 52:54:00:12:34:56",
    ] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    let updated = done("network/front updated\n");
    let changes = "update front --route none --dhcp-option 67=boot --domain none --dns-record none --reserve web- --reserve a=10.80.0.3";
    assert_eq!(run(&daemon, changes), updated);
    let spec = daemon.state.network("front").unwrap().spec.unwrap();
    assert_eq!((spec.routes.len(), spec.dhcp_options[0].code), (0, 67));
    assert_eq!((spec.domain.as_str(), spec.dns_records.len()), ("", 0));
    let names: Vec<_> = spec
        .reservations
        .iter()
        .map(|reservation| reservation.name.as_str())
        .collect();
    assert_eq!(names, ["db", "a"]);
    let calls = daemon.state.calls();
    assert!(calls.last().unwrap().contains("generation: Some(1)"), "{calls:?}");
    for (wrong, expected) in [
        ("--dhcp-option tftp", "must be NUMBER=TEXT"),
        ("--dns-record db", "must be NAME=ADDRESS"),
        ("--reserve web", "must be NAME=ADDRESS[,MAC]"),
    ] {
        let (code, _, said) = run(&daemon, &format!("update front {wrong}"));
        assert_eq!((code, said.contains(expected)), (2, true), "{said}");
    }
}

#[test]
fn security_groups_are_set_and_shown() {
    let daemon = Daemon::start();
    let made = run(
        &daemon,
        "create front --cidr 10.80.0.0/24 --security-group web,in=tcp:80+tcp:8000-8100@10.80.0.9,out=none \
         --security-group old,in=any",
    );
    assert_eq!(made.0, 0, "{made:?}");
    let shown = description(&daemon);
    for expected in ["web tcp:80 tcp:8000-8100@10.80.0.9 none", "old any"] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    let changes = "update front --security-group old- --security-group db,out=udp:53@fd00::1";
    assert_eq!(run(&daemon, changes), done("network/front updated\n"));
    let groups = daemon
        .state
        .network("front")
        .unwrap()
        .spec
        .unwrap()
        .security_groups;
    let names: Vec<_> = groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["web", "db"]);
    assert_eq!(groups[1].egress.as_ref().unwrap().allow[0].addresses, ["fd00::1"]);
    for (wrong, expected) in [
        ("web", "must be NAME,in="),
        ("web,tcp:80", "rules are in="),
        ("web,in=http", "a rule is any, tcp"),
        ("web,in=tcp:http", "a rule is any, tcp"),
    ] {
        let (code, _, said) = run(&daemon, &format!("update front --security-group {wrong}"));
        assert_eq!((code, said.contains(expected)), (2, true), "{said}");
    }
}

#[test]
fn verb_before_the_kind_does_the_same() {
    let daemon = with_two();
    let verb = |text: &str| line(&daemon, text);
    assert_eq!(verb("get network"), run(&daemon, "ls"));
    assert_eq!(verb("ls networks front -o name"), done("network/front\n"));
    assert_eq!(
        verb("describe network front back"),
        run(&daemon, "describe front back")
    );
    let updated = done("network/front updated\n");
    assert_eq!(verb("update network front --mode isolated"), updated);
    let deleted = done("network/front deleted\nnetwork/back deleted\n");
    assert_eq!(verb("rm network front network/back"), deleted);
    let (code, _, said) = verb("get network front");
    assert_eq!((code, said.contains("`vmmctl get network`")), (3, true), "{said}");
    let none = (0, String::new(), "There are no networks.\n".to_owned());
    assert_eq!(verb("get network"), none);
}
