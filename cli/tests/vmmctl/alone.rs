//! Behavior and messages without a daemon.

use std::{
    io::{Read as _, Write as _},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::Path,
    process::Output,
    thread,
};

use rstest::rstest;

fn vmmctl(socket: &Path, args: &[&str]) -> Output {
    let mut command = assert_cmd::Command::cargo_bin("vmmctl").unwrap();
    command.timeout(std::time::Duration::from_secs(30));
    command.env("VMMD_SOCKET", socket).args(args).output().unwrap()
}

fn failure(socket: &Path, args: &[&str]) -> (Option<i32>, String) {
    let output = vmmctl(socket, args);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn stopped_daemon_is_named_with_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmmd.sock");
    let path = socket.display();
    let expected = format!(
        "error: vmmd is not running: there is no socket {path}; start it with `systemctl start vmmd`, or select another \
         socket with --socket\n"
    );
    assert_eq!(failure(&socket, &["get", "vm"]), (Some(7), expected));
    // A socket without a listener, as a killed daemon leaves it.
    drop(UnixListener::bind(&socket).unwrap());
    let expected = format!(
        "error: vmmd is not running: no process listens on {path}; start it with `systemctl start vmmd`; `journalctl -u \
         vmmd` shows why it ended\n"
    );
    assert_eq!(failure(&socket, &["get", "vm"]), (Some(7), expected));
}

#[test]
fn a_socket_without_permission_tells_of_the_group() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmmd.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o000)).unwrap();
    if std::os::unix::net::UnixStream::connect(&socket).is_ok() {
        // Root may do everything, unless it gives that up for this test.
        let program = assert_cmd::cargo::cargo_bin("vmmctl");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let copy = folder.path().join("vmmctl");
        std::fs::copy(program, &copy).unwrap();
        let output = std::process::Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
            .arg(&copy)
            .args(["get", "vm", "--socket"])
            .arg(&socket)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(8), "{text}");
        assert!(text.contains("as a member of the group vmmd"), "{text}");
        return;
    }
    let (code, text) = failure(&socket, &["get", "vm"]);
    assert_eq!(code, Some(8));
    assert!(text.contains("as a member of the group vmmd"), "{text}");
}

#[test]
fn a_peer_that_does_not_speak_grpc_is_an_error_and_no_hang() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vmmd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || {
        for peer in listener.incoming() {
            let mut peer = peer.unwrap();
            let _ = peer.write_all(b"220 mail.example.com ESMTP\r\n");
            let _ = peer.read(&mut [0; 256]);
        }
    });
    let (code, text) = failure(&socket, &["get", "vm"]);
    assert_eq!(code, Some(7), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[rstest]
#[case::no_verb(&[])]
#[case::unknown_verb(&["frobnicate"])]
#[case::no_name(&["start"])]
#[case::grace_and_force(&["stop", "a", "--grace", "5s", "--force"])]
#[case::long_grace(&["stop", "a", "--grace", "2h"])]
#[case::bad_grace(&["stop", "a", "--grace", "soon"])]
#[case::bad_memory(&["create", "a", "--kernel", "/k", "--memory", "lots"])]
#[case::bad_disk(&["create", "a", "--kernel", "/k", "--disk", "root.raw"])]
#[case::bad_format(&["create", "a", "--kernel", "/k", "--disk", "path=/a,format=vmdk"])]
#[case::bad_disk_limit(&["create", "a", "--kernel", "/k", "--disk", "path=/a,iops=many"])]
#[case::nameless_group(&["create", "a", "--kernel", "/k", "--rate-group", "iops=5"])]
#[case::disk_without_size(&["create", "disk", "a"])]
#[case::disk_of_two_sources(&["create", "disk", "a", "--from-file", "/a", "--overlay-of", "b"])]
#[case::relative_source(&["create", "disk", "a", "--from-file", "a.raw"])]
#[case::raw_overlay(&["create", "disk", "a", "--overlay-of", "b", "--format", "raw"])]
#[case::attach_nothing(&["attach", "a"])]
#[case::attach_without_format(&["attach", "a", "--path", "/a.raw"])]
#[case::attach_both(&["attach", "a", "--disk", "d", "--path", "/a.raw", "--format", "raw"])]
#[case::limit_and_group(&["attach", "a", "--disk", "d", "--iops", "5", "--rate-group", "g"])]
#[case::long_timeout(&["detach", "a", "d", "--timeout", "2h"])]
#[case::detach_nothing(&["detach", "a"])]
#[case::resize_to_nothing(&["resize", "disk", "a"])]
#[case::rescan_without_vm(&["resize", "disk", "a", "--rescan"])]
#[case::limit_of_nothing(&["limit", "a", "--iops", "5"])]
#[case::limit_of_both(&["limit", "a", "--disk", "d", "--group", "g", "--iops", "5"])]
#[case::no_limit_and_one(&["limit", "a", "--disk", "d", "--none", "--iops", "5"])]
#[case::two_attachments(&["create", "a", "--kernel", "/k", "--nic", "bridge=br0,tap=tap0"])]
#[case::no_kernel(&["create", "a"])]
#[case::flags_and_file(&["create", "-f", "vm.yaml", "--cpus", "2"])]
#[case::bad_selector(&["get", "vm", "-l", "=x"])]
fn a_wrong_command_line_ends_with_2_before_the_daemon_is_asked(#[case] args: &[&str]) {
    let output = vmmctl(Path::new("/nonexistent/vmmd.sock"), args);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!output.stderr.is_empty());
}

#[test]
fn mistakes_in_a_manifest_show_without_a_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("vm.yaml");
    let nowhere = Path::new("/nonexistent/vmmd.sock");
    let (code, text) = failure(nowhere, &["apply", "-f", missing.to_str().unwrap()]);
    assert_eq!(code, Some(6));
    assert!(text.starts_with("error: cannot read "), "{text}");
    let (code, text) = failure(nowhere, &["create", "Web", "--kernel", "vmlinuz", "--cpus", "0"]);
    assert_eq!(code, Some(6));
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.contains("  --cpus: must be 1 to 254"), "{text}");
}

#[test]
fn the_version_of_the_tool_and_completions_need_no_daemon() {
    let nowhere = Path::new("/nonexistent/vmmd.sock");
    let output = vmmctl(nowhere, &["version", "--client"]);
    assert!(output.status.success());
    for shell in ["bash", "zsh", "fish"] {
        let output = vmmctl(nowhere, &["completion", shell]);
        assert!(output.status.success());
        assert!(
            String::from_utf8(output.stdout)
                .unwrap()
                .contains("VMMCTL_COMPLETE")
        );
    }
}

#[test]
fn man_pages_and_completions_are_generated_for_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    let output = vmmctl(
        Path::new("/nonexistent"),
        &["generate", folder.path().to_str().unwrap()],
    );
    assert!(output.status.success(), "{output:?}");
    for file in [
        "man1/vmmctl.1",
        "man1/vmmctl-get-vm.1",
        "man1/vmmctl-stop.1",
        "bash/vmmctl",
        "zsh/_vmmctl",
    ] {
        assert!(folder.path().join(file).is_file(), "{file}");
    }
    let page = std::fs::read_to_string(folder.path().join("man1/vmmctl.1")).unwrap();
    assert!(page.contains("Exit codes"), "{page}");
}
