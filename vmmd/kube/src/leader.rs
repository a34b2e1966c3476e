//! Which of several controllers works: the one that holds a Lease (coordination.k8s.io/v1).
//!
//! Times of other machines are not compared with this one's: a lease is free when its record has not changed for its length by this machine's
//! clock. A holder that could not renew it in time ends its work before another one can begin.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, api::PostParams};
use tokio::time::Instant;

/// How long a lease lasts that is not renewed.
const LENGTH: Duration = Duration::from_secs(15);
/// After that time without a renewal its holder ends its work.
const GIVE_UP: Duration = Duration::from_secs(10);
/// How often it is renewed, and looked at.
const PERIOD: Duration = Duration::from_secs(2);

/// A lease that this process wants.
pub struct Leadership {
    leases: Api<Lease>,
    name: String,
    identity: String,
}

/// Last observed change of another holder's record.
struct Watched {
    version: Option<String>,
    since: Instant,
}

impl Leadership {
    /// For the lease with this name; `identity` is this process's own.
    pub fn new(leases: Api<Lease>, name: &str, identity: &str) -> Self {
        Self {
            leases,
            name: name.to_owned(),
            identity: identity.to_owned(),
        }
    }

    /// Returns when this process holds the lease.
    pub async fn acquire(&self) {
        let mut watched = Watched {
            version: None,
            since: Instant::now(),
        };
        loop {
            match self.attempt(&mut watched).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::warn!("lease {}: {error}", self.name),
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Renews the lease. Returns when that was not possible in time, or somebody else has it.
    pub async fn hold(&self) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(PERIOD).await;
            let left = GIVE_UP.saturating_sub(renewed.elapsed());
            let began = Instant::now();
            match tokio::time::timeout(left, self.renew()).await {
                Ok(Ok(true)) => renewed = began,
                Ok(Ok(false)) => return,
                Ok(Err(error)) => tracing::warn!("lease {}: {error}", self.name),
                Err(_) => {}
            }
            if renewed.elapsed() >= GIVE_UP {
                return;
            }
        }
    }

    /// Gives the lease back, so that another controller need not wait for its end.
    pub async fn release(&self) {
        let Ok(Some(mut lease)) = self.leases.get_opt(&self.name).await else {
            return;
        };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() == Some(&self.identity) {
            spec.holder_identity = None;
            let _ = self
                .leases
                .replace(&self.name, &PostParams::default(), &lease)
                .await;
        }
    }

    async fn attempt(&self, watched: &mut Watched) -> kube::Result<bool> {
        let Some(lease) = self.leases.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(self.name.clone()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.spec(0)),
            };
            return won(self.leases.create(&PostParams::default(), &lease).await);
        };
        let version = lease.metadata.resource_version.clone();
        if watched.version != version {
            *watched = Watched {
                version,
                since: Instant::now(),
            };
        }
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let length = u64::try_from(spec.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
        let length = LENGTH.max(Duration::from_secs(length));
        if may_take(holder, &self.identity, watched.since.elapsed(), length) {
            self.write(lease).await
        } else {
            Ok(false)
        }
    }

    async fn renew(&self) -> kube::Result<bool> {
        let lease = self.leases.get(&self.name).await?;
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_ref());
        if holder != Some(&self.identity) {
            return Ok(false);
        }
        self.write(lease).await
    }

    /// Over the version that was read.
    async fn write(&self, mut lease: Lease) -> kube::Result<bool> {
        let old = lease.spec.take().unwrap_or_default();
        let mine = old.holder_identity.as_ref() == Some(&self.identity);
        let transitions = old.lease_transitions.unwrap_or_default();
        let mut spec = self.spec(if mine {
            transitions
        } else {
            transitions.saturating_add(1)
        });
        if mine {
            spec.acquire_time = old.acquire_time;
        }
        lease.spec = Some(spec);
        won(self
            .leases
            .replace(&self.name, &PostParams::default(), &lease)
            .await)
    }

    fn spec(&self, transitions: i32) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(LENGTH.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

fn may_take(holder: &str, identity: &str, unchanged: Duration, length: Duration) -> bool {
    holder.is_empty() || holder == identity || unchanged > length
}

/// A conflict says that somebody else was first.
fn won<T>(written: kube::Result<T>) -> kube::Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_when_it_is_free_own_or_was_not_renewed() {
        let short = Duration::from_secs(3);
        let long = Duration::from_secs(16);
        for (holder, unchanged, may) in [
            ("", short, true),
            ("me", short, true),
            ("other", short, false),
            ("other", LENGTH, false),
            ("other", long, true),
        ] {
            assert_eq!(
                may_take(holder, "me", unchanged, LENGTH),
                may,
                "{holder} {unchanged:?}"
            );
        }
    }
}
