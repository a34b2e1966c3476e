//! The clients in docs/examples, run as their readers would.

use std::{
    fs,
    path::Path,
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

/// Whether a file that .ci/setup installs exists. On a developer's machine, a test without the file
/// reports this and passes.
fn is_there(path: &Path) -> bool {
    let there = path.exists();
    if !there {
        let message = format!("{} is missing: .ci/setup installs it", path.display());
        assert!(std::env::var_os("CI").is_none(), "{message}");
        eprintln!("not run: {message}");
    }
    there
}

/// The Python client, with messages generated from the protocol files, in a folder that lives as
/// long as the second value. `None` on a developer's machine without the client's requirements.
fn python() -> Option<(Command, tempfile::TempDir)> {
    let installed = Path::new(TREE).join("target/tools/python-example");
    if !is_there(&installed.join("requirements.txt")) {
        return None;
    }
    let program = installed.join("bin/python");
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
    let mut client = Command::new(program);
    client
        .arg(Path::new(TREE).join("docs/examples/python/vmmd_example.py"))
        .env("PYTHONPATH", made.path());
    Some((client, made))
}

/// The Go client, built with Debian's packages and without the network, in a folder that lives as long as the second value. `None` on a
/// developer's machine without these packages.
fn go() -> Option<(Command, tempfile::TempDir)> {
    let example = Path::new(TREE).join("docs/examples/go");
    let needed = [
        "/usr/bin/go",
        "/usr/bin/protoc-gen-go-grpc",
        "/usr/share/gocode/src/google.golang.org/grpc",
    ];
    if !needed.iter().all(|path| is_there(Path::new(path))) {
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-example");
    let module = folder.join("src/vmmd-example");
    fs::create_dir_all(&module).unwrap();
    // One process builds at a time; the others then find the result in the cache.
    let lock = fs::File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    fs::copy(example.join("main.go"), module.join("main.go")).unwrap();
    run(Command::new("sh")
        .arg(example.join("generate"))
        .arg(Path::new(TREE).join("proto"))
        .arg(&module));
    let built = tempfile::tempdir().unwrap();
    let program = built.path().join("vmmd-example");
    let tool = |arguments: &[&str]| {
        run(Command::new("go")
            .args(arguments)
            .current_dir(&module)
            .env("GO111MODULE", "off")
            .env("GOPATH", format!("{}:/usr/share/gocode", folder.display()))
            .env("GOCACHE", folder.join("cache"))
            .env("GOFLAGS", "")
            .env("CGO_ENABLED", "0"));
    };
    tool(&["vet", "."]);
    tool(&["build", "-o", program.to_str().unwrap(), "."]);
    let formatted = Command::new("gofmt").arg("-l").arg(&example).output().unwrap();
    assert!(
        formatted.status.success() && formatted.stdout.is_empty(),
        "gofmt: {}",
        text(&formatted)
    );
    Some((Command::new(program), built))
}

/// Where a client finds the socket of a daemon; each option begins with `dash`.
fn socket(daemon: &Daemon, dash: &str) -> Vec<String> {
    let socket = daemon.path("run/vmmd.sock").display().to_string();
    vec![format!("{dash}socket"), socket]
}

/// How a client reaches a daemon over TCP, as an admin whose certificate is in `folder`.
fn tcp(daemon: &Daemon, pki: &Pki, folder: &Path, dash: &str) -> Vec<String> {
    let admin = pki.role("admin", "admin");
    let mut connection = vec![format!("{dash}address"), pki::address(daemon)];
    for (option, content) in [
        ("ca", pki.certificate.pem()),
        ("cert", admin.certificate_pem()),
        ("key", admin.key_pem()),
    ] {
        let path = folder.join(option);
        fs::write(&path, content).unwrap();
        connection.extend([format!("{dash}{option}"), path.display().to_string()]);
    }
    connection
}

/// Runs a client against a daemon; `connection` says where it is.
fn example(daemon: &Daemon, client: &mut Command, dash: &str, connection: &[String]) {
    let options = [
        ("kernel", daemon.path("kernel").display().to_string()),
        ("cmdline", String::new()),
        ("type", "hello guest".into()),
        ("expect", "hello guest\r\n".into()),
    ];
    let options = options
        .into_iter()
        .flat_map(|(name, value)| [format!("{dash}{name}"), value]);
    let output = client
        .args(connection)
        .args(options)
        .arg("example")
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
    let Some((mut client, _made)) = python() else {
        return;
    };
    let daemon = Daemon::start().await;
    example(&daemon, &mut client, "--", &socket(&daemon, "--"));
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn the_python_example_works_over_tcp_with_certificates() {
    let Some((mut client, _made)) = python() else {
        return;
    };
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    let folder = tempfile::tempdir().unwrap();
    example(
        &daemon,
        &mut client,
        "--",
        &tcp(&daemon, &pki, folder.path(), "--"),
    );
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn the_go_example_works_over_the_socket() {
    let Some((mut client, _built)) = go() else { return };
    let daemon = Daemon::start().await;
    example(&daemon, &mut client, "-", &socket(&daemon, "-"));
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn the_go_example_works_over_tcp_with_certificates() {
    let Some((mut client, _built)) = go() else { return };
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    let folder = tempfile::tempdir().unwrap();
    example(&daemon, &mut client, "-", &tcp(&daemon, &pki, folder.path(), "-"));
    assert!(daemon.list().await.is_empty());
}
