//! Output of a command in the node, read while the command runs.

use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result};

use crate::must;
use crate::wait::{Deadline, Follow};

/// A command that runs in the node while its output is read.
pub struct Stream {
    child: Child,
    output: Follow<ChildStdout>,
}

impl Stream {
    pub(super) fn spawn(command: &mut Command) -> Result<Stream> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("start ssh")?;
        let output = Follow::new(child.stdout.take().context("ssh's output")?);
        Ok(Stream { child, output })
    }

    /// Reads on until `wanted` has come; see [`Follow::until`].
    #[track_caller]
    pub fn until(&mut self, wanted: &str, deadline: Deadline) -> String {
        must(self.try_until(wanted, deadline))
    }

    /// Like [`Self::until`], for a caller that handles the failure.
    pub fn try_until(&mut self, wanted: &str, deadline: Deadline) -> Result<String> {
        self.output.until(wanted, deadline)
    }

    /// All that was read so far.
    pub fn text(&self) -> String {
        self.output.text()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
