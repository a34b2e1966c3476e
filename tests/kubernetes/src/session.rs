//! A `kubectl` that goes on, as `logs -f` does.

use std::{process::Stdio, time::Duration};

use tokio::{
    io::AsyncReadExt as _,
    process::{Child, ChildStdout, Command},
    time::timeout,
};

/// A command whose output is read while it runs. It is killed when dropped.
pub struct Session {
    child: Child,
    output: ChildStdout,
    seen: Vec<u8>,
}

impl Session {
    /// Starts it.
    pub fn start(command: std::process::Command) -> Self {
        let mut command = Command::from(command);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        Self {
            output: child.stdout.take().unwrap(),
            child,
            seen: Vec::new(),
        }
    }

    /// All that was read.
    pub fn seen(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
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
