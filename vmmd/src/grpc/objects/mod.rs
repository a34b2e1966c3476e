//! Lists and watches of all kinds of objects that have a [`Registry`].

mod answer;
mod list;
mod shared;
mod watch;

use std::sync::Arc;

use prost::Message;
use vmmd_api::v1::{ObjectMetadata, WatchEventType};

pub use self::{
    answer::{finished, get},
    list::{Wanted, list},
    shared::Shared,
    watch::{Stream, watch},
};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    feed::Position,
    registry::{Kind, Registry, Seen},
};

use super::{cursor::Cursor, filter::Filter};
use crate::host::Host;

/// A kind of objects with a service.
pub trait Served: Kind {
    /// The message of the API.
    type Object: Message + Default + Send;
    /// The event of its watch.
    type Event: Send;

    /// The objects.
    fn registry(host: &Host) -> &Registry<Self>;
    /// Objects as they are now.
    fn look_at(
        host: &Arc<Host>,
        seen: Vec<Arc<Seen<Self>>>,
    ) -> impl Future<Output = Result<Vec<Self::Object>, Failure>> + Send;
    /// Returns an object without the fields that only its file provides.
    fn known(host: &Host, seen: &Seen<Self>) -> Self::Object;
    /// An object that is gone.
    fn gone(metadata: ObjectMetadata) -> Self::Object;
    /// An event.
    fn event(kind: WatchEventType, object: Option<Self::Object>, cursor: String) -> Self::Event;
}

/// A cursor of lists and watches.
fn cursor<K: Served>(host: &Host, position: Position, filter: &Filter) -> Cursor {
    let nonce = K::registry(host).nonce(position.run).unwrap_or_default();
    Cursor::at(nonce, position, filter)
}
