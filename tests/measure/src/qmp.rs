//! `measure qmp`: asks a QEMU for something over its QMP socket.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Returns what QEMU answers to `command`, with `arguments` as a JSON object.
pub fn ask(socket: &Path, command: &str, arguments: &str) -> Result<Value> {
    let stream = UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let mut next = || -> Result<Value> {
        let line = lines.next().context("QEMU has closed its socket")??;
        Ok(serde_json::from_str(&line)?)
    };
    next()?;
    let arguments: Value = serde_json::from_str(arguments).context("the arguments are no JSON")?;
    let mut answer = Value::Null;
    for request in [
        json!({"execute": "qmp_capabilities"}),
        json!({"execute": command, "arguments": arguments}),
    ] {
        writeln!(&stream, "{request}")?;
        // Events come between answers.
        answer = loop {
            let said = next()?;
            if let Some(error) = said.get("error") {
                bail!("{command}: {error}");
            }
            if let Some(returned) = said.get("return") {
                break returned.clone();
            }
        };
    }
    Ok(answer)
}
