//! Values that cost something to find out: found out once for all clients that ask at the same time.

use std::{future::Future, time::Duration};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

/// A value that is looked at when a client asks. The client gets a value of a look that began after it asked. Looks follow one another, and the
/// beginnings of two are at least a pace apart. So the cost does not grow with the number of clients.
#[derive(Debug)]
pub struct Paced<T> {
    pace: Duration,
    /// Begin of the last look-up, and its result.
    last: Mutex<Option<(Instant, T)>>,
}

impl<T: Clone> Paced<T> {
    /// One that was never looked at.
    pub fn new(pace: Duration) -> Self {
        Self {
            pace,
            last: Mutex::default(),
        }
    }

    /// The value as it is now, or a moment later.
    pub async fn get<F: Future<Output = T>>(&self, look: impl FnOnce() -> F) -> T {
        let since = Instant::now();
        let mut last = self.last.lock().await;
        if let Some((began, value)) = last.as_ref() {
            if *began > since {
                return value.clone();
            }
            sleep_until(*began + self.pace).await;
        }
        let began = Instant::now();
        let value = look().await;
        *last = Some((began, value.clone()));
        value
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use super::*;

    #[tokio::test]
    async fn many_who_ask_at_once_cost_two_looks() {
        let paced = Arc::new(Paced::new(Duration::ZERO));
        let looks = Arc::new(AtomicU32::new(0));
        let mut asking = tokio::task::JoinSet::new();
        for _ in 0..1000 {
            let (paced, looks) = (Arc::clone(&paced), Arc::clone(&looks));
            asking.spawn(async move {
                let asked = looks.load(Ordering::SeqCst);
                let look = || async {
                    let number = looks.fetch_add(1, Ordering::SeqCst) + 1;
                    // Others ask meanwhile.
                    tokio::task::yield_now().await;
                    number
                };
                let got = paced.get(look).await;
                assert!(got > asked, "look {got} began before it was asked for");
            });
        }
        asking.join_all().await;
        assert!(looks.load(Ordering::SeqCst) <= 2, "{looks:?}");
    }

    #[tokio::test]
    async fn looks_of_one_who_asks_again_and_again_keep_the_pace() {
        let pace = Duration::from_millis(20);
        let paced = Paced::new(pace);
        let begin = Instant::now();
        for _ in 0..4 {
            paced.get(|| async {}).await;
        }
        assert!(begin.elapsed() >= 3 * pace);
    }
}
