//! Which servers an import may connect to. The daemon has the node's network, so an import must not lead a tenant of a cluster, or the
//! server of an image, to services of the node: addresses are checked after names are resolved, and for each redirect.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use reqwest::{
    Client, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    redirect,
};
use vmmd_host::failure::Failure;

use super::fetch::{REFUSED, words};
use crate::rules::{ImportRules as Rules, Network};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(30);
/// How long a server may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// Most redirects that are followed.
const REDIRECTS: usize = 10;
/// Variables of the environment that name proxies, in the client's spelling.
const PROXIES: [&str; 6] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
];

/// Which servers one import may connect to.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    denied: Vec<Network>,
    /// Addresses of the node itself and of its links are allowed for all servers.
    local: bool,
    /// They are allowed for a server with this name: the one that the import names.
    named: Option<String>,
    /// Names of proxies. The administrator has chosen them, so all of their addresses are allowed for connections to them.
    proxies: Vec<String>,
}

impl Reach {
    /// For an import from this host, `NAME[:PORT]` or `ADDRESS[:PORT]`. A `trusted` host may have an address of the node itself.
    pub fn new(rules: &Rules, host: &str, trusted: bool) -> Self {
        let proxies = PROXIES.iter().filter_map(|name| std::env::var(name).ok());
        Self::behind(proxies, rules, host, trusted)
    }

    /// The same with these proxies.
    fn behind(proxies: impl IntoIterator<Item = String>, rules: &Rules, host: &str, trusted: bool) -> Self {
        let url = Url::parse(&format!("http://{host}/")).ok();
        let given = url.as_ref().and_then(Url::host_str).unwrap_or_default();
        let own = literal(given).is_some_and(is_local) || given == "localhost";
        let proxies = proxies.into_iter();
        Self {
            denied: rules.deny.clone(),
            local: trusted && own,
            named: trusted.then(|| given.to_owned()),
            proxies: proxies.filter_map(|proxy| proxy_name(&proxy)).collect(),
        }
    }

    fn is_proxy(&self, name: &str) -> bool {
        self.proxies.iter().any(|proxy| proxy.eq_ignore_ascii_case(name))
    }

    /// The problem of an address of a server with this name, if it has one.
    fn wrong(&self, name: &str, address: IpAddr) -> Option<String> {
        let address = address.to_canonical();
        let host = match literal(name) {
            Some(_) => name.to_owned(),
            None => format!("{name} ({address})"),
        };
        if self.denied.iter().any(|network| network.has(address)) {
            let problem =
                format!("{host} is in a network that the configuration denies for imports (`images.deny`)");
            return Some(problem);
        }
        (!self.may_be_local(name) && is_local(address)).then(|| {
            format!(
                "{host} is an address of the node itself or of its link: this import may not use one; \
                 a registry there must be in `images.insecure_registries` of the configuration"
            )
        })
    }

    fn may_be_local(&self, name: &str) -> bool {
        self.local || self.named.as_deref() == Some(name)
    }

    /// Refuses an address of the web whose host is an address that is not allowed. Names are checked when they are resolved.
    pub fn check(&self, url: &Url) -> Result<(), Failure> {
        match self.wrong_url(url) {
            Some(problem) => {
                let message = format!("the image can't be downloaded: {problem}");
                Err(Failure::precondition(REFUSED, message))
            }
            None => Ok(()),
        }
    }

    fn wrong_url(&self, url: &Url) -> Option<String> {
        let host = url.host_str()?;
        match literal(host) {
            Some(address) => self.wrong(host, address),
            // A connection to this name is taken for one to the proxy, whose addresses are not checked.
            None if self.is_proxy(host) && !(self.denied.is_empty() && self.may_be_local(host)) => {
                Some(format!(
                    "{host} is the proxy of the daemon's environment: an import may not use the proxy's name for another server; \
                     use another name of that server"
                ))
            }
            None => None,
        }
    }

    fn redirects(&self) -> redirect::Policy {
        let reach = self.clone();
        redirect::Policy::custom(move |attempt| {
            let came = attempt.previous().last().map(Url::scheme);
            let problem = match attempt.url().scheme() {
                _ if attempt.previous().len() > REDIRECTS => Some("it redirects too often".to_owned()),
                "http" if came == Some("https") => {
                    Some("it redirects from https to http, where anybody could change what comes".to_owned())
                }
                "http" | "https" => reach
                    .wrong_url(attempt.url())
                    .map(|problem| format!("it redirects to another server: {problem}")),
                _ => Some("it redirects to an address that is neither http nor https".to_owned()),
            };
            match problem {
                Some(problem) => attempt.error(io::Error::new(io::ErrorKind::InvalidInput, problem)),
                None => attempt.follow(),
            }
        })
    }

    /// The client for all connections of one import.
    pub fn client(&self) -> Result<Client, Failure> {
        let builder = || {
            Client::builder()
                .redirect(self.redirects())
                .dns_resolver(Arc::new(self.clone()))
                .connect_timeout(CONNECT)
                .read_timeout(SILENCE)
                .user_agent(concat!("vmmd/", env!("CARGO_PKG_VERSION")))
        };
        // A node without certificates of authorities can still download by http.
        let client = builder()
            .build()
            .or_else(|_| builder().tls_certs_only([]).build());
        client.map_err(|error| Failure::internal(format!("prepare a download: {}", words(&error))))
    }
}

impl Resolve for Reach {
    fn resolve(&self, name: Name) -> Resolving {
        let reach = self.clone();
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let (mut allowed, mut refused) = (Vec::new(), None);
            let is_proxy = reach.is_proxy(name.as_str());
            for address in found {
                match reach.wrong(name.as_str(), address.ip()) {
                    Some(problem) if !is_proxy => refused = Some(problem),
                    _ => allowed.push(address),
                }
            }
            match refused {
                Some(problem) if allowed.is_empty() => {
                    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem).into())
                }
                _ => Ok(Box::new(allowed.into_iter()) as Addrs),
            }
        })
    }
}

/// The host of a proxy as an environment variable names it: a URL, or `HOST:PORT` for a proxy that is spoken to by HTTP.
fn proxy_name(proxy: &str) -> Option<String> {
    let uri: http::Uri = proxy.parse().ok()?;
    uri.host().map(str::to_owned)
}

/// The address that a host of a URL is, if it is no name: `[::1]` is an IPv6 address.
fn literal(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

/// Whether an address is of the node itself or of its links, and of no other network. Linux connects 0.0.0.0 to itself.
fn is_local(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            address.octets().first() == Some(&0)
                || address.is_loopback()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
        }
        IpAddr::V6(address) => {
            address.is_unspecified()
                || address.is_loopback()
                || address.is_unicast_link_local()
                || address.is_multicast()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reach(host: &str, trusted: bool) -> Reach {
        let deny = vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let rules = Rules {
            deny,
            ..Rules::default()
        };
        Reach::new(&rules, host, trusted)
    }

    fn allows(reach: &Reach, url: &str) -> bool {
        reach.check(&Url::parse(url).unwrap()).is_ok()
    }

    #[test]
    fn addresses_of_the_node_are_refused_without_trust() {
        let agent = reach("registry.example", false);
        for (host, allowed) in [
            ("127.0.0.1:5000", false),
            ("127.1", false),
            ("2130706433", false),
            ("0.0.0.0", false),
            ("169.254.169.254", false),
            ("[::1]:5000", false),
            ("[::ffff:127.0.0.1]", false),
            ("[fe80::1]", false),
            ("10.1.2.3", false),
            ("[fd00::1]", false),
            ("192.168.1.1", true),
            ("[2001:db8::1]", true),
        ] {
            assert_eq!(allows(&agent, &format!("https://{host}/v2/")), allowed, "{host}");
        }
    }

    #[test]
    fn trusted_import_reaches_the_node_when_it_names_it() {
        let local = reach("127.0.0.1:5000", true);
        assert!(allows(&local, "http://127.0.0.1:6000/"));
        assert!(!allows(&local, "http://10.0.0.1/"));
        let web = reach("mirror.example", true);
        assert!(!allows(&web, "http://169.254.169.254/latest/meta-data"));
        let own = "127.0.0.1".parse().unwrap();
        assert_eq!(web.wrong("mirror.example", own), None);
        assert!(web.wrong("other.example", own).is_some());
        assert!(
            reach("mirror.example", false)
                .wrong("mirror.example", own)
                .is_some()
        );
    }

    #[tokio::test]
    async fn name_with_an_address_of_the_node_is_refused() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://localhost:{}/", listener.local_addr().unwrap().port());
        let client = reach("registry.example", false).client().unwrap();
        let error = client.get(url).send().await.unwrap_err();
        assert!(words(&error).contains("address of the node itself"), "{error:?}");
    }

    #[test]
    fn proxy_is_known_however_it_is_written() {
        for (proxy, name) in [
            ("localhost:3128", Some("localhost")),
            ("proxy.example", Some("proxy.example")),
            ("me:secret@proxy.example:3128", Some("proxy.example")),
            ("http://Proxy.example:3128/", Some("Proxy.example")),
            ("https://me:secret@[::1]:3128", Some("[::1]")),
            ("", None),
            ("http://", None),
        ] {
            assert_eq!(proxy_name(proxy).as_deref(), name, "{proxy}");
        }
    }

    #[tokio::test]
    async fn proxy_in_a_denied_network_is_used() {
        let rules = Rules {
            deny: vec!["127.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()],
            ..Rules::default()
        };
        let behind = |proxy: &str| Reach::behind([proxy.to_owned()], &rules, "web.example", false);
        let name = || "localhost".parse::<Name>().unwrap();
        for proxy in ["localhost:3128", "http://LocalHost:3128"] {
            assert!(behind(proxy).resolve(name()).await.is_ok(), "{proxy}");
        }
        assert!(behind("other.example:3128").resolve(name()).await.is_err());
        // The proxy's name and addresses are no way to other servers, which NO_PROXY may name.
        assert!(!allows(&behind("localhost:3128"), "http://localhost:5000/"));
        assert!(!allows(&behind("127.0.0.1:3128"), "http://127.0.0.1:5000/"));
    }

    #[test]
    fn network_that_cannot_be_is_refused() {
        for text in ["10.0.0.0", "10.0.0.0/33", "::/129", "a/8", "/"] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
        let all: Network = "::/0".parse().unwrap();
        assert!(all.has("2001:db8::1".parse().unwrap()));
    }
}
