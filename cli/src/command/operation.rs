//! `get operation` and `operation cancel`.

use proto::v1::{self, OperationPhase};

use crate::{
    args::operation::GetOperation,
    client::{Client, WORK, call, empty_answer},
    failure::{Code, Failure, Result},
    output::{self, operation},
};

/// Lists operations, or shows one, and its changes.
pub async fn get(client: &Client, args: &GetOperation) -> Result<()> {
    let now = jiff::Timestamp::now();
    let Some(id) = &args.id else {
        let request = v1::ListOperationsRequest {
            vm: args.vm.clone().unwrap_or_default(),
            active: args.active,
        };
        let operations = call(WORK, client.operations.clone().list_operations(request))
            .await?
            .operations;
        if operations.is_empty() {
            eprintln!("There are no operations.");
            return Ok(());
        }
        let rows: Vec<_> = operations.iter().map(|each| operation::row(each, now)).collect();
        return output::print(&operation::table().whole(&rows, !args.no_headers));
    };
    if !args.watch {
        let request = v1::GetOperationRequest { id: id.clone() };
        let response = call(WORK, client.operations.clone().get_operation(request)).await;
        let found = response.map_err(|failure| about(failure, id))?.operation;
        let row = operation::row(&found.ok_or_else(empty_answer)?, now);
        return output::print(&operation::table().whole(&[row], !args.no_headers));
    }
    let request = v1::WatchOperationRequest { id: id.clone() };
    let stream = client.operations.clone().watch_operation(request).await;
    let mut stream = stream.map_err(|status| about(status.into(), id))?.into_inner();
    let mut table = operation::table();
    let mut first = !args.no_headers;
    while let Some(seen) = stream.message().await? {
        let seen = seen.operation.ok_or_else(empty_answer)?;
        let row = operation::row(&seen, jiff::Timestamp::now());
        output::print(&table.whole(&[row], first))?;
        first = false;
        match seen.phase() {
            OperationPhase::Completed => return Ok(()),
            OperationPhase::Failed | OperationPhase::Cancelled => return Err(ended(seen)),
            _ => {}
        }
    }
    Err(Failure::new(Code::Unavailable, "vmmd ended the watch").hint("it may be restarting: try again"))
}

/// Ends one early.
pub async fn cancel(client: &Client, id: &str) -> Result<()> {
    let request = v1::CancelOperationRequest { id: id.to_owned() };
    let response = call(WORK, client.operations.clone().cancel_operation(request)).await;
    let ended = response.map_err(|failure| about(failure, id))?.operation;
    let ended = ended.ok_or_else(empty_answer)?;
    let how = match ended.phase() {
        OperationPhase::Cancelled => "cancelled",
        OperationPhase::Failed => "had failed",
        _ => "was complete",
    };
    let message = match ended.message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    output::line(format!("operation/{id} {how}{message}"))
}

fn ended(operation: v1::Operation) -> Failure {
    let message = operation.error.map_or(operation.message, |error| error.message);
    Failure::new(Code::Other, message).about("operation", &operation.id)
}

fn about(failure: Failure, id: &str) -> Failure {
    let hint = "`vmmctl get operation` lists those that are known";
    match failure.code {
        Code::NotFound => failure.about("operation", id).hint(hint),
        _ => failure.about("operation", id),
    }
}
