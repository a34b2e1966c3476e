//! Values of options.

use std::{collections::BTreeMap, ffi::OsStr, time::Duration};

use clap::{
    Arg, Command,
    builder::{PossibleValue, StringValueParser, TypedValueParser},
};
use vmmd_api::v1;

use crate::{client::Kind as _, manifest::quantity};

/// Longest time that the daemon waits for a guest.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Before the `=`.
    pub key: String,
    /// After it.
    pub value: String,
}

impl std::str::FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self {
                key: key.to_owned(),
                value: value.to_owned(),
            }),
            _ => Err("must be KEY=VALUE".into()),
        }
    }
}

/// A condition on labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// `KEY=VALUE`.
    Is(Label),
    /// `KEY!=VALUE`: another value, or no such label.
    IsNot(Label),
    /// `KEY`: with any value.
    Has(String),
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Is(label) => write!(f, "{}={}", label.key, label.value),
            Self::IsNot(label) => write!(f, "{}!={}", label.key, label.value),
            Self::Has(key) => f.write_str(key),
        }
    }
}

impl std::str::FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let label = |key: &str, value: &str| format!("{key}={value}").parse::<Label>();
        if let Some((key, value)) = text.split_once("!=") {
            label(key, value).map(Self::IsNot)
        } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            label(key, value).map(Self::Is)
        } else if text.is_empty() {
            Err("must be KEY=VALUE, KEY!=VALUE or KEY".into())
        } else {
            Ok(Self::Has(text.to_owned()))
        }
    }
}

/// A change of labels or annotations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelChange {
    /// `KEY=VALUE`.
    Set(String, String),
    /// `KEY-`.
    Remove(String),
}

impl std::str::FromStr for LabelChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text.split_once('='), text.strip_suffix('-')) {
            (Some((key, value)), _) if !key.is_empty() => Ok(Self::Set(key.to_owned(), value.to_owned())),
            (None, Some(key)) if !key.is_empty() => Ok(Self::Remove(key.to_owned())),
            _ => Err("must be KEY=VALUE, or KEY- to remove it".into()),
        }
    }
}

impl LabelChange {
    /// Changes a map of labels.
    pub fn apply(&self, labels: &mut BTreeMap<String, String>) {
        match self {
            Self::Set(key, value) => drop(labels.insert(key.clone(), value.clone())),
            Self::Remove(key) => drop(labels.remove(key)),
        }
    }
}

/// Words of the command line, each with the value of the API that it stands for, and a help text.
pub type Words<E> = &'static [(&'static str, E, &'static str)];

/// A parser of an option whose values are words.
#[derive(Clone)]
pub struct WordParser<E: 'static>(Words<E>);

/// The parser for these words.
pub fn words<E: 'static>(words: Words<E>) -> WordParser<E> {
    WordParser(words)
}

impl<E: Copy + Send + Sync + 'static> TypedValueParser for WordParser<E> {
    type Value = E;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<E, clap::Error> {
        let words = self.0;
        let parser = StringValueParser::new().try_map(move |given| word(words, &given));
        parser.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(|(word, _, help)| match *help {
            "" => PossibleValue::new(*word),
            help => PossibleValue::new(*word).help(help),
        })))
    }
}

/// The value that a word stands for; for policies also in the form of the API, `RUN_POLICY_MANUAL`.
pub fn word<E: Copy>(words: Words<E>, given: &str) -> Result<E, String> {
    let given = given.to_ascii_lowercase().replace('_', "-");
    let found = words.iter().find(|(word, ..)| {
        let prefix = given.strip_suffix(&word.to_ascii_lowercase());
        prefix.is_some_and(|prefix| prefix.is_empty() || prefix.ends_with("-policy-"))
    });
    found.map(|(_, value, _)| *value).ok_or_else(|| {
        let known: Vec<_> = words.iter().map(|(word, ..)| *word).collect();
        match known.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("must be {} or {last}", rest.join(", ")),
            _ => format!("must be {}", known.concat()),
        }
    })
}

/// The name of a VM: `web` or, as `-o name` prints it, `vm/web`.
pub fn vm_name(text: &str) -> Result<String, String> {
    named(text, v1::Vm::WORD, v1::Vm::ONE)
}

/// The name of a disk that vmmd keeps: `data` or `disk/data`.
pub fn disk_name(text: &str) -> Result<String, String> {
    named(text, v1::Disk::WORD, v1::Disk::ONE)
}

/// The name of an image: `debian` or `image/debian`.
pub fn image_name(text: &str) -> Result<String, String> {
    named(text, v1::Image::WORD, v1::Image::ONE)
}

/// The id of an operation, alone or after `operation/`.
pub fn operation_id(text: &str) -> Result<String, String> {
    named(text, "operation", "an operation")
}

/// A name alone, or after its kind: `web`, `vm/web` or `vms/web`.
pub fn named(text: &str, kind: &str, one: &str) -> Result<String, String> {
    match text.split_once('/') {
        None => Ok(text.to_owned()),
        Some((before, name)) if before.strip_suffix('s').unwrap_or(before) == kind => Ok(name.to_owned()),
        Some(_) => Err(format!("is not {one}: give NAME or {kind}/NAME")),
    }
}

/// An amount of memory or space. Refuses a small number without a unit, whose unit was probably forgotten.
pub fn size(text: &str) -> Result<u64, String> {
    let bytes = quantity::bytes(text).map_err(|error| error.to_string())?;
    let plain = text.bytes().all(|byte| byte.is_ascii_digit());
    if plain && (1..1 << 20).contains(&bytes) {
        Err(format!("is {bytes} bytes: did you mean {bytes}Mi or {bytes}Gi?"))
    } else {
        Ok(bytes)
    }
}

/// `60s`, `2m`, `1m30s`, or a number of seconds; at most an hour.
pub fn duration(text: &str) -> Result<Duration, String> {
    let duration = age(text)?;
    if duration > MAX_WAIT {
        Err("must be at most 1h".into())
    } else {
        Ok(duration)
    }
}

/// `60s`, `2h`, `1m30s`, `14d`, `1d12h`, or a number of seconds. A day has 24 hours.
pub fn age(text: &str) -> Result<Duration, String> {
    if let Some((days, rest)) = text.split_once('d')
        && let Ok(days) = days.parse::<u32>()
    {
        let rest = if rest.is_empty() { "0s" } else { rest };
        return Ok(short(rest)?.saturating_add(Duration::from_secs(u64::from(days) * 86_400)));
    }
    short(text)
}

/// The same without days.
fn short(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    let parsed = text.parse::<jiff::SignedDuration>().ok();
    let parsed = parsed.and_then(|duration| Duration::try_from(duration).ok());
    parsed.ok_or_else(|| "must be a duration such as 60s or 2m".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_with_days_is_read() {
        for (text, seconds) in [
            ("90", 90),
            ("1m30s", 90),
            ("36h", 129_600),
            ("14d", 1_209_600),
            ("1d12h", 129_600),
        ] {
            assert_eq!(age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "d", "-1d", "1d2d", "day"] {
            assert!(age(text).is_err(), "{text}");
        }
        assert!(duration("1d").is_err());
    }
}
