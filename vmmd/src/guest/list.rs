//! Lists in answers of agents.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};

/// The first `N` elements of a list. The others take no memory.
#[derive(Debug)]
pub struct First<T, const N: usize> {
    /// The elements.
    pub items: Vec<T>,
    /// The list has more elements.
    pub more: bool,
}

impl<T, const N: usize> Default for First<T, N> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            more: false,
        }
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for First<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T, const N: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for Elements<T, N> {
            type Value = First<T, N>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut first = First::default();
                while first.items.len() < N {
                    match list.next_element()? {
                        Some(item) => first.items.push(item),
                        None => return Ok(first),
                    }
                }
                while list.next_element::<IgnoredAny>()?.is_some() {
                    first.more = true;
                }
                Ok(first)
            }
        }

        deserializer.deserialize_seq(Elements(PhantomData))
    }
}
