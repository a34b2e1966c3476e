//! Numbers of bytes as people write them: `268435456`, `256Mi`, `5Gi`, `1G`, `1.5Gi`.

/// Suffixes and their factors: powers of 1,024 with an `i`, of 1,000 without. A final `B` may
/// follow.
const SUFFIXES: [(&str, u64); 8] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

/// Why a text is no number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not understood at all.
    #[error("must be a number of bytes such as 268435456, 256Mi, 5Gi or 1G, is \"{0}\"")]
    Syntax(String),
    /// `1.3Ki`.
    #[error("\"{0}\" is not a whole number of bytes")]
    Fraction(String),
    /// Above 2^64-1.
    #[error("\"{0}\" is too large")]
    TooLarge(String),
}

/// Reads a number of bytes.
pub fn bytes(text: &str) -> Result<u64, Error> {
    let syntax = || Error::Syntax(text.chars().take(64).collect());
    let end = text
        .find(|letter: char| !letter.is_ascii_digit() && letter != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let suffix = suffix.trim_start_matches(' ');
    let suffix = suffix.strip_suffix('B').unwrap_or(suffix);
    let unit = match suffix {
        "" => 1,
        "K" => 1_000,
        suffix => {
            SUFFIXES
                .iter()
                .find(|(name, _)| *name == suffix)
                .ok_or_else(syntax)?
                .1
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    // Nine digits of a fraction times the largest unit stay below 2^128 by far.
    if !digits(whole) || !digits(fraction) || fraction.len() > 9 {
        return Err(syntax());
    }
    let too_large = || Error::TooLarge(text.chars().take(64).collect());
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let scale = u32::try_from(fraction.len())
        .ok()
        .and_then(|length| 10_u128.checked_pow(length));
    let scale = scale.ok_or_else(syntax)?;
    let fraction: u128 = fraction.parse().map_err(|_| syntax())?;
    let part = fraction * u128::from(unit);
    if !part.is_multiple_of(scale) {
        return Err(Error::Fraction(text.to_owned()));
    }
    let total = u128::from(whole) * u128::from(unit) + part / scale;
    u64::try_from(total).map_err(|_| too_large())
}

/// A number of bytes for people: `256Mi`, `5Gi`, `1.5Gi`; rounded to one decimal when it is not exact.
pub fn show(bytes: u64) -> String {
    let units = SUFFIXES.iter().filter(|(name, _)| name.ends_with('i'));
    let Some((name, unit)) = units.rev().find(|(_, unit)| bytes >= *unit) else {
        return bytes.to_string();
    };
    let tenths = (u128::from(bytes) * 10 + u128::from(*unit) / 2) / u128::from(*unit);
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole}{name}"),
        (whole, tenth) => format!("{whole}.{tenth}{name}"),
    }
}
