//! Comparison of versions of a file on a server (RFC 9110, 8.8).

use crate::SourceVersion;

impl SourceVersion {
    /// The value of `If-Range`; nothing when the server gives neither a strong ETag nor a date.
    pub fn validator(&self) -> Option<&str> {
        let mut both = [&self.etag, &self.modified].into_iter();
        both.find(|text| !text.is_empty()).map(String::as_str)
    }

    /// Whether a part is of this version: the part has one of the validators at least, and nothing of the part differs.
    pub fn has_part(&self, part: &Self) -> bool {
        let validators = [(&self.etag, &part.etag), (&self.modified, &part.modified)];
        let known = |(ours, theirs): &(&String, &String)| !ours.is_empty() && !theirs.is_empty();
        let mut common = validators.into_iter().filter(known).peekable();
        let lengths = self.length == 0 || part.length == 0 || self.length == part.length;
        lengths && common.peek().is_some() && common.all(|(ours, theirs)| ours == theirs)
    }
}
