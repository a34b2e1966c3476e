//! Lists and watches of all kinds of objects: they have a [`Registry`] each.

mod answer;
mod list;
mod watch;

use std::sync::Arc;

use prost::Message;
use vmmd_api::v1::{ObjectMetadata, WatchEventType};

pub use self::{
    answer::{finished, get},
    list::{Wanted, list},
    watch::{Stream, watch},
};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    feed::Position,
    registry::{Kind, Record as _, Registry, Seen},
};

use super::{cursor::Cursor, filter::Filter, mask::Mask};
use crate::host::Host;

/// A kind of objects with a service.
pub trait Served: Kind {
    /// The message of the API.
    type Object: Message + Default + Send;
    /// Most bytes of the [known](Self::known) parts in an answer of more than one object. gRPC clients take at most 4 MiB
    /// by default.
    const MAX_BYTES: usize = 1 << 20;

    /// The objects.
    fn registry(host: &Host) -> &Registry<Self>;

    /// Returns an object without the fields that only its file provides.
    fn known(host: &Host, seen: &Seen<Self>) -> Self::Object;

    /// Objects as they are now; `known` has what [`Self::known`] returns of each.
    fn look_at(
        _: &Arc<Host>,
        _: Vec<Arc<Seen<Self>>>,
        known: Vec<Self::Object>,
    ) -> impl Future<Output = Result<Vec<Self::Object>, Failure>> + Send {
        std::future::ready(Ok(known))
    }

    /// Whether a filter selects an object.
    fn matches(filter: &Filter, seen: &Seen<Self>) -> bool {
        filter.matches_object(Some(&seen.record.metadata()))
    }

    /// An object with the fields that a client wants.
    fn masked(object: Self::Object, _: &Mask) -> Self::Object {
        object
    }
}

/// A kind of objects with a watch.
pub trait Watched: Served {
    /// The event of its watch.
    type Event: Send;

    /// An object that is gone.
    fn gone(metadata: ObjectMetadata) -> Self::Object;

    /// An event.
    fn event(kind: WatchEventType, object: Option<Self::Object>, cursor: String) -> Self::Event;
}

/// A cursor of lists and watches.
fn cursor<K: Served>(host: &Host, position: Position, filter: &Filter) -> Cursor {
    let nonce = K::registry(host).nonce(position.run).unwrap_or_default();
    Cursor::new(nonce, position, filter)
}
