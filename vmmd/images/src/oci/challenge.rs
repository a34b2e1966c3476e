//! Challenge of a registry that answers 401: the header `WWW-Authenticate` (RFC 9110, 11.6.1; RFC
//! 6750, 3), and the address of the token server.

use reqwest::Url;
use vmmd_host::failure::Failure;

/// The reason of a failure: the registry does not let the daemon in.
pub const UNAUTHORIZED: &str = "REGISTRY_UNAUTHORIZED";

/// A way to be let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Challenge {
    /// With name and password.
    Basic,
    /// With a token.
    Bearer {
        /// Where tokens are given.
        realm: String,
        /// For whom the token is.
        service: Option<String>,
        /// The rights of the token.
        scope: Option<String>,
    },
}

impl Challenge {
    /// Those in the values of the headers that are understood. A token is preferred: it is for this repository alone.
    pub fn of<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Self> {
        let all: Vec<_> = headers.flat_map(challenges).collect();
        let bearer = all.iter().find_map(|(scheme, parameters)| {
            let value = |key: &str| {
                parameters
                    .iter()
                    .find(|(name, _)| name == key)
                    .map(|(_, value)| value.clone())
            };
            (scheme == "bearer")
                .then(|| value("realm"))?
                .map(|realm| Self::Bearer {
                    realm,
                    service: value("service"),
                    scope: value("scope"),
                })
        });
        bearer.or_else(|| {
            all.iter()
                .any(|(scheme, _)| scheme == "basic")
                .then_some(Self::Basic)
        })
    }
}

type Parameters = Vec<(String, String)>;

/// Schemes with their parameters, names in lower case.
fn challenges(text: &str) -> Vec<(String, Parameters)> {
    const BETWEEN: [char; 3] = [' ', '\t', ','];
    let mut found: Vec<(String, Parameters)> = Vec::new();
    let mut rest = text.trim_start_matches(BETWEEN);
    while !rest.is_empty() {
        let end = rest.find([' ', '\t', ',', '=']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let word = word.to_ascii_lowercase();
        rest = match after.trim_start().strip_prefix('=') {
            Some(after) => {
                let (value, after) = value(after.trim_start());
                if let Some((_, parameters)) = found.last_mut() {
                    parameters.push((word, value));
                }
                after
            }
            None => {
                found.push((word, Vec::new()));
                after
            }
        };
        rest = rest.trim_start_matches(BETWEEN);
    }
    found
}

/// A token or quoted string, and the rest of the text.
fn value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', '\t', ',']).unwrap_or(text.len());
        let (value, rest) = text.split_at(end);
        return (value.to_owned(), rest);
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, quoted.get(at + 1..).unwrap_or_default()),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

/// Address of the token server. Requests to it contain secrets, so it must use TLS. Exception: the
/// registry itself is used without TLS, and both have the same host or are loopback addresses.
pub fn token_address(realm: &str, registry: &Url) -> Result<Url, Failure> {
    let refused = |problem: &str| {
        let message = format!("the registry says that tokens are given at an address that {problem}");
        Err(Failure::precondition(UNAUTHORIZED, message))
    };
    let Ok(url) = Url::parse(realm) else {
        return refused("is none");
    };
    if !url.username().is_empty() || url.password().is_some() {
        return refused("has a user");
    }
    let plain = registry.scheme() == "http";
    let same = url.host_str() == registry.host_str();
    match url.scheme() {
        "https" => Ok(url),
        "http" if plain && (same || (is_loopback(&url) && is_loopback(registry))) => Ok(url),
        "http" => refused(
            "is of another host and without TLS: anybody on the way could read the password and the token",
        ),
        _ => refused("is neither https nor http"),
    }
}

fn is_loopback(url: &Url) -> bool {
    // "[::1]" is the name of an IPv6 host.
    let host = url.host_str().unwrap_or_default();
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(realm: &str, service: Option<&str>) -> Option<Challenge> {
        with_scope(realm, service, None)
    }

    fn with_scope(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Challenge> {
        Some(Challenge::Bearer {
            realm: realm.to_owned(),
            service: service.map(str::to_owned),
            scope: scope.map(str::to_owned),
        })
    }

    #[test]
    fn a_challenge_is_read_however_it_is_written() {
        for (headers, expected) in [
            (
                vec![r#"Bearer realm="https://a.b/token",service="a.b",scope="repository:x:pull""#],
                with_scope("https://a.b/token", Some("a.b"), Some("repository:x:pull")),
            ),
            (
                vec![r#"bearer service=x , realm="https://a/?b=\"c\"""#],
                bearer(r#"https://a/?b="c""#, Some("x")),
            ),
            (vec![r#"Basic realm="Registry, of us""#], Some(Challenge::Basic)),
            (
                vec![r#"Basic realm="x", Bearer realm="https://y""#],
                bearer("https://y", None),
            ),
            (
                vec!["Negotiate", "Bearer realm=https://y"],
                bearer("https://y", None),
            ),
            (vec!["Basic"], Some(Challenge::Basic)),
            (vec!["Bearer"], None),
            (vec!["Digest realm=\"x\""], None),
            (
                vec!["", ",,,", "=", "a=b", "\"", "Bearer realm=\"unfinished"],
                bearer("unfinished", None),
            ),
            (vec![], None),
        ] {
            assert_eq!(Challenge::of(headers.iter().copied()), expected, "{headers:?}");
        }
    }

    #[test]
    fn tokens_are_asked_for_by_tls_or_where_the_registry_is() {
        for (realm, registry, right) in [
            ("https://auth.example/token", "https://registry.example", true),
            ("https://auth.example/token", "http://127.0.0.1:5000", true),
            ("http://127.0.0.1:6000/token", "http://127.0.0.1:5000", true),
            ("http://localhost/token", "http://[::1]:5000", true),
            ("http://registry.lan/token", "http://registry.lan:5000", true),
            ("http://registry.example/token", "https://registry.example", false),
            ("http://127.0.0.1:6000/token", "https://registry.example", false),
            ("http://127.0.0.1:6000/token", "http://registry.lan", false),
            ("http://auth.lan/token", "http://registry.lan", false),
            ("http://auth.lan/token", "http://127.0.0.1:5000", false),
            ("file:///etc/shadow", "http://127.0.0.1:5000", false),
            (
                "https://me:secret@auth.example/",
                "https://registry.example",
                false,
            ),
            ("/token", "http://127.0.0.1:5000", false),
        ] {
            let registry = Url::parse(registry).unwrap();
            assert_eq!(
                token_address(realm, &registry).is_ok(),
                right,
                "{realm} {registry}"
            );
        }
    }
}
