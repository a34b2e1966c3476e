//! Handling of ^C during a call: the daemon's work continues, and the user is notified.

use std::{collections::BTreeSet, future::Future, time::Duration};

use vmmd_api::v1;

use crate::{
    client::{Client, call},
    failure::{Code, Failure},
};

/// Time limit for the list of continuing operations.
const LOOK: Duration = Duration::from_secs(2);
/// As the shell reports a program that SIGINT ended.
const INTERRUPTED: i32 = 130;

/// Runs `work`. On an interrupt by the user, reports the operations that continue in the daemon,
/// and ends the program.
pub async fn guarded<T>(client: &Client, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        Ok(()) = tokio::signal::ctrl_c() => {
            for line in goes_on(client).await {
                eprintln!("{line}");
            }
            std::process::exit(INTERRUPTED)
        }
    }
}

/// Follows a known operation. On an interrupt by the user, reports that the operation continues,
/// and ends the program.
pub async fn guarded_operation<T>(hint: &str, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        Ok(()) = tokio::signal::ctrl_c() => {
            eprintln!("it goes on; {hint}");
            std::process::exit(INTERRUPTED)
        }
    }
}

/// Returns a line for each continuing operation.
async fn goes_on(client: &Client) -> Vec<String> {
    let ids: BTreeSet<_> = client.under_way().into_iter().collect();
    if ids.is_empty() {
        return Vec::new();
    }
    let active = v1::OperationFilter {
        active: true,
        ..Default::default()
    };
    let request = v1::ListOperationsRequest {
        filter: Some(active),
        ..Default::default()
    };
    let listed = call(LOOK, client.operations.clone().list_operations(request)).await;
    let Ok(listed) = listed else {
        let text = "what vmmd has begun goes on";
        return vec![
            Failure::new(Code::Other, text)
                .hint("`vmmctl get operation` shows it")
                .to_string(),
        ];
    };
    let ours = listed
        .operations
        .into_iter()
        .filter(|operation| ids.contains(&operation.request_id));
    let lines: Vec<_> = ours.map(|operation| line(&operation)).collect();
    if lines.is_empty() {
        return vec!["what vmmd has begun goes on; `vmmctl get vm` shows what came of it".to_owned()];
    }
    lines
}

fn line(operation: &v1::Operation) -> String {
    let what = match operation.r#type.split_once('.') {
        Some((_, "delete")) => "deletion",
        Some((_, verb)) => verb,
        None => "operation",
    };
    let target = operation.target.clone().unwrap_or_default();
    let subject = match target.name.as_str() {
        "" => format!("the {what}"),
        name => format!("the {what} of {}/{name}", target.kind.to_lowercase()),
    };
    let id = &operation.id;
    format!(
        "{subject} goes on; `vmmctl get operation {id} -w` follows it, `vmmctl operation cancel {id}` ends it"
    )
}
