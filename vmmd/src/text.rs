//! Words for messages and times for the API.

use std::{
    io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use proto::well_known::Timestamp;

/// The beginning of what a client sent, for repeating it in a message.
pub fn brief(text: &str) -> &str {
    let end = (0..=text.len().min(100))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// A line that another program wrote, for repeating it in a message: without control characters, at most 300 of them.
pub fn brief_line(text: &str) -> String {
    let printable = text.trim().chars().filter(|character| !character.is_control());
    printable.take(300).collect()
}

/// An I/O error in words, without its number.
pub fn words(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_lowercase(),
        None => text,
    }
}

/// An error and all its sources in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Now, in milliseconds of Unix time.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds of Unix time as the API has it; `None` for 0.
pub fn timestamp(unix_ms: u64) -> Option<Timestamp> {
    let since = Duration::from_millis(unix_ms);
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let nanos = i32::try_from(since.subsec_nanos()).unwrap_or(0);
    (unix_ms != 0).then_some(Timestamp { seconds, nanos })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_error_is_words_without_a_number() {
        assert_eq!(
            words(&io::Error::from_raw_os_error(libc::ENOENT)),
            "no such file or directory"
        );
        assert_eq!(words(&io::Error::other("odd")), "odd");
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        assert_eq!(brief(&"ä".repeat(80)).len(), 100);
        assert_eq!(brief("web"), "web");
    }

    #[test]
    fn a_time_keeps_its_milliseconds() {
        assert_eq!(
            timestamp(1_500),
            Some(Timestamp {
                seconds: 1,
                nanos: 500_000_000
            })
        );
        assert_eq!(timestamp(0), None);
    }
}
