//! Values of options.

use std::time::Duration;

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

/// `60s`, `2m`, `1m30s`, or a number of seconds; at most an hour.
pub fn duration(text: &str) -> Result<Duration, String> {
    let duration = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let parsed = text.parse::<jiff::SignedDuration>().ok();
            let parsed = parsed.and_then(|duration| Duration::try_from(duration).ok());
            parsed.ok_or("must be a duration such as 60s or 2m")?
        }
    };
    if duration > MAX_WAIT {
        Err("must be at most 1h".into())
    } else {
        Ok(duration)
    }
}
