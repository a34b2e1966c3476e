//! Lists of objects: by name, a page at a time.

use std::sync::Arc;

use prost::Message;
use vmmd_host::failure::Failure;
use vmmd_objects::registry::Record as _;

use super::{Served, cursor};
use crate::{
    grpc::{cursor::Cursor, filter::Filter, mask::Mask},
    host::Host,
};

/// Most objects in an answer.
const MAX_PAGE: u32 = 1000;

/// Parameters of a list request.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Which objects.
    pub filter: Filter,
    /// Which of their fields.
    pub mask: Mask,
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

/// Answers a request. A page begins after the last name of the previous page, so that concurrent creations and
/// deletions neither repeat nor hide other objects. All pages have the cursor of the first page: a watch from this
/// cursor reports the changes since.
pub async fn list<K: Served>(host: &Arc<Host>, request: Wanted<'_>) -> Result<Page<K::Object>, Failure> {
    let Wanted { filter, mask, .. } = request;
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
    let (mut page, mut known, mut more) = (Vec::new(), Vec::new(), false);
    for seen in snapshot.objects {
        if !K::matches(&filter, &seen) {
            continue;
        }
        if page.len() >= limit {
            more = true;
            break;
        }
        let object = K::masked(K::known(host, &seen), &mask);
        bytes += object.encoded_len();
        if bytes > K::MAX_BYTES && !page.is_empty() {
            more = true;
            break;
        }
        page.push(seen);
        known.push(object);
    }
    let last = page.last().filter(|_| more);
    let next_page_token = last.map(|last| format!("{cursor}.{}", last.record.name()));
    Ok(Page {
        next_page_token: next_page_token.unwrap_or_default(),
        objects: K::look_at(host, page, known).await?,
        cursor,
    })
}

/// Most objects of a page for which a client asks for `size`.
fn limit(size: u32) -> Result<usize, Failure> {
    let limit = match size {
        0 => MAX_PAGE,
        size if size <= MAX_PAGE => size,
        size => {
            let problem = format_args!("must be at most {MAX_PAGE}, is {size}");
            return Err(Failure::field("pageSize", problem));
        }
    };
    Ok(usize::try_from(limit).unwrap_or(usize::MAX))
}
