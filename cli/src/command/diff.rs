//! `diff`: what `apply` would change.

use super::{
    apply,
    update::{self, Done, How},
};
use crate::{
    client::Client,
    failure::{Code, Failure, Result},
    manifest::Document,
    output,
};

/// Prints what would change; ends with [`Code::Conflict`] when something would.
pub async fn diff(client: &Client, documents: &[Document]) -> Result<(), Vec<Failure>> {
    let how = How {
        dry_run: true,
        ..How::default()
    };
    let (mut differs, mut failures) = (0, Vec::new());
    for document in documents {
        match apply::one(client, &document.object, false, how).await {
            Ok(Done { text, .. }) if text == update::UNCHANGED => {}
            Ok(done) => {
                differs += 1;
                let title = format!("{}: to be {}", document.title(), done.text);
                let lines = done.lines.iter().map(|line| format!("  {line}"));
                for line in std::iter::once(title).chain(lines) {
                    output::line(line).map_err(super::one)?;
                }
            }
            Err(failure) => failures.push(document.locate(failure)),
        }
    }
    if differs > 0 && failures.is_empty() {
        let message = format!("{differs} of {} differ from the manifest", documents.len());
        failures.push(Failure::new(Code::Conflict, message));
    }
    super::all(failures)
}
