//! Answers with one object.

use std::sync::Arc;

use vmmd_api::v1;
use vmmd_host::failure::{self, Failure};
use vmmd_objects::{operation::Begun, registry::Seen};

use super::Served;
use crate::host::Host;

/// The object of a name, as it is now.
pub async fn get<K: Served>(host: &Arc<Host>, name: &str) -> Result<K::Object, Failure> {
    now::<K>(host, K::registry(host).see(name)?).await
}

/// Waits for the end of the operation unless `no_wait`. Returns the object in its new state.
pub async fn finished<K: Served>(
    host: &Arc<Host>,
    Begun { uid, pending }: Begun,
    no_wait: bool,
) -> Result<(K::Object, Option<v1::Operation>), Failure> {
    if let Some(pending) = pending.clone().filter(|_| !no_wait) {
        tokio::select! {
            ended = pending.ended() => drop(ended?),
            () = host.stopping.cancelled() => return Err(Failure::stopping()),
        }
    }
    if no_wait && pending.is_some() {
        host.operations.recorded().await;
    }
    let operation = pending.map(|pending| pending.operation());
    let seen = K::registry(host).find(&uid).ok_or_else(|| {
        let message = format!("the {} was deleted meanwhile", K::NAME);
        Failure::new(failure::Kind::NotFound, K::NOT_FOUND, message)
    })?;
    Ok((now::<K>(host, seen).await?, operation))
}

async fn now<K: Served>(host: &Arc<Host>, seen: Arc<Seen<K>>) -> Result<K::Object, Failure> {
    let known = vec![K::known(host, &seen)];
    let mut objects = K::look_at(host, vec![seen], known).await?;
    Ok(objects.pop().unwrap_or_default())
}
