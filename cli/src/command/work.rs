//! Work on several things side by side, and ^C during a call: the daemon's work continues, and the user is notified.

use std::{collections::BTreeSet, future::Future, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, task::JoinSet};
use vmmd_api::v1;

use crate::{
    client::{Client, call},
    failure::{Code, Failure, Result},
};

/// Number of VMs to work on at a time. The daemon starts this many at once; more would wait there.
pub const AT_ONCE: usize = 16;

/// Runs `work` for each of `items`, for at most `limit` of them at a time. Passes each result to `done` in the order of the
/// items, as soon as it and all earlier results have arrived; stops when `done` fails.
pub async fn side_by_side<T, R, F>(
    items: Vec<T>,
    limit: usize,
    work: impl Fn(T) -> F,
    mut done: impl FnMut(R) -> Result<()>,
) -> Result<()>
where
    R: Send + 'static,
    F: Future<Output = R> + Send + 'static,
{
    let room = Arc::new(Semaphore::new(limit));
    let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let mut tasks = JoinSet::new();
    for (index, item) in items.into_iter().enumerate() {
        let (room, task) = (Arc::clone(&room), work(item));
        tasks.spawn(async move {
            // The semaphore is never closed, so a permit always becomes available.
            let _permit = room.acquire().await;
            (index, task.await)
        });
    }
    let mut next = 0;
    while let Some(ended) = tasks.join_next().await {
        let (index, result) = match ended {
            Ok(ended) => ended,
            // Tasks are never aborted, so the task has panicked: a bug, reported as a panic.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        if let Some(place) = results.get_mut(index) {
            *place = Some(result);
        }
        while let Some(result) = results.get_mut(next).and_then(Option::take) {
            next += 1;
            done(result)?;
        }
    }
    Ok(())
}

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
            for line in continuing(client).await {
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
            eprintln!("the operation continues; {hint}");
            std::process::exit(INTERRUPTED)
        }
    }
}

/// Returns a line for each continuing operation.
async fn continuing(client: &Client) -> Vec<String> {
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
        let text = "operations that vmmd has begun continue";
        return vec![
            Failure::new(Code::Other, text)
                .hint("`vmmctl get operation` shows them")
                .to_string(),
        ];
    };
    let ours = listed
        .operations
        .into_iter()
        .filter(|operation| ids.contains(&operation.request_id));
    let lines: Vec<_> = ours.map(|operation| line(&operation)).collect();
    if lines.is_empty() {
        return vec![
            "operations that vmmd has begun continue; `vmmctl get vm` shows their results".to_owned(),
        ];
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
        "{subject} continues; `vmmctl get operation {id} -w` follows it, `vmmctl operation cancel {id}` ends it"
    )
}

#[cfg(test)]
mod tests {
    use std::{
        cell::RefCell,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[tokio::test]
    async fn results_come_in_order_within_the_limit() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let seen = RefCell::new(Vec::new());
        let work = |item: usize| async move {
            let running = RUNNING.fetch_add(1, Ordering::SeqCst) + 1;
            MOST.fetch_max(running, Ordering::SeqCst);
            // Later ones end first.
            for _ in 0..100 - item {
                tokio::task::yield_now().await;
            }
            RUNNING.fetch_sub(1, Ordering::SeqCst);
            item
        };
        let done = |item| {
            seen.borrow_mut().push(item);
            Ok(())
        };
        side_by_side((0..50).collect(), 7, work, done).await.unwrap();
        assert_eq!(seen.into_inner(), (0..50).collect::<Vec<_>>());
        assert_eq!(MOST.load(Ordering::SeqCst), 7);
    }
}
