//! A program that a test starts.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// A program with its arguments; killed when dropped. All that it prints in its lives is in one log.
pub struct Program {
    /// Name in the test.
    pub name: String,
    executable: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    log: PathBuf,
    /// The process whose network, mount and process namespaces it gets.
    inside: Option<u32>,
    child: Option<Child>,
}

impl Program {
    /// One that does not run yet; its log is `<folder>/<name>.log`.
    pub fn new(
        name: &str,
        executable: &Path,
        arguments: impl IntoIterator<Item = impl Into<OsString>>,
        folder: &Path,
    ) -> Self {
        Self {
            name: name.into(),
            executable: executable.into(),
            arguments: arguments.into_iter().map(Into::into).collect(),
            environment: Vec::new(),
            log: folder.join(format!("{name}.log")),
            inside: None,
            child: None,
        }
    }

    /// With a variable in its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// In the network, mount and process namespaces of a process.
    #[must_use]
    pub fn inside(mut self, pid: u32) -> Self {
        self.inside = Some(pid);
        self
    }

    /// Starts it. It stays in the test's process group, so that it ends with a test that is killed.
    pub fn launch(&mut self) {
        assert!(self.child.is_none(), "{} runs", self.name);
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let mut command = match self.inside {
            Some(pid) => {
                // `nsenter` waits for the program, which ends with it.
                let mut command = Command::new("nsenter");
                command
                    .args([&format!("--target={pid}"), "--net", "--mount", "--pid", "--"])
                    .args(["setpriv", "--pdeathsig=KILL", "--"])
                    .arg(&self.executable);
                command
            }
            None => Command::new(&self.executable),
        };
        command
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = command.spawn();
        self.child = Some(child.unwrap_or_else(|error| panic!("{}: {error}", self.executable.display())));
    }

    /// Kills it with SIGKILL, if it runs, and waits for its end.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }

    /// Fails if it has ended on its own.
    pub fn check(&mut self) -> Result<(), String> {
        let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().unwrap()) else {
            return Ok(());
        };
        let how = match status.signal() {
            Some(signal) => format!("signal {signal}"),
            None => format!("status {}", status.code().unwrap_or_default()),
        };
        Err(format!(
            "{} ended by itself with {how}:\n{}",
            self.name,
            self.tail(20)
        ))
    }

    /// All that it has printed.
    pub fn printed(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last lines of its output.
    pub fn tail(&self, lines: usize) -> String {
        let printed = self.printed();
        let all: Vec<_> = printed.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}
