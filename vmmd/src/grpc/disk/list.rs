//! `ListDisks`: disks by name, a page at a time.

use std::sync::Arc;

use prost::Message;
use proto::v1::{ListDisksRequest, ListDisksResponse};

use super::watch::{KIND, cursor};
use crate::{
    disk::describe,
    failure::Failure,
    grpc::{cursor::Cursor, filter::Filter},
    host::Host,
};

/// Most disks in an answer.
const MAX_PAGE: u32 = 1000;
/// Longest answer in bytes, but for its last disk.
const MAX_BYTES: usize = 1 << 20;

/// Answers a request. A page begins after the last name of the one before, so that disks that come and go meanwhile neither
/// repeat others nor hide them. All pages have the cursor of the first one.
pub async fn list(host: &Arc<Host>, request: &ListDisksRequest) -> Result<ListDisksResponse, Failure> {
    let filter = Filter::of_objects(KIND, request.filter.as_ref())?;
    let limit = match request.page_size {
        0 => MAX_PAGE,
        size if size <= MAX_PAGE => size,
        size => {
            let problem = format_args!("must be at most {MAX_PAGE}, is {size}");
            return Err(Failure::field("pageSize", problem));
        }
    };
    let after = match request.page_token.as_str() {
        "" => None,
        token => Some(read_token(token, &filter)?),
    };
    let name = after.as_ref().map(|(_, name)| name.as_str());
    let snapshot = host.disks.after(&host.disk_folder(), name);
    let cursor = after.as_ref().map_or_else(
        || cursor(host, snapshot.at, &filter).to_string(),
        |(cursor, _)| cursor.to_string(),
    );
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut bytes = 0;
    let (mut page, mut more) = (Vec::new(), false);
    for seen in snapshot.disks {
        if !filter.matches_object(seen.disk.metadata.as_ref()) {
            continue;
        }
        let length = seen.disk.encoded_len();
        if page.len() >= limit || (bytes + length > MAX_BYTES && !page.is_empty()) {
            more = true;
            break;
        }
        bytes += length;
        page.push(seen);
    }
    let last = page.last().filter(|_| more);
    let next_page_token = last.map(|last| format!("{cursor}.{}", last.record.name));
    Ok(ListDisksResponse {
        next_page_token: next_page_token.unwrap_or_default(),
        disks: describe::look_at(host, page).await?,
        cursor,
    })
}

/// A token is the first page's cursor and the last name.
fn read_token(token: &str, filter: &Filter) -> Result<(Cursor, String), Failure> {
    let (cursor, name) = token.rsplit_once('.').unwrap_or((token, ""));
    let cursor = Cursor::read("pageToken", cursor, filter)?;
    Ok((cursor, name.to_owned()))
}
