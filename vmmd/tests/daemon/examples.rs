//! The clients in docs/examples, run as their readers would.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::{
    harness::Daemon,
    pki::{self, Pki},
};

const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Runs a program that must succeed.
fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", text(&output));
}

fn text(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{}\n{out}\n{error}", output.status)
}

/// An interpreter with what the example requires, kept over runs of the tests, and the messages made from the protocol files.
fn python() -> (PathBuf, tempfile::TempDir) {
    let requirements = Path::new(TREE).join("docs/examples/python/requirements.txt");
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python-example");
    fs::create_dir_all(&venv).unwrap();
    // One process at a time installs.
    let lock = fs::File::create(venv.join("lock")).unwrap();
    lock.lock().unwrap();
    let installed = venv.join("requirements.txt");
    let wanted = fs::read(&requirements).unwrap();
    let program = venv.join("bin/python");
    if fs::read(&installed).ok().as_ref() != Some(&wanted) {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
        run(Command::new(&program)
            .args(["-m", "pip", "install", "--quiet", "--requirement"])
            .arg(&requirements));
        fs::write(&installed, &wanted).unwrap();
    }
    let made = tempfile::tempdir().unwrap();
    let protocol = Path::new(TREE).join("proto");
    let files = fs::read_dir(protocol.join("vmmd/v1")).unwrap();
    let files = files.map(|entry| Path::new("vmmd/v1").join(entry.unwrap().file_name()));
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "proto"));
    run(Command::new(&program)
        .args(["-m", "grpc_tools.protoc"])
        .arg(format!("-I{}", protocol.display()))
        .arg(format!("--python_out={}", made.path().display()))
        .arg(format!("--grpc_python_out={}", made.path().display()))
        .args(files));
    (program, made)
}

/// Runs the example against a daemon; `connection` says where it is.
fn example(daemon: &Daemon, connection: &[String]) {
    let (program, messages) = python();
    let output = Command::new(program)
        .arg(Path::new(TREE).join("docs/examples/python/vmmd_example.py"))
        .args(connection)
        .arg("--kernel")
        .arg(daemon.path("kernel"))
        .args([
            "--cmdline",
            "",
            "--type",
            "hello from python",
            "--expect",
            "hello from python\r\n",
        ])
        .arg("example")
        .env("PYTHONPATH", messages.path())
        .output()
        .unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    for told in ["created example", "it runs", "booted example", "it is deleted"] {
        assert!(text.contains(told), "{told}: {text}");
    }
}

#[tokio::test]
async fn the_python_example_works_over_the_socket() {
    let daemon = Daemon::start().await;
    let socket = daemon.path("run/vmmd.sock").display().to_string();
    example(&daemon, &["--socket".into(), socket]);
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn the_python_example_works_over_tcp_with_certificates() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    let admin = pki.role("admin", "admin");
    let folder = tempfile::tempdir().unwrap();
    let mut connection = vec!["--address".to_owned(), pki::address(&daemon)];
    for (option, content) in [
        ("ca", pki.certificate.pem()),
        ("cert", admin.certificate_pem()),
        ("key", admin.key_pem()),
    ] {
        let path = folder.path().join(option);
        fs::write(&path, content).unwrap();
        connection.extend([format!("--{option}"), path.display().to_string()]);
    }
    example(&daemon, &connection);
    assert!(daemon.list().await.is_empty());
}
