//! A program that a test starts, kills and starts again.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::{
        fd::AsRawFd as _,
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use rustix::process::Pid;

/// A program with its arguments; killed when dropped. All that it prints in its lives is in one log.
pub struct Program {
    /// Name in the test.
    pub name: String,
    executable: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    log: PathBuf,
    /// The user and the only group that it runs as; those of the test when there are none.
    user: Option<u32>,
    /// The process whose network, mount and process namespaces it gets.
    inside: Option<u32>,
    child: Option<Child>,
    /// Number of restarts after an unrequested end.
    pub revived: u32,
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
            user: None,
            inside: None,
            child: None,
            revived: 0,
        }
    }

    /// With a variable in its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// As another user, whose only group has the same number. It need not be able to reach the program's file.
    #[must_use]
    pub fn user(mut self, user: u32) -> Self {
        self.user = Some(user);
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
        let opened = File::open(&self.executable).unwrap();
        let mut command = match (self.inside, self.user) {
            (Some(pid), _) => {
                // `nsenter` waits for the program, which ends with it.
                let mut command = Command::new("nsenter");
                command
                    .args([&format!("--target={pid}"), "--net", "--mount", "--pid", "--"])
                    .args(["setpriv", "--pdeathsig=KILL", "--"])
                    .arg(&self.executable);
                command
            }
            (None, None) => Command::new(&self.executable),
            (None, Some(user)) => {
                let mut command = Command::new(format!("/proc/self/fd/{}", opened.as_raw_fd()));
                command.arg0(&self.executable).uid(user).gid(user);
                command
            }
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

    /// Its process, unless it has ended on its own.
    pub fn pid(&mut self) -> Option<Pid> {
        let child = self.child.as_mut()?;
        child
            .try_wait()
            .unwrap()
            .is_none()
            .then(|| Pid::from_child(child))
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

    /// Restarts it after an unrequested end, as systemd or a Deployment would. The test fails if it
    /// panicked.
    pub fn revive(&mut self) {
        if self.check().is_err() {
            assert!(
                !self.printed().contains("panicked at"),
                "{}: {}",
                self.name,
                self.tail(40)
            );
            self.child = None;
            self.revived += 1;
            self.launch();
        }
    }

    /// Its resident memory in bytes; zero when it does not run.
    pub fn memory(&mut self) -> u64 {
        let Some(pid) = self.pid() else { return 0 };
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let pages = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        pages.unwrap_or_default() * 1024
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

/// Programs that ended on their own, with their counts.
pub fn ended_by_themselves<'a>(programs: impl Iterator<Item = &'a mut Program>) -> Vec<(String, u32)> {
    let ended = programs.filter(|program| program.revived > 0);
    ended
        .map(|program| (program.name.clone(), program.revived))
        .collect()
}
