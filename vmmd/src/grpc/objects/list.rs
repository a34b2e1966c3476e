//! Lists of objects: by name, a page at a time.

use std::sync::Arc;

use prost::Message;
use vmmd_api::v1::ObjectFilter;
use vmmd_host::failure::Failure;
use vmmd_objects::registry::Record as _;

use super::{Served, cursor};
use crate::{
    grpc::{cursor::Cursor, filter::Filter, list::limit},
    host::Host,
};

/// Maximum size of an answer in bytes. Only a single object may exceed it.
const MAX_BYTES: usize = 1 << 20;

/// Parameters of a list request.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Which; all when there is none.
    pub filter: Option<&'a ObjectFilter>,
    /// Most of them; 0 for as many as there may be.
    pub page_size: u32,
    /// Token of the previous page.
    pub page_token: &'a str,
}

/// What it gets.
#[derive(Debug)]
pub struct Page<O> {
    /// By name.
    pub objects: Vec<O>,
    /// Token of the next page; empty on the last page.
    pub next_page_token: String,
    /// Cursor for a watch that continues from here.
    pub cursor: String,
}

/// Answers a request. A page begins after the last name of the one before, so that objects that come and go meanwhile neither
/// repeat others nor hide them. All pages have the cursor of the first one.
pub async fn list<K: Served>(host: &Arc<Host>, request: Wanted<'_>) -> Result<Page<K::Object>, Failure> {
    let filter = Filter::of_objects(K::NAME, request.filter)?;
    let limit = limit(request.page_size)?;
    let after = match request.page_token {
        "" => None,
        token => Some(Cursor::read_token(token, &filter)?),
    };
    let name = after.as_ref().map(|(_, name)| name.as_str());
    let snapshot = K::registry(host).after(name);
    let cursor = after.as_ref().map_or_else(
        || cursor::<K>(host, snapshot.at, &filter).to_string(),
        |(cursor, _)| cursor.to_string(),
    );
    let mut bytes = 0;
    let (mut page, mut more) = (Vec::new(), false);
    for seen in snapshot.objects {
        if !filter.matches_object(Some(&seen.record.metadata())) {
            continue;
        }
        let length = K::known(host, &seen).encoded_len();
        if page.len() >= limit || (bytes + length > MAX_BYTES && !page.is_empty()) {
            more = true;
            break;
        }
        bytes += length;
        page.push(seen);
    }
    let last = page.last().filter(|_| more);
    let next_page_token = last.map(|last| format!("{cursor}.{}", last.record.name()));
    Ok(Page {
        next_page_token: next_page_token.unwrap_or_default(),
        objects: K::look_at(host, page).await?,
        cursor,
    })
}
