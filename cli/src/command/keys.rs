//! Values of the command line with keys: `name=data,path=/srv/a.raw,readonly`.

use crate::{
    failure::{Code, Failure, Result},
    manifest::quantity,
};

/// Applies each `KEY` or `KEY=VALUE` of the value `text` of `option`. `set` returns whether the key is known.
pub fn each(
    option: &str,
    text: &str,
    known: &str,
    mut set: impl FnMut(&str, Option<&str>) -> Result<bool, String>,
) -> Result<()> {
    for part in text.split(',') {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (part, None),
        };
        match set(key, value) {
            Ok(true) => {}
            Ok(false) => {
                return Err(usage(format!(
                    "{option} {text}: unknown key \"{part}\"; known keys: {known}"
                )));
            }
            Err(problem) => return Err(usage(format!("{option} {text}: {part}: {problem}"))),
        }
    }
    Ok(())
}

/// A whole number.
pub fn number<T: std::str::FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| "must be a whole number".to_owned())
}

/// A size, with or without a suffix.
pub fn bytes(value: &str) -> Result<u64, String> {
    quantity::bytes(value).map_err(|error| error.to_string())
}

/// A failure of the command line.
pub fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Code::Usage, message)
}
