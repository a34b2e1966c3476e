//! The version of a file on a server. It decides whether a part continues the present beginning (RFC 9110, 8.8 and 15.3.7).

use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap, LAST_MODIFIED};
use vmmd_store::SourceVersion;

/// Longest value of a header that is recorded, in bytes.
const LONGEST: usize = 1024;

/// From the headers of a response, and the length of the whole file in bytes: 0 when the server does not say.
pub fn version_of(headers: &HeaderMap, length: u64) -> SourceVersion {
    let text = |name| {
        let value = headers.get(name).and_then(|value| value.to_str().ok());
        value.filter(|text| text.len() <= LONGEST)
    };
    // A weak ETag does not promise equal bytes (RFC 9110, 8.8.1).
    let strong = text(ETAG).filter(|tag| !tag.starts_with("W/"));
    SourceVersion {
        etag: strong.unwrap_or_default().to_owned(),
        modified: text(LAST_MODIFIED).unwrap_or_default().to_owned(),
        length,
    }
}

/// The part of a file in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Offset of the first byte.
    pub start: u64,
    /// Length of the whole file in bytes; 0 when the server does not say.
    pub whole: u64,
}

impl Part {
    /// Of `Content-Range: bytes 5-9/10`.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
        let (part, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
        let (start, _) = part.split_once('-')?;
        Some(Self {
            start: start.parse().ok()?,
            whole: whole.parse().unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(etag: &str, modified: &str, length: u64) -> SourceVersion {
        SourceVersion {
            etag: etag.into(),
            modified: modified.into(),
            length,
        }
    }

    #[test]
    fn part_with_other_validators_is_of_another_version() {
        let file = version("\"a\"", "Sat, 01 Nov 2025", 9);
        for (part, same) in [
            (version("\"a\"", "Sat, 01 Nov 2025", 9), true),
            (version("\"a\"", "", 0), true),
            (version("", "Sat, 01 Nov 2025", 9), true),
            (version("\"b\"", "Sat, 01 Nov 2025", 9), false),
            (version("\"a\"", "Sun, 02 Nov 2025", 9), false),
            (version("\"a\"", "", 10), false),
            (version("", "", 9), false),
        ] {
            assert_eq!(file.has_part(&part), same, "{part:?}");
        }
        assert!(!version("", "", 9).has_part(&version("\"a\"", "", 9)));
    }

    #[test]
    fn version_of_weak_or_long_validators_has_none() {
        let mut headers = HeaderMap::new();
        headers.insert(ETAG, "W/\"a\"".parse().unwrap());
        headers.insert(LAST_MODIFIED, "x".repeat(2000).parse().unwrap());
        let found = version_of(&headers, 7);
        assert_eq!((found.validator(), found.length), (None, 7));
        headers.insert(LAST_MODIFIED, "Sat, 01 Nov 2025".parse().unwrap());
        let found = version_of(&headers, 7);
        assert_eq!(found.validator(), Some("Sat, 01 Nov 2025"));
    }

    #[test]
    fn content_range_gives_offset_and_length() {
        for (text, part) in [
            ("bytes 5-9/10", Some((5, 10))),
            ("bytes 5-9/*", Some((5, 0))),
            ("bytes */10", None),
            ("items 5-9/10", None),
            ("bytes x", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, text.parse().unwrap());
            let found = Part::of(&headers).map(|part| (part.start, part.whole));
            assert_eq!(found, part, "{text}");
        }
    }
}
