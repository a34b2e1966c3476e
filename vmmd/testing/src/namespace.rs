//! Network namespaces that tests and benchmarks make.

use std::{
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

/// A network namespace, removed when dropped.
pub struct Namespace(pub String);

impl Namespace {
    /// A new one.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vmmd-test-{}-{number}", std::process::id());
        assert!(
            Command::new("ip")
                .args(["netns", "add", &name])
                .status()
                .unwrap()
                .success()
        );
        Self(name)
    }

    /// Output of `ip` about it.
    pub fn ip(&self, arguments: &str) -> String {
        let output = Command::new("ip")
            .args(["-n", &self.0])
            .args(arguments.split(' '))
            .output()
            .unwrap();
        assert!(output.status.success(), "ip {arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Output of a command in it.
    pub fn run(&self, command: &str) -> String {
        let output = Command::new("ip")
            .args(["netns", "exec", &self.0])
            .args(command.split(' '))
            .output()
            .unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The ports of a bridge.
    pub fn ports(&self, bridge: &str) -> Vec<String> {
        let text = self.ip(&format!("-o link show master {bridge}"));
        text.lines()
            .map(|line| line.split(": ").nth(1).unwrap().to_owned())
            .collect()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}
