//! `get operation` and `operation cancel`.

use vmmd_api::v1::{self, OperationPhase};

use crate::{
    args::{Output, kind::GetOperation},
    client::{self, Client, QUICK, WORK, call, empty_answer, over_restarts, watch_ended},
    failure::{Code, Failure, Result},
    manifest::{emit, schema},
    output::{
        self,
        format::{self, Document, Layout},
        operation,
        table::Table,
    },
};

/// Lists operations, or shows one, and its changes.
pub async fn get(client: &Client, args: &GetOperation) -> Result<()> {
    let Some(id) = &args.id else {
        let of = |kind: &str, name: &Option<String>| name.as_ref().map(|name| client::reference(kind, name));
        let filter = v1::OperationFilter {
            target: of("Vm", &args.vm).or_else(|| of("Disk", &args.disk)),
            active: args.active,
            ..Default::default()
        };
        let operations = client.operations(filter).await?;
        let layout = Layout {
            list: true,
            no_headers: args.no_headers,
            ..Layout::default()
        };
        if operations.is_empty() && documents(args).is_none() {
            eprintln!("There are no operations.");
            return Ok(());
        }
        return print(&operations, args, layout, &mut operation::table());
    };
    let layout = Layout {
        no_headers: args.no_headers,
        stream: args.watch,
        ..Layout::default()
    };
    if !args.watch {
        let request = v1::GetOperationRequest { id: id.clone() };
        let response = call(WORK, client.operations.clone().get_operation(request)).await;
        let found = response.map_err(|failure| about(failure, id))?.operation;
        return print(
            &[found.ok_or_else(empty_answer)?],
            args,
            layout,
            &mut operation::table(),
        );
    }
    let (mut layout, mut table) = (layout, operation::table());
    let ended = follow(client, id, |seen| {
        print(std::slice::from_ref(seen), args, layout, &mut table)?;
        layout.no_headers = true;
        Ok(())
    });
    outcome(ended.await?).map(drop)
}

/// The output, unless it is a table.
fn documents(args: &GetOperation) -> Option<&Output> {
    args.output.as_ref().filter(|output| **output != Output::Wide)
}

fn print(operations: &[v1::Operation], args: &GetOperation, layout: Layout, table: &mut Table) -> Result<()> {
    let Some(output) = documents(args) else {
        let now = jiff::Timestamp::now();
        let rows: Vec<_> = operations.iter().map(|each| operation::row(each, now)).collect();
        return output::print(&table.whole(&rows, !layout.no_headers));
    };
    let document = |operation: &v1::Operation| {
        Ok(Document {
            title: format!("operation/{}", operation.id),
            json: emit::json(operation)?,
            schema: schema::OPERATION,
        })
    };
    let documents: Vec<_> = operations.iter().map(document).collect::<Result<_>>()?;
    format::documents(&documents, output, layout)
}

/// Calls `seen` with an operation and after each of its changes, across restarts of the daemon; returns the ended operation.
pub async fn follow(
    client: &Client,
    id: &str,
    mut seen: impl FnMut(&v1::Operation) -> Result<()>,
) -> Result<v1::Operation> {
    let followed = over_restarts(false, async |tries: &mut u32| {
        let request = v1::WatchOperationRequest { id: id.to_owned() };
        let mut stream = call(QUICK, client.operations.clone().watch_operation(request)).await?;
        while let Some(change) = stream.message().await? {
            *tries = 0;
            let operation = change.operation.ok_or_else(empty_answer)?;
            seen(&operation)?;
            if has_ended(&operation) {
                return Ok(operation);
            }
        }
        Err(watch_ended())
    });
    followed.await.map_err(|failure| about(failure, id))
}

/// Waits for the end of an operation.
pub async fn until_ended(client: &Client, id: &str) -> Result<v1::Operation> {
    outcome(follow(client, id, |_| Ok(())).await?)
}

/// Whether the operation has ended.
pub fn has_ended(operation: &v1::Operation) -> bool {
    use OperationPhase::{Cancelled, Completed, Failed};
    matches!(operation.phase(), Completed | Failed | Cancelled)
}

/// An operation that has ended; a failure when it is not complete.
pub fn outcome(ended: v1::Operation) -> Result<v1::Operation> {
    let code = match ended.phase() {
        OperationPhase::Failed => Code::Other,
        OperationPhase::Cancelled => Code::Cancelled,
        _ => return Ok(ended),
    };
    let message = ended.error.map_or(ended.message, |error| error.message);
    Err(Failure::new(code, message).about("operation", &ended.id))
}

/// Ends an operation early.
pub async fn cancel(client: &Client, id: &str) -> Result<()> {
    let request = v1::CancelOperationRequest { id: id.to_owned() };
    // A repeated cancellation has the same effect.
    let response = client.again(client.limit(WORK), || {
        let (mut operations, request) = (client.operations.clone(), request.clone());
        async move { operations.cancel_operation(request).await }
    });
    let response = response.await;
    let ended = response.map_err(|failure| about(failure, id))?.operation;
    let ended = ended.ok_or_else(empty_answer)?;
    let how = match ended.phase() {
        OperationPhase::Cancelled => "cancelled",
        OperationPhase::Failed => "had failed",
        _ => "was complete",
    };
    let separator = if ended.message.is_empty() { "" } else { ": " };
    output::line(format!("operation/{id} {how}{separator}{}", ended.message))
}

fn about(failure: Failure, id: &str) -> Failure {
    let hint = "`vmmctl get operation` lists the known operations";
    match failure.code {
        Code::NotFound => failure.about("operation", id).hint(hint),
        _ => failure.about("operation", id),
    }
}
