//! Tasks that are done one after the other.

use tokio::sync::oneshot;

/// A row of tasks that are done one after the other, in the order in which they were put into it.
#[derive(Debug, Default)]
pub struct Row(Option<oneshot::Receiver<()>>);

/// The place of a task; the next one follows when it is dropped.
#[derive(Debug)]
pub struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _next: oneshot::Sender<()>,
}

impl Row {
    /// A place behind all others.
    pub fn join(&mut self) -> Turn {
        let (next, after) = oneshot::channel();
        Turn {
            before: self.0.replace(after),
            _next: next,
        }
    }
}

impl Turn {
    /// Waits until those before have ended.
    pub async fn come(&mut self) {
        if let Some(before) = self.before.take() {
            // It never sends, it is dropped.
            let _ = before.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tasks_of_a_row_keep_their_order() {
        let mut row = Row::default();
        let (mut first, mut second, mut third) = (row.join(), row.join(), row.join());
        let done = std::sync::Mutex::new(Vec::new());
        let of = |number| done.lock().unwrap().push(number);
        tokio::join!(
            async {
                third.come().await;
                of(3);
                drop(third);
            },
            async {
                second.come().await;
                of(2);
                drop(second);
            },
            async {
                first.come().await;
                tokio::task::yield_now().await;
                of(1);
                drop(first);
            },
        );
        assert_eq!(*done.lock().unwrap(), [1, 2, 3]);
    }
}
