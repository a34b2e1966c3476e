//! Words for messages and times for the API.

use std::{
    io,
    time::{SystemTime, UNIX_EPOCH},
};

pub use vmmd_api::failure::brief;
pub use vmmd_api::time::{timestamp, unix_ms};

/// A line that another program wrote, for repeating it in a message: without control characters, at most 300 of them.
pub fn brief_line(text: &str) -> String {
    let printable = text.trim().chars().filter(|character| !character.is_control());
    printable.take(300).collect()
}

/// Text of an untrusted program in one line of at most `longest` bytes: control characters, line breaks and what turns the
/// direction of writing become spaces.
pub fn one_line(text: &str, longest: usize) -> String {
    let mut line = String::with_capacity(text.len().min(longest));
    for character in text.chars() {
        let shown = if character.is_control() || is_invisible(character) {
            ' '
        } else {
            character
        };
        if line.len() + shown.len_utf8() > longest {
            break;
        }
        line.push(shown);
    }
    line
}

/// Line and paragraph separators, and the formatting characters for bidirectional text (Unicode Standard Annex 9, 2).
fn is_invisible(character: char) -> bool {
    matches!(character, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
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
    fn untrusted_text_becomes_one_line_of_a_bounded_length() {
        assert_eq!(one_line("a\u{1b}[2J\nb\u{202e}c", 100), "a [2J b c");
        assert_eq!(one_line("ääää", 5), "ää");
    }
}
