//! Lists and watches of any kind of named objects with an order of changes.

mod list;
mod shared;
mod watch;

use std::sync::Arc;

use prost::Message;
use vmmd_api::v1::{ObjectMetadata, WatchEventType};

pub use self::{
    list::{Wanted, list},
    shared::Shared,
    watch::{Stream, watch},
};
use vmmd_host::failure::Failure;
use vmmd_objects::feed::{Buried, Expired, Position};

use super::{cursor::Cursor, filter::Filter};
use crate::host::Host;

/// One kind of objects.
pub trait Kind: Send + Sync + 'static {
    /// Name that distinguishes cursors of this kind from those of other kinds.
    const NAME: &'static str;
    /// An object at a time, as the daemon has it.
    type Seen: Kept;
    /// The message of the API.
    type Object: Message + Default + Send;
    /// The event of its watch.
    type Event: Send;

    /// Objects after a name.
    fn after(host: &Host, name: Option<&str>) -> Snapshot<Self::Seen>;
    /// Deletions since a position, and all objects.
    fn since(host: &Host, position: Position) -> Result<(Vec<Buried>, Snapshot<Self::Seen>), Expired>;
    /// Where the last change is.
    fn position(host: &Host) -> Position;
    /// Wakes up with each change.
    fn news(host: &Host) -> tokio::sync::watch::Receiver<u64>;
    /// Nonce that distinguishes a run of the daemon from runs of other stores, if the run is known.
    fn nonce(host: &Host, run: u64) -> Option<u64>;
    /// Objects as they are now.
    fn look_at(
        host: &Arc<Host>,
        seen: Vec<Arc<Self::Seen>>,
    ) -> impl Future<Output = Result<Vec<Self::Object>, Failure>> + Send;
    /// Returns an object without the fields that only its file provides.
    fn known(seen: &Self::Seen) -> Self::Object;
    /// An object that is gone.
    fn buried(metadata: ObjectMetadata) -> Self::Object;
    /// An event.
    fn event(kind: WatchEventType, object: Option<Self::Object>, cursor: String) -> Self::Event;
}

/// An object at a time.
pub trait Kept: Clone + Send + Sync + 'static {
    /// UUID.
    fn uid(&self) -> &[u8];
    /// Name and labels.
    fn metadata(&self) -> ObjectMetadata;
    /// Run and revision at which it was made.
    fn made(&self) -> (u64, u64);
    /// Of this state.
    fn revision(&self) -> u64;
}

/// Objects at a time.
#[derive(Clone, Debug)]
pub struct Snapshot<S> {
    /// Sorted by name.
    pub objects: Vec<Arc<S>>,
    /// Which time.
    pub at: Position,
}

impl<S> Snapshot<S> {
    /// One of new objects.
    pub fn of(objects: Vec<S>, at: Position) -> Self {
        Self {
            objects: objects.into_iter().map(Arc::new).collect(),
            at,
        }
    }
}

/// A cursor of lists and watches.
fn cursor<K: Kind>(host: &Host, position: Position, filter: &Filter) -> Cursor {
    let nonce = K::nonce(host, position.run).unwrap_or_default();
    Cursor::at(nonce, position, filter)
}
