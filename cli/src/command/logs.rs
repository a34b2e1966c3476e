//! `logs`: what a guest, or its vmm, has written.

use std::io::{self, Write as _};

use proto::v1::{self, VmLog, console_request, console_response};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    args::observe::Logs,
    client::{Client, about_vm},
    failure::{Failure, Result},
    output::write_failed,
};

/// Prints a log as it is.
pub async fn logs(client: &Client, args: &Logs) -> Result<()> {
    if args.follow && !args.vmm {
        return follow_serial(client, &args.name).await;
    }
    let request = v1::GetVmLogsRequest {
        name: args.name.clone(),
        log: if args.vmm { VmLog::Vmm } else { VmLog::Serial }.into(),
        previous: args.previous,
        follow: args.follow,
        tail_bytes: 0,
    };
    let failed = |status: tonic::Status| about_vm(Failure::from(status), &args.name);
    let stream = client.vms.clone().get_vm_logs(request).await.map_err(failed)?;
    let mut stream = stream.into_inner();
    while let Some(message) = stream.message().await.map_err(failed)? {
        print(&message.data)?;
    }
    Ok(())
}

/// The console without input: what it has kept, and what comes.
async fn follow_serial(client: &Client, name: &str) -> Result<()> {
    let open = v1::ConsoleOpen {
        name: name.to_owned(),
        no_replay: false,
    };
    let (requests, queue) = mpsc::channel(1);
    let open = v1::ConsoleRequest {
        message: Some(console_request::Message::Open(open)),
    };
    // There is room for one.
    let _ = requests.try_send(open);
    let failed = |status: tonic::Status| about_vm(Failure::from(status), name);
    let stream = client
        .vms
        .clone()
        .console(ReceiverStream::new(queue))
        .await
        .map_err(failed)?;
    let mut stream = stream.into_inner();
    while let Some(message) = stream.message().await.map_err(failed)? {
        match message.message {
            Some(console_response::Message::Output(bytes)) => print(&bytes)?,
            Some(console_response::Message::Closed(_)) => break,
            Some(console_response::Message::Opened(_)) | None => {}
        }
    }
    drop(requests);
    Ok(())
}

fn print(bytes: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(bytes).and_then(|()| stdout.flush());
    written.map_err(|error| write_failed(&error))
}
