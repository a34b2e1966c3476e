//! Stored messages: types separate from the API's, so that a change of the API does not change the
//! stored form.
//!
//! Each message is declared with the type whose values it stores. Both conversions name every field
//! of both sides, so that a new field on either side does not compile until it is handled here.
//! Enums of the API are stored by their numbers, whose meaning the frozen API never changes.

mod probe;
mod record;
mod spec;

use std::collections::BTreeMap;

use vmmd_api::well_known;

pub use self::{
    record::{Metadata, Snapshot, Vm},
    spec::{AccessCredential, CloudInit, Credential, VmSpec},
};

/// From the type whose values are kept to the stored one, and back.
trait Mirror<T> {
    fn mirror(self) -> T;
}

macro_rules! as_it_is {
    ($($type:ty),* $(,)?) => {
        $(impl Mirror<$type> for $type {
            fn mirror(self) -> $type {
                self
            }
        })*
    };
}
use as_it_is;

as_it_is!(bool, i32, i64, u8, u32, u64, String);

impl<A: Mirror<B>, B> Mirror<Option<B>> for Option<A> {
    fn mirror(self) -> Option<B> {
        self.map(A::mirror)
    }
}

impl<A: Mirror<B>, B> Mirror<Vec<B>> for Vec<A> {
    fn mirror(self) -> Vec<B> {
        self.into_iter().map(A::mirror).collect()
    }
}

impl<K: Ord, A: Mirror<B>, B> Mirror<BTreeMap<K, B>> for BTreeMap<K, A> {
    fn mirror(self) -> BTreeMap<K, B> {
        let entries = self.into_iter();
        entries.map(|(key, value)| (key, value.mirror())).collect()
    }
}

/// A stored message with the fields of another type.
macro_rules! stored {
    ($(#[$doc:meta])* $name:ident of $of:path { $($(#[$attribute:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, prost::Message)]
        pub struct $name {
            $($(#[$attribute])* pub $field: $type,)*
        }

        impl crate::stored::Mirror<$name> for $of {
            fn mirror(self) -> $name {
                let $of { $($field),* } = self;
                $name { $($field: $field.mirror()),* }
            }
        }

        impl crate::stored::Mirror<$of> for $name {
            fn mirror(self) -> $of {
                let $name { $($field),* } = self;
                $of { $($field: $field.mirror()),* }
            }
        }

        impl From<$of> for $name {
            fn from(of: $of) -> Self {
                of.mirror()
            }
        }

        impl From<$name> for $of {
            fn from(stored: $name) -> Self {
                stored.mirror()
            }
        }
    };
}
use stored;

stored! {
    /// A point of Unix time.
    Timestamp of well_known::Timestamp {
        #[prost(int64, tag = "1")]
        seconds: i64,
        #[prost(int32, tag = "2")]
        nanos: i32,
    }
}

#[cfg(test)]
mod tests;
