//! Cursors of lists and watches: a place in the order of changes, of which store, for which objects.

use std::{fmt, str::FromStr};

use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::feed::Position;

use super::filter::Filter;

/// A cursor. Clients see it as text that means nothing to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Distinguishes the daemon's run from runs of other stores.
    nonce: u64,
    /// Everything up to here has been told.
    position: Position,
    /// Hash of the filter.
    filter: u64,
}

impl Cursor {
    /// Cursor at `position` of the objects that `filter` selects; `nonce` is that of the position's run.
    pub fn new(nonce: u64, position: Position, filter: &Filter) -> Self {
        Self {
            nonce,
            position,
            filter: filter.hash(),
        }
    }

    /// Reads the cursor in a request, of the field `field`. One of another filter is refused: it says nothing of the other
    /// objects.
    pub fn read(field: &str, text: &str, filter: &Filter) -> Result<Self, Failure> {
        let Ok(cursor) = text.parse::<Self>() else {
            return Err(Failure::field(field, "is none: give one exactly as it came"));
        };
        if cursor.filter != filter.hash() {
            let problem = "is of a list or watch with another filter: give the same filter, or start again without a cursor";
            return Err(Failure::field(field, problem));
        }
        Ok(cursor)
    }

    /// Reads a page token: the first page's cursor and the last name.
    pub fn read_token(token: &str, filter: &Filter) -> Result<(Self, String), Failure> {
        let (cursor, name) = token.rsplit_once('.').unwrap_or((token, ""));
        Ok((Self::read("pageToken", cursor, filter)?, name.to_owned()))
    }

    /// Where it is, if that is a place of the store whose runs have these numbers.
    pub fn position(&self, nonce: impl FnOnce(u64) -> Option<u64>) -> Result<Position, Failure> {
        if nonce(self.position.run) == Some(self.nonce) {
            Ok(self.position)
        } else {
            Err(expired())
        }
    }
}

/// Refusal of a cursor whose later changes are unknown.
pub fn expired() -> Failure {
    let message = "the cursor is of another node, or older than what the node remembers: list the objects and watch from the \
                   cursor of that list, or watch without one";
    Failure::new(Kind::OutOfRange, "CURSOR_EXPIRED", message)
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position {
            run,
            revision,
            buried,
        } = self.position;
        let Self { nonce, filter, .. } = self;
        write!(f, "{nonce:016x}.{run:x}.{revision:x}.{buried:x}.{filter:016x}")
    }
}

impl FromStr for Cursor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split('.').map(|part| {
            let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            u64::from_str_radix(part, 16).ok().filter(|_| digits)
        });
        let mut next = || parts.next().flatten().ok_or(());
        let nonce = next()?;
        let position = Position {
            run: next()?,
            revision: next()?,
            buried: next()?,
        };
        let filter = next()?;
        match parts.next() {
            None => Ok(Self {
                nonce,
                position,
                filter,
            }),
            Some(_) => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn a_cursor_is_read_as_it_was_written(numbers in proptest::array::uniform5(proptest::num::u64::ANY)) {
            let [nonce, run, revision, buried, filter] = numbers;
            let cursor = Cursor { nonce, position: Position { run, revision, buried }, filter };
            proptest::prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }

        #[test]
        fn any_other_text_is_refused(text in "[0-9a-f.+-]{0,40}") {
            if let Ok(cursor) = text.parse::<Cursor>() {
                proptest::prop_assert_eq!(text.split('.').count(), 5);
                proptest::prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
            }
        }
    }
}
