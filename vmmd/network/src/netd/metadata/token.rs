//! Tokens of a session, as version 2 of EC2's service has them: a client gets one by PUT, which a
//! confused proxy or a form of a page does not send. A token is its end and a code of it, so the
//! service keeps none. A new helper knows no token of an earlier one, and clients ask for another.

use std::{
    fmt, io,
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::{hmac, rand::SystemRandom};

/// Path of requests for tokens.
pub const PATH: &str = "/latest/api/token";
/// Life of a token: 1 second to 6 hours.
pub const TTL: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(6 * 60 * 60);

/// Makes tokens and checks them.
pub struct Tokens {
    key: hmac::Key,
    began: Instant,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tokens")
    }
}

impl Tokens {
    /// With a new key.
    pub fn new() -> io::Result<Self> {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        Ok(Self {
            key: key.map_err(|_| io::Error::other("no random numbers"))?,
            began: Instant::now(),
        })
    }

    /// A token of `owner` that is valid for `ttl`.
    pub fn make(&self, owner: &str, ttl: Duration, now: Instant) -> String {
        let end = now.saturating_duration_since(self.began).saturating_add(ttl);
        let end = end.as_secs().to_be_bytes();
        let code = hmac::sign(&self.key, &[&end, owner.as_bytes()].concat());
        URL_SAFE_NO_PAD.encode([&end, code.as_ref()].concat())
    }

    /// Whether a token is one of `owner`, and has not ended.
    pub fn is_valid(&self, token: &str, owner: &str, now: Instant) -> bool {
        let Ok(bytes) = URL_SAFE_NO_PAD.decode(token) else {
            return false;
        };
        let Some((end, code)) = bytes.split_first_chunk::<8>() else {
            return false;
        };
        let signed = [end, owner.as_bytes()].concat();
        let is_made = hmac::verify(&self.key, &signed, code).is_ok();
        is_made && u64::from_be_bytes(*end) > now.saturating_duration_since(self.began).as_secs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_valid_for_its_owner_until_its_end() {
        let (tokens, now) = (Tokens::new().unwrap(), Instant::now());
        let seconds = Duration::from_secs;
        let token = tokens.make("a", seconds(60), now);
        assert!(tokens.is_valid(&token, "a", now + seconds(58)));
        assert!(!tokens.is_valid(&token, "a", now + seconds(61)));
        assert!(!tokens.is_valid(&token, "b", now));
        assert!(!Tokens::new().unwrap().is_valid(&token, "a", now));
        for wrong in ["", "x", "AAAA", &token[1..], &format!("{token}A")] {
            assert!(!tokens.is_valid(wrong, "a", now), "{wrong}");
        }
    }
}
