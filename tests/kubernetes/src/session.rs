//! A long-running `kubectl`, such as `logs -f`.

use std::{process::Stdio, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// A command whose output is read while it runs. It is killed when dropped.
pub struct Session {
    child: Child,
    output: ChildStdout,
    input: Option<ChildStdin>,
    seen: Vec<u8>,
}

impl Session {
    /// Starts it.
    pub fn start(command: std::process::Command) -> Self {
        Self::with_input(command, Stdio::null())
    }

    /// Starts it, with a pipe to type into.
    pub fn typing(command: std::process::Command) -> Self {
        Self::with_input(command, Stdio::piped())
    }

    fn with_input(command: std::process::Command, input: Stdio) -> Self {
        let mut command = Command::from(command);
        command
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        Self {
            output: child.stdout.take().unwrap(),
            input: child.stdin.take(),
            child,
            seen: Vec::new(),
        }
    }

    /// All that was read.
    pub fn seen(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    /// Types this.
    pub async fn type_in(&mut self, text: &str) {
        let input = self.input.as_mut().unwrap();
        input.write_all(text.as_bytes()).await.unwrap();
        input.flush().await.unwrap();
    }

    /// Closes the input.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// Waits until it has printed this.
    pub async fn expect(&mut self, text: &str, patience: Duration) {
        let found = timeout(patience, async {
            while !self.seen().contains(text) {
                let mut buffer = [0; 4096];
                let length = self.output.read(&mut buffer).await.unwrap();
                if length == 0 {
                    return false;
                }
                self.seen.extend_from_slice(&buffer[..length]);
            }
            true
        })
        .await;
        match found {
            Ok(true) => {}
            Ok(false) => panic!("it ended without {text:?}: {}", self.seen()),
            Err(_) => panic!("no {text:?} within {patience:?}: {}", self.seen()),
        }
    }

    /// Waits for its end; whether it ended well.
    pub async fn end(mut self, patience: Duration) -> bool {
        timeout(patience, self.child.wait())
            .await
            .expect("it does not end")
            .unwrap()
            .success()
    }
}
