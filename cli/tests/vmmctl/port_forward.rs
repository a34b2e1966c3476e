//! Ports of this machine, and pipes, that lead to a port of a VM, and commands in its guest.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
};

use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, disk::DISK_MADE, done, line, run_with_input};

fn daemon() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon
}

#[test]
fn a_pipe_leads_to_a_port_until_both_ends_have_ended() {
    let daemon = daemon();
    let answer = run_with_input(&daemon, &["port-forward", "--stdio", "web", "7"], "GET /");
    assert_eq!(answer, done("GET /"));
    assert_eq!(line(&daemon, "port-forward --stdio web 8").0, 5);
    assert_eq!(line(&daemon, "port-forward --stdio web 7 8").0, 2);
}

#[test]
fn pipe_leads_to_a_socket_device_in_both_directions() {
    let daemon = daemon();
    for (verb, direction) in [("connect", "vsock connect"), ("listen", "vsock accept")] {
        let answer = run_with_input(&daemon, &["vsock", verb, "web", "7"], "hello");
        assert_eq!(answer, done("hello"));
        assert!(daemon.state.calls().contains(&direction.to_owned()));
    }
    assert_eq!(line(&daemon, "vsock connect web 8").0, 5);
    assert_eq!(line(&daemon, "vsock connect web 4294967295").0, 2);
}

#[test]
fn pipe_leads_to_a_channel() {
    let daemon = daemon();
    let answer = run_with_input(&daemon, &["channel", "connect", "web", "echo"], "hello");
    assert_eq!(answer, done("hello"));
    assert_eq!(line(&daemon, "channel connect web other").0, 5);
}

#[test]
fn a_command_in_the_guest_has_input_output_and_its_exit_code() {
    let daemon = daemon();
    let answer = run_with_input(&daemon, &["exec", "-i", "web", "--", "cat"], "typed");
    assert_eq!(answer, done("typed"));
    let (code, stdout, stderr) = line(&daemon, "exec web --env A=1 --env B=2 -- env -i");
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (3, "", "A=1 B=2env -i"));
    assert_eq!(line(&daemon, "exec web -- abort").0, 128 + 6);
    assert_eq!(line(&daemon, "exec web -- missing").0, 5);
    assert_eq!(line(&daemon, "exec web").0, 2);
}

#[test]
fn forwarded_port_serves_several_clients() {
    let daemon = daemon();
    let mut running = daemon.begin(&["port-forward", "web", "0:7"]);
    let said = running.line();
    let (address, rest) = said.split_once(' ').unwrap();
    assert_eq!(rest, "leads to port 7 of vm/web");
    let mut clients: Vec<_> = (0..2).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (client, text) in clients.iter_mut().zip(["one", "two"]) {
        client.write_all(text.as_bytes()).unwrap();
    }
    for (client, text) in clients.iter_mut().zip(["one", "two"]) {
        client.shutdown(Shutdown::Write).unwrap();
        let mut had = String::new();
        client.read_to_string(&mut had).unwrap();
        assert_eq!(had, text);
    }
}

/// Installs programs that print their arguments, instead of ssh and scp.
fn with_programs(command: &mut assert_cmd::Command, folder: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt as _;
    for program in ["ssh", "scp"] {
        let path = folder.join(program);
        std::fs::write(&path, "#!/bin/sh\nfor word; do echo \"$word\"; done\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:/usr/bin:/bin", folder.display());
    command
        .env("PATH", path)
        .env("XDG_STATE_HOME", folder.join("state"));
}

#[test]
fn ssh_reaches_a_vm_through_the_daemon_and_knows_it_by_its_uid() {
    let daemon = daemon();
    let folder = tempfile::tempdir().unwrap();
    let mut command = daemon.vmmctl();
    with_programs(&mut command, folder.path());
    command.args([
        "ssh",
        "--port",
        "7",
        "root@web",
        "--",
        "-v",
        "-L",
        "1:localhost:2",
        "uptime",
        "-p",
    ]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    let words: Vec<_> = said.lines().collect();
    let option = |name: &str| {
        let value = words
            .iter()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_else(|| panic!("no {name}: {said}")).to_owned()
    };
    assert!(option("HostKeyAlias").starts_with("vmmd-") && option("HostKeyAlias").len() > 5);
    assert_eq!(option("StrictHostKeyChecking"), "accept-new");
    let known = folder.path().join("state/vmmctl/known_hosts");
    assert_eq!(option("UserKnownHostsFile"), format!("\"{}\"", known.display()));
    assert!(known.parent().unwrap().is_dir());
    // A guest that no longer answers ends the session; options of the user come first and are stronger.
    let end = [
        "-v",
        "-L",
        "1:localhost:2",
        "-oServerAliveInterval=15",
        "-oServerAliveCountMax=4",
        "--",
        "root@web",
        "uptime",
        "-p",
    ];
    assert_eq!(words[words.len() - end.len()..], end);

    // The proxy command leads to the guest.
    let proxy = option("ProxyCommand");
    let mut pipe = assert_cmd::Command::new("sh");
    pipe.args(["-c", &proxy]).env("VMMD_SOCKET", &daemon.socket);
    let output = pipe.write_stdin("SSH-2.0").output().unwrap();
    assert_eq!(output.stdout, b"SSH-2.0", "{output:?}");
}

/// A VM of the image `debian13` with a key for the image's default user.
fn of_an_image(daemon: &Daemon) {
    daemon.state.operation_of(DISK_MADE, "web-root", "");
    let run = [
        "run",
        "debian13",
        "--name",
        "web",
        "--ssh-key",
        "ssh-ed25519 AAAA me",
        "-q",
    ];
    let output = daemon.vmmctl().args(run).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn login_without_a_user_is_that_of_the_images_user() {
    let daemon = Daemon::start();
    of_an_image(&daemon);
    let folder = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| {
        let mut command = daemon.vmmctl();
        with_programs(&mut command, folder.path());
        let output = command.args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let [words, said] = run(&["ssh", "web", "--", "-l", "root"]);
    // The user's own option comes first.
    let end = "-l\nroot\n-oServerAliveInterval=15\n-oServerAliveCountMax=4\n-oUser=debian\n--\nweb\n";
    assert!(words.ends_with(end), "{words}");
    assert!(
        said.contains("as debian, the default user of image debian13"),
        "{said}"
    );
    let [words, said] = run(&["ssh", "root@web"]);
    assert!(!words.contains("-oUser") && said.is_empty(), "{words}{said}");
    let [words, _] = run(&["scp", "web:/etc/motd", "."]);
    assert!(words.contains("-oUser=debian\n"), "{words}");
    let [words, _] = run(&["scp", "root@web:/etc/motd", "."]);
    assert!(!words.contains("-oUser"), "{words}");
}

#[test]
fn shell_takes_the_first_way_that_answers() {
    let daemon = daemon();
    daemon.state.put("db", VmPhase::Running, &[]);
    daemon.state.with_vsock("db");
    let folder = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| {
        let mut command = daemon.vmmctl();
        with_programs(&mut command, folder.path());
        let output = command.args(words).write_stdin("halt\n").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let [words, said] = run(&["shell", "db", "--user", "debian"]);
    assert_eq!(said, "Connecting to vm/db by SSH over its socket device.\n");
    assert!(words.contains("'vsock' 'connect' '--' 'db' '22'"), "{words}");
    assert!(words.ends_with("--\ndebian@db\n"), "{words}");
    // Neither way exists.
    let [_, said] = run(&["shell", "web"]);
    let without = "No SSH to vm/web: it has no socket device to connect by\n\
                   No SSH to vm/web: it has no network to connect by\n\
                   Connecting to the serial console of vm/web; ^] detaches.\n";
    assert!(said.starts_with(without), "{said}");
    let [_, said] = run(&["shell", "--console", "db"]);
    assert!(
        said.starts_with("Connecting to the serial console of vm/db"),
        "{said}"
    );
    // Without an address, ssh and scp also select the socket device.
    for words in [&["ssh", "db"][..], &["scp", "db:/etc/motd", "."]] {
        let [words, said] = run(words);
        assert!(said.contains("connecting by its socket device"), "{said}");
        assert!(words.contains("'vsock' 'connect'"), "{words}");
    }
}

#[test]
fn scp_copies_files_of_one_vm() {
    let daemon = daemon();
    daemon.state.put("db", VmPhase::Running, &[]);
    let folder = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| {
        let mut command = daemon.vmmctl();
        with_programs(&mut command, folder.path());
        command.arg("scp").args(words).output().unwrap()
    };
    let output = run(&["-r", "root@web:/etc", "./b:c"]);
    let said = String::from_utf8(output.stdout).unwrap();
    let end = "-oServerAliveInterval=15\n-oServerAliveCountMax=4\n-r\n--\nroot@web:/etc\n./b:c\n";
    assert!(said.ends_with(end), "{said}");
    for (words, wanted) in [
        (["a", "b"], "name a file of a VM"),
        (["web:a", "db:b"], "in two steps"),
        (["-oProxyCommand=x@web:a", "b"], "unexpected argument"),
    ] {
        let output = run(&words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(wanted), "{said}");
    }
    let output = run(&["nobody:a", "b"]);
    assert_eq!(output.status.code(), Some(3));
}
