//! Work on several things side by side.

use std::{future::Future, sync::Arc};

use tokio::{sync::Semaphore, task::JoinSet};

use crate::failure::Result;

/// How many VMs are worked on at a time. The daemon starts as many at once; more would wait there.
pub const AT_ONCE: usize = 16;

/// Does `work` to each of `items`, to at most `limit` of them at a time. Gives each result to `done`, in the order of the
/// items, as soon as it and those before it are there; stops when `done` fails.
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

#[cfg(test)]
mod tests {
    use std::{
        cell::RefCell,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[tokio::test]
    async fn results_come_in_order_and_no_more_than_the_limit_run_at_a_time() {
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
