//! `ListVms`: VMs by name, a page at a time.

use prost::Message;
use vmmd_api::v1::{ListVmsRequest, ListVmsResponse};
use vmmd_host::failure::Failure;

use super::{cursor::Cursor, filter::Filter, mask::Mask};
use crate::registry::vms::Vms;

/// Most objects in an answer.
const MAX_PAGE: u32 = 1000;
/// Most bytes of the objects in an answer of more than one: gRPC clients take no more than 4 MiB by default.
const MAX_BYTES: usize = 3 << 20;

/// Answers a request. A page begins after the last name of the previous page, so that concurrent
/// creations and deletions neither repeat nor hide other VMs. All pages have the cursor of the
/// first page: a watch from this cursor reports the changes since.
pub fn list(registry: &Vms, request: &ListVmsRequest) -> Result<ListVmsResponse, Failure> {
    let filter = Filter::new(request.filter.as_ref(), "")?;
    let mask = Mask::new(&request.fields)?;
    let limit = limit(request.page_size)?;
    let after = match request.page_token.as_str() {
        "" => None,
        token => Some(Cursor::read_token(token, &filter)?),
    };
    let name = after.as_ref().map(|(_, name)| name.as_str());
    let (vms, more, position) = registry.page(name, limit, |vm| filter.matches(vm));
    let cursor = after.as_ref().map_or_else(
        || Cursor::new(registry, position, &filter).to_string(),
        |(cursor, _)| cursor.to_string(),
    );
    let (vms, cut) = page(vms.iter().map(|vm| mask.apply(vm)));
    let last = vms.last().and_then(|vm| vm.metadata.as_ref());
    let last = last.filter(|_| more || cut);
    let next_page_token = last.map(|last| format!("{cursor}.{}", last.name));
    Ok(ListVmsResponse {
        vms,
        next_page_token: next_page_token.unwrap_or_default(),
        cursor,
    })
}

/// Most objects of a page for which a client asks for `size`.
pub(super) fn limit(size: u32) -> Result<usize, Failure> {
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

/// As many objects as an answer may have by their size, at least one; and whether some were left out.
pub(super) fn page<O: Message>(objects: impl Iterator<Item = O>) -> (Vec<O>, bool) {
    let (mut page, mut bytes) = (Vec::new(), 0);
    for object in objects {
        bytes += object.encoded_len();
        if bytes > MAX_BYTES && !page.is_empty() {
            return (page, true);
        }
        page.push(object);
    }
    (page, false)
}
