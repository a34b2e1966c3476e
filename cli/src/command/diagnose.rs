//! `diagnose`: everything about a VM in one archive, through the API of the daemon. The archive and standard error name missing
//! parts; a missing part is no failure.

use std::{fs::File, io, io::Write as _, os::unix::fs::OpenOptionsExt as _};

use flate2::{Compression, write::GzEncoder};
use serde::Serialize;
use vmmd_api::v1::{self, VmLog};

use crate::{
    args::observe::Diagnose,
    client::{self, Client},
    failure::{Code, Failure, Result},
    manifest::emit,
    output,
};

/// Most of a log at its beginning, and at its end, in bytes.
const HEAD: usize = 256 << 10;
const TAIL: usize = 1 << 20;

/// Writes the archive.
pub async fn diagnose(client: &Client, args: &Diagnose) -> Result<()> {
    let name = args.name.as_str();
    // Without the VM, the archive would be empty.
    let vm = client.get(name).await?;
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&args.output);
    let path = args.output.display();
    let file = file.map_err(|error| Failure::new(Code::Invalid, format!("cannot create {path}: {error}")))?;
    let mut parts = Parts::default();
    parts.json("vm.json", emit::manifest(&vm));
    parts.message(
        "events.json",
        client
            .events_of("Vm", name, 1000)
            .await
            .map(|events| v1::ListEventsResponse {
                events,
                ..Default::default()
            }),
    );
    let operations = v1::OperationFilter {
        target: Some(client::reference("Vm", name)),
        ..Default::default()
    };
    let operations = client.operations(operations).await;
    parts.message(
        "operations.json",
        operations.map(|operations| v1::ListOperationsResponse {
            operations,
            ..Default::default()
        }),
    );
    parts.message("stats.json", client.stats(name).await);
    parts.message("node.json", client.node().await);
    for (file, log, previous) in [
        ("serial.log", VmLog::Serial, false),
        ("serial.previous.log", VmLog::Serial, true),
        ("vmm.log", VmLog::Vmm, false),
        ("vmm.previous.log", VmLog::Vmm, true),
    ] {
        parts.bytes(file, log_of(client, name, log, previous).await);
    }
    let missing = parts.finish();
    let count = parts.files.len();
    write(file, name, &parts.files)
        .map_err(|error| Failure::new(Code::Other, format!("cannot write {path}: {error}")))?;
    for line in missing {
        eprintln!("left out: {line}");
    }
    output::line(format!("vm/{name}: {count} files in {path}"))
}

/// The beginning and the end of a log.
async fn log_of(client: &Client, name: &str, log: VmLog, previous: bool) -> Result<Vec<u8>> {
    let request = v1::GetVmLogsRequest {
        name: name.to_owned(),
        log: log.into(),
        previous,
        ..Default::default()
    };
    let mut stream = client.vms.clone().get_vm_logs(request).await?.into_inner();
    let (mut head, mut tail, mut left_out) = (Vec::new(), Vec::new(), 0_usize);
    while let Some(message) = stream.message().await? {
        let room = HEAD.saturating_sub(head.len()).min(message.data.len());
        let (first, rest) = message.data.split_at(room);
        head.extend_from_slice(first);
        tail.extend_from_slice(rest);
        let surplus = tail.len().saturating_sub(TAIL);
        left_out += surplus;
        drop(tail.drain(..surplus));
    }
    if left_out > 0 {
        head.extend_from_slice(format!("\n[{left_out} bytes left out]\n").as_bytes());
    }
    head.extend(tail);
    Ok(head)
}

/// Files of the archive, and reasons for missing ones.
#[derive(Default)]
struct Parts {
    files: Vec<(String, Vec<u8>)>,
    missing: Vec<String>,
}

impl Parts {
    fn bytes(&mut self, name: &str, content: Result<Vec<u8>>) {
        match content {
            Ok(content) => self.files.push((name.to_owned(), content)),
            Err(failure) => self.missing.push(format!("{name}: {failure}")),
        }
    }

    fn json(&mut self, name: &str, json: Result<serde_json::Value>) {
        self.bytes(name, json.map(|json| format!("{json:#}\n").into_bytes()));
    }

    fn message<T: Serialize>(&mut self, name: &str, message: Result<T>) {
        self.json(name, message.and_then(|message| emit::json(&message)));
    }

    /// Adds a README about the archive; returns the reasons for missing files.
    fn finish(&mut self) -> Vec<String> {
        let missing = std::mem::take(&mut self.missing);
        let mut text = format!(
            "vmmctl {}, {}\n",
            env!("CARGO_PKG_VERSION"),
            jiff::Timestamp::now()
        );
        for line in &missing {
            text.push_str(&format!("left out: {line}\n"));
        }
        self.files.push(("README".to_owned(), text.into_bytes()));
        missing
    }
}

fn write(file: File, vm: &str, parts: &[(String, Vec<u8>)]) -> io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
    for (name, content) in parts {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now);
        archive.append_data(&mut header, format!("{vm}/{name}"), content.as_slice())?;
    }
    let mut file = archive.into_inner()?.finish()?;
    file.flush()
}
