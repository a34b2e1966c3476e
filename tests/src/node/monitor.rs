//! QEMU's monitor: the machine under a node is asked, and changed while it runs.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::wait::{Deadline, Follow};

/// A connection to it. QEMU takes one at a time.
pub struct Monitor {
    stream: UnixStream,
    replies: Follow<UnixStream>,
    /// Devices that were said to be gone.
    gone: Vec<String>,
    deadline: Deadline,
}

impl Monitor {
    /// The monitor whose socket is `path`. All that is asked through it has to end within 20 s.
    pub fn connect(path: &Path) -> Result<Self> {
        let deadline = Deadline::seconds(20);
        let stream = UnixStream::connect(path).with_context(|| format!("connect {}", path.display()))?;
        let mut monitor = Self {
            replies: Follow::new(stream.try_clone()?),
            stream,
            gone: Vec::new(),
            deadline,
        };
        monitor.replies.until("\n", deadline).context("QEMU's greeting")?;
        monitor.ask("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Executes a command, and returns its answer.
    pub fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        self.stream
            .write_all(format!("{request}\n").as_bytes())
            .context("ask QEMU")?;
        loop {
            let mut reply = self.read()?;
            if let Some(error) = reply.get("error") {
                bail!("QEMU refused {request}: {error}");
            }
            if let Some(value) = reply.get_mut("return") {
                return Ok(value.take());
            }
            self.keep(&reply);
        }
    }

    /// Takes a device out, and waits until it is gone: what runs in the machine has to give it back.
    pub fn delete(&mut self, device: &str) -> Result<()> {
        self.ask("device_del", &json!({"id": device}))?;
        while !self.gone.iter().any(|gone| gone == device) {
            let event = self
                .read()
                .with_context(|| format!("wait until {device} is gone"))?;
            self.keep(&event);
        }
        Ok(())
    }

    fn read(&mut self) -> Result<Value> {
        let line = self.replies.until("\n", self.deadline)?;
        serde_json::from_str(&line).with_context(|| format!("what QEMU says: {line:?}"))
    }

    fn keep(&mut self, event: &Value) {
        // There is one without a name too, for the part of a virtio device that is not its transport.
        let device = event.pointer("/data/device").and_then(Value::as_str);
        if event["event"] == "DEVICE_DELETED" {
            self.gone.extend(device.map(str::to_owned));
        }
    }
}
