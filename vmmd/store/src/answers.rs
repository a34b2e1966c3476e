//! Answers of requests: a retry of a request that succeeded gets its answer from here.
//!
//! Always:
//! - An answer, its place in the order of its caller's answers, and the sums of its caller and of all callers change in one transaction.
//! - The answers of each caller, and those of all callers, have at most the number and bytes of [`LIMITS`] when a transaction ends. The
//!   oldest answers of the caller that exceeds its share are removed, so that no caller can fill the state's file system or remove the
//!   answers of another caller that stays within its share.

use std::ops::Bound;

use prost::Message;
use redb::{Database, ReadableDatabase as _, ReadableTable as _, WriteTransaction};
use vmmd_host::text;

use super::{Error, Table};

/// For how long an answer is kept, in milliseconds: a day.
pub const REQUEST_AGE_MS: u64 = 24 * 3600 * 1000;
/// Most answers that are removed because of their age together with the arrival of another.
const AGED_AT_ONCE: u64 = 16;
/// The same when the store is opened.
const AGED_AT_START: u64 = 10_000;
/// With the arrival of an answer, the answers of so many other callers are checked for their age: of those behind its caller in the order
/// of names, where the first name follows the last. So each caller that is gone is behind one that is not.
const OTHERS_AT_ONCE: usize = 4;

/// By caller and id ([`RequestKey`]).
const REQUESTS: Table = Table::new("requests");
/// The order of a caller's answers: by caller, a NUL, and a big-endian number that grows; the time of the answer (Unix time in milliseconds,
/// big-endian), then the key in [`REQUESTS`].
const ORDER: Table = Table::new("requests_by_caller");
/// A [`Sum`] for each caller that has answers, and one for [`EVERYBODY`].
const SUMS: Table = Table::new("request_sums");
/// No caller has a NUL in it.
const EVERYBODY: &str = "\0";
/// Most answers and bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    pub count: u64,
    pub bytes: u64,
}

impl Limit {
    fn is_exceeded(self, sum: &Sum) -> bool {
        sum.count > self.count || sum.bytes > self.bytes
    }
}

/// The limits of one caller, and of all callers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub caller: Limit,
    pub all: Limit,
}

/// An answer has some 300 bytes, since it names its object instead of showing it. So a caller that makes 13 changes a second, all the time, has
/// the answers of the last hour. All answers together take 64 MiB, in a file of at most about twice that size.
pub(super) const LIMITS: Limits = Limits {
    caller: Limit {
        count: 50_000,
        bytes: 16 << 20,
    },
    all: Limit {
        count: 200_000,
        bytes: 64 << 20,
    },
};

/// A request that has been begun.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RequestMark {
    /// As the client gave it.
    #[prost(string, tag = "1")]
    pub id: String,
    /// "CreateVm".
    #[prost(string, tag = "2")]
    pub method: String,
    /// [`Key::fingerprint`](super::Key::fingerprint) of the SHA-256 of the request without its id.
    #[prost(bytes = "vec", tag = "6")]
    pub fingerprint: Vec<u8>,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "4")]
    pub begun_ms: u64,
    /// The caller that gave it: "uid:0", "cert:alice".
    #[prost(string, tag = "5")]
    pub caller: String,
}

impl RequestMark {
    /// The key of the request in the store: each caller has ids of its own.
    pub fn key(&self) -> RequestKey {
        RequestKey::new(&self.caller, &self.id)
    }
}

/// A request's caller and id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey(String);

impl RequestKey {
    /// The key for an id of a caller. Neither has a NUL in it.
    pub fn new(caller: &str, id: &str) -> Self {
        Self(format!("{caller}\0{id}"))
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// A request that succeeded.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RequestRecord {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub mark: Option<RequestMark>,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "2")]
    pub ended_ms: u64,
    /// The encoded response.
    #[prost(bytes = "vec", tag = "6")]
    pub response: Vec<u8>,
}

/// The number and size of the answers of a caller.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct Sum {
    #[prost(uint64, tag = "1")]
    count: u64,
    /// Size of the keys and values in [`REQUESTS`].
    #[prost(uint64, tag = "2")]
    bytes: u64,
    /// Number of the next answer in [`ORDER`].
    #[prost(uint64, tag = "3")]
    next: u64,
}

type Rows<'t> = redb::Table<'t, &'static [u8], &'static [u8]>;

/// The tables in a transaction.
struct Answers<'t> {
    requests: Rows<'t>,
    order: Rows<'t>,
    sums: Rows<'t>,
}

fn failed(error: redb::StorageError) -> Error {
    Error::of("write the store", error)
}

fn size(key: &[u8], value: &[u8]) -> u64 {
    key.len()
        .saturating_add(value.len())
        .try_into()
        .unwrap_or(u64::MAX)
}

/// Where an answer of a caller is in [`ORDER`].
fn place(caller: &str, number: u64) -> Vec<u8> {
    [caller.as_bytes(), &[0], &number.to_be_bytes()].concat()
}

/// Whether an answer is too old to be kept.
fn is_aged(ended_ms: u64, now_ms: u64) -> bool {
    now_ms.saturating_sub(ended_ms) > REQUEST_AGE_MS
}

/// The answer, unless it is too old.
fn current(value: &[u8]) -> Result<Option<RequestRecord>, Error> {
    let record = RequestRecord::decode(value)
        .map_err(|error| Error::Failed("read the store: undecodable request", error.to_string()))?;
    Ok(Some(record).filter(|record| !is_aged(record.ended_ms, text::now_ms())))
}

fn split(entry: &[u8]) -> (u64, &[u8]) {
    let (time, key) = entry.split_first_chunk().unwrap_or((&[0; 8], &[]));
    (u64::from_be_bytes(*time), key)
}

impl<'t> Answers<'t> {
    fn open(transaction: &'t WriteTransaction) -> Result<Self, Error> {
        let open = |table| {
            let opened = transaction.open_table(table);
            opened.map_err(|error| Error::of("open the store", error))
        };
        Ok(Self {
            requests: open(REQUESTS)?,
            order: open(ORDER)?,
            sums: open(SUMS)?,
        })
    }

    fn sum(&self, caller: &str) -> Result<Sum, Error> {
        let sum = self.sums.get(caller.as_bytes()).map_err(failed)?;
        Ok(sum.map_or_else(Sum::default, |sum| Sum::decode(sum.value()).unwrap_or_default()))
    }

    /// Changes the sums of a caller and of all.
    fn change(&mut self, caller: &str, change: impl Fn(&mut Sum)) -> Result<(), Error> {
        for of in [caller, EVERYBODY] {
            let mut sum = self.sum(of)?;
            change(&mut sum);
            let written = sum.encode_to_vec();
            let done = match sum.count {
                0 => self.sums.remove(of.as_bytes()),
                _ => self.sums.insert(of.as_bytes(), written.as_slice()),
            };
            done.map(drop).map_err(failed)?;
        }
        Ok(())
    }

    fn add(&mut self, mark: &RequestMark, record: &RequestRecord) -> Result<(), Error> {
        let (key, value) = (mark.key(), record.encode_to_vec());
        let key = key.as_bytes();
        let bytes = size(key, &value);
        let before = self.requests.insert(key, value.as_slice()).map_err(failed)?;
        let before = before.map(|before| size(key, before.value()));
        let number = self.sum(&mark.caller)?.next;
        let entry = [record.ended_ms.to_be_bytes().as_slice(), key].concat();
        self.order
            .insert(place(&mark.caller, number).as_slice(), entry.as_slice())
            .map_err(failed)?;
        // The place of the answer before this one in the order stays, and means nothing (see `remove_oldest`).
        self.change(&mark.caller, |sum| {
            sum.count = sum.count.saturating_add(u64::from(before.is_none()));
            sum.bytes = sum
                .bytes
                .saturating_sub(before.unwrap_or(0))
                .saturating_add(bytes);
            sum.next = number.saturating_add(1);
        })
    }

    /// When a caller's oldest answer was given.
    fn oldest(&self, caller: &str) -> Result<Option<u64>, Error> {
        let (first, last) = (place(caller, 0), place(caller, u64::MAX));
        let mut rows = self
            .order
            .range::<&[u8]>(first.as_slice()..=last.as_slice())
            .map_err(failed)?;
        let row = rows.next().transpose().map_err(failed)?;
        Ok(row.map(|(_, entry)| split(entry.value()).0))
    }

    /// Removes a caller's oldest answer; false when there is no answer.
    fn remove_oldest(&mut self, caller: &str) -> Result<bool, Error> {
        let (first, last) = (place(caller, 0), place(caller, u64::MAX));
        let row = {
            let mut rows = self
                .order
                .range::<&[u8]>(first.as_slice()..=last.as_slice())
                .map_err(failed)?;
            let row = rows.next().transpose().map_err(failed)?;
            row.map(|(place, entry)| (place.value().to_vec(), entry.value().to_vec()))
        };
        let Some((place, entry)) = row else {
            return Ok(false);
        };
        self.order.remove(place.as_slice()).map_err(failed)?;
        let (ended_ms, key) = split(&entry);
        let is_its_answer = {
            let value = self.requests.get(key).map_err(failed)?;
            value.is_some_and(|value| {
                RequestRecord::decode(value.value()).map_or(true, |record| record.ended_ms == ended_ms)
            })
        };
        if !is_its_answer {
            // A later answer to the same id has a place of its own.
            return Ok(true);
        }
        let removed = self.requests.remove(key).map_err(failed)?;
        let bytes = removed.map_or(0, |value| size(key, value.value()));
        self.change(caller, |sum| {
            sum.count = sum.count.saturating_sub(1);
            sum.bytes = sum.bytes.saturating_sub(bytes);
        })?;
        Ok(true)
    }

    /// Removes a caller's oldest answers until it is within its share.
    fn trim(&mut self, caller: &str, limits: Limits) -> Result<(), Error> {
        while limits.caller.is_exceeded(&self.sum(caller)?) && self.remove_oldest(caller)? {}
        Ok(())
    }

    /// Removes up to `most` answers of a caller that are too old at a time; returns their number.
    fn remove_aged(&mut self, caller: &str, now_ms: u64, most: u64) -> Result<u64, Error> {
        for removed in 0..most {
            let oldest = self.oldest(caller)?;
            if !oldest.is_some_and(|ended_ms| is_aged(ended_ms, now_ms)) {
                return Ok(removed);
            }
            self.remove_oldest(caller)?;
        }
        Ok(most)
    }

    /// Removes up to `most` answers that are too old at a time, of the callers behind this one.
    fn remove_aged_of_others(&mut self, caller: &str, now_ms: u64, mut most: u64) -> Result<(), Error> {
        let others = {
            let behind = self
                .sums
                .range::<&[u8]>((Bound::Excluded(caller.as_bytes()), Bound::Unbounded));
            let first = self.sums.range::<&[u8]>(..caller.as_bytes());
            let rows = behind.map_err(failed)?.chain(first.map_err(failed)?);
            let mut others = Vec::new();
            // EVERYBODY is among them.
            for row in rows.take(OTHERS_AT_ONCE + 1) {
                let (other, _) = row.map_err(failed)?;
                others.push(String::from_utf8_lossy(other.value()).into_owned());
            }
            others
        };
        for other in others.iter().filter(|other| *other != EVERYBODY) {
            most = most.saturating_sub(self.remove_aged(other, now_ms, most)?);
        }
        Ok(())
    }

    /// Removes the oldest answers of the caller that has most, until all callers are within the limit.
    fn trim_all(&mut self, limits: Limits) -> Result<(), Error> {
        while limits.all.is_exceeded(&self.sum(EVERYBODY)?) {
            let callers = self.callers()?;
            // A share of the number is worth as much as one of the bytes.
            let part = |sum: &Sum| {
                (sum.count
                    .saturating_mul(limits.all.bytes / limits.all.count.max(1)))
                .max(sum.bytes)
            };
            let most = callers.iter().max_by_key(|(_, sum)| part(sum));
            let Some((caller, _)) = most else { return Ok(()) };
            if !self.remove_oldest(caller)? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn callers(&self) -> Result<Vec<(String, Sum)>, Error> {
        let mut callers = Vec::new();
        for row in self.sums.iter().map_err(failed)? {
            let (caller, sum) = row.map_err(failed)?;
            let caller = String::from_utf8_lossy(caller.value()).into_owned();
            if caller != EVERYBODY {
                callers.push((caller, Sum::decode(sum.value()).unwrap_or_default()));
            }
        }
        Ok(callers)
    }
}

/// Keeps an answer that was sent to no client, unless the request has an answer: what its caller was sent stays.
pub fn presume(transaction: &WriteTransaction, record: &RequestRecord) -> Result<(), Error> {
    let Some(mark) = &record.mark else { return Ok(()) };
    let answered = {
        let answers = Answers::open(transaction)?;
        let kept = answers.requests.get(mark.key().as_bytes()).map_err(failed)?;
        kept.map(|kept| current(kept.value())).transpose()?.flatten()
    };
    if answered.is_some() {
        Ok(())
    } else {
        complete(transaction, record)
    }
}

/// Keeps an answer.
pub fn complete(transaction: &WriteTransaction, record: &RequestRecord) -> Result<(), Error> {
    complete_within(transaction, [record], LIMITS)
}

/// Keeps answers within these limits.
pub(super) fn complete_within<'a>(
    transaction: &WriteTransaction,
    records: impl IntoIterator<Item = &'a RequestRecord>,
    limits: Limits,
) -> Result<(), Error> {
    let mut answers = Answers::open(transaction)?;
    for record in records {
        let Some(mark) = &record.mark else { continue };
        answers.add(mark, record)?;
        answers.trim(&mark.caller, limits)?;
        let (caller, now_ms) = (&mark.caller, record.ended_ms);
        let removed = answers.remove_aged(caller, now_ms, AGED_AT_ONCE)?;
        answers.remove_aged_of_others(caller, now_ms, AGED_AT_ONCE.saturating_sub(removed))?;
        answers.trim_all(limits)?;
    }
    Ok(())
}

/// Removes answers that are too old, and answers beyond the limits.
pub fn prune(transaction: &WriteTransaction) -> Result<(), Error> {
    let mut answers = Answers::open(transaction)?;
    let mut aged = AGED_AT_START;
    for (caller, _) in answers.callers()? {
        answers.trim(&caller, LIMITS)?;
        aged -= answers.remove_aged(&caller, text::now_ms(), aged)?;
    }
    answers.trim_all(LIMITS)
}

/// The answer of a request, if it is kept and not too old.
pub fn request(database: &Database, key: &RequestKey) -> Result<Option<RequestRecord>, Error> {
    let failed = |error: redb::Error| Error::of("read the store", error);
    let transaction = database.begin_read().map_err(|error| failed(error.into()))?;
    let table = transaction
        .open_table(REQUESTS)
        .map_err(|error| failed(error.into()))?;
    let value = table.get(key.as_bytes()).map_err(|error| failed(error.into()))?;
    value.map_or(Ok(None), |value| current(value.value()))
}
