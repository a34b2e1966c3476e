//! Contexts: named daemons in `~/.config/vmmctl/config.toml`, and the selection of the daemon of a command.

use std::{
    collections::BTreeMap,
    env, fs, io,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::{
    failure::{Code, Failure, Result},
    tls::Remote,
};

/// Where vmmd listens by default.
const SOCKET: &str = "/run/vmmd/vmmd.sock";
/// The environment variable with the path of the socket.
const ENV_SOCKET: &str = "VMMD_SOCKET";
/// The environment variable with the name of a context.
const ENV_CONTEXT: &str = "VMMCTL_CONTEXT";

/// Options of [`Connection`]; each has a value.
pub const OPTIONS: [&str; 6] = ["--context", "--socket", "--endpoint", "--ca", "--cert", "--key"];

/// Options that select the daemon.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Connection")]
pub struct Connection {
    /// Context of the configuration file [env: VMMCTL_CONTEXT=]
    #[arg(long, global = true, display_order = 900, value_name = "NAME")]
    pub context: Option<String>,
    /// Socket of a vmmd on this node [env: VMMD_SOCKET=] [default: /run/vmmd/vmmd.sock]
    #[arg(
        long,
        global = true,
        display_order = 901,
        value_name = "PATH",
        conflicts_with = "endpoint"
    )]
    pub socket: Option<PathBuf>,
    /// Address of a vmmd over TCP: https://HOST:PORT. Requires --ca, --cert and --key
    #[arg(long, global = true, display_order = 902, value_name = "URL")]
    pub endpoint: Option<String>,
    /// CA of the certificate of that vmmd, PEM
    #[arg(long, global = true, display_order = 903, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Your certificate for that vmmd, PEM
    #[arg(long, global = true, display_order = 904, value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// Key of your certificate, PEM
    #[arg(long, global = true, display_order = 905, value_name = "FILE")]
    pub key: Option<PathBuf>,
}

/// The daemon that a command is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// On this node.
    Socket(PathBuf),
    /// Over TCP.
    Remote(Remote),
}

/// The file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Contexts {
    /// The context that is used when none is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// By name.
    pub contexts: BTreeMap<String, Context>,
}

/// How to reach one daemon: a socket, or an endpoint with three files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Context {
    /// Path of a UNIX socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// `https://HOST:PORT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The CA of the daemon's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// The client's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// Its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
}

impl Context {
    /// Given options override those of the context. A socket and an endpoint replace each other.
    pub fn with(self, given: &Connection) -> Self {
        let socket = match (&given.socket, &given.endpoint) {
            (Some(socket), _) => Some(socket.clone()),
            (None, Some(_)) => None,
            (None, None) => self.socket,
        };
        let endpoint = match &given.socket {
            Some(_) => None,
            None => given.endpoint.clone().or(self.endpoint),
        };
        Self {
            socket,
            endpoint,
            ca: given.ca.clone().or(self.ca),
            cert: given.cert.clone().or(self.cert),
            key: given.key.clone().or(self.key),
        }
    }

    /// The daemon.
    pub fn target(self) -> Result<Target> {
        let Some(endpoint) = self.endpoint else {
            return Ok(Target::Socket(self.socket.unwrap_or_else(|| SOCKET.into())));
        };
        let need = |file: Option<PathBuf>, option: &str, what: &str| {
            let message = format!("{endpoint} requires {option}: {what}");
            file.ok_or_else(|| {
                Failure::new(Code::Usage, message).hint("`vmmd init-certs` on the node creates certificates")
            })
        };
        let ca = need(self.ca, "--ca", "the CA of the daemon's certificate")?;
        let cert = need(self.cert, "--cert", "your certificate")?;
        let key = need(self.key, "--key", "the key of your certificate")?;
        Ok(Target::Remote(Remote::new(&endpoint, ca, cert, key)?))
    }
}

/// Values from the environment.
#[derive(Clone, Debug, Default)]
struct Environment {
    socket: Option<PathBuf>,
    context: Option<String>,
}

impl Environment {
    fn read() -> Self {
        let text = |name| env::var(name).ok().filter(|text| !text.is_empty());
        Self {
            socket: text(ENV_SOCKET).map(PathBuf::from),
            context: text(ENV_CONTEXT),
        }
    }
}

/// The daemon that the command line selects.
pub fn target(given: &Connection) -> Result<Target> {
    choose(given, Environment::read(), Contexts::load)
}

/// In this order: --context; --socket or --endpoint alone; VMMD_SOCKET; VMMCTL_CONTEXT; the current context; the socket
/// where vmmd listens by default.
fn choose(
    given: &Connection,
    environment: Environment,
    contexts: impl FnOnce() -> Result<Contexts>,
) -> Result<Target> {
    let alone = given.socket.is_some() || given.endpoint.is_some();
    let name = match (&given.context, alone) {
        (Some(name), _) => Some(name.clone()),
        (None, true) => return Context::default().with(given).target(),
        (None, false) if environment.socket.is_some() => {
            let socket = environment.socket;
            return Context {
                socket,
                ..Context::default()
            }
            .with(given)
            .target();
        }
        (None, false) => environment.context,
    };
    let contexts = contexts()?;
    let context = match name.or_else(|| contexts.current.clone()) {
        Some(name) => contexts.get(&name)?.clone(),
        None => Context::default(),
    };
    context.with(given).target()
}

impl Contexts {
    /// `$XDG_CONFIG_HOME/vmmctl/config.toml`, by default below `~/.config`.
    fn file() -> Result<PathBuf> {
        let set = |name| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let folder = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")));
        let folder =
            folder.ok_or_else(|| Failure::new(Code::Other, "the environment variable HOME is not set"))?;
        Ok(folder.join("vmmctl/config.toml"))
    }

    /// Reads the file; without one there are no contexts.
    pub fn load() -> Result<Self> {
        // Without a home folder there are no contexts.
        let Ok(path) = Self::file() else {
            return Ok(Self::default());
        };
        match fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text).map_err(|error| {
                let error = error.to_string();
                let message = format!("{}: {}", path.display(), error.trim().replace('\n', " "));
                Failure::new(Code::Invalid, message)
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => {
                let message = format!("cannot read {}: {error}", path.display());
                Err(Failure::new(Code::Invalid, message))
            }
        }
    }

    /// Replaces the file.
    pub fn save(&self) -> Result<()> {
        let path = Self::file()?;
        let failed =
            |error: String| Failure::new(Code::Other, format!("cannot write {}: {error}", path.display()));
        let text = toml::to_string(self).map_err(|error| failed(error.to_string()))?;
        replace(&path, &text).map_err(|error| failed(error.to_string()))
    }

    /// The context with this name.
    pub fn get(&self, name: &str) -> Result<&Context> {
        self.contexts.get(name).ok_or_else(|| {
            Failure::new(Code::NotFound, format!("there is no context \"{name}\"")).hint(
                "`vmmctl config get-contexts` lists the contexts, `vmmctl config set-context` creates one",
            )
        })
    }
}

fn replace(path: &Path, text: &str) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    let new = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = fs::File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn contexts() -> Contexts {
        toml::from_str(
            "current = 'b'\n[contexts.a]\nendpoint = 'https://a:7443'\nca = '/ca'\ncert = '/a.crt'\nkey = '/a.key'\n\
             [contexts.b]\nsocket = '/b.sock'\n",
        )
        .unwrap()
    }

    fn given(option: &str, value: &str) -> Connection {
        let mut given = Connection::default();
        match option {
            "socket" => given.socket = Some(value.into()),
            "context" => given.context = Some(value.into()),
            _ => {}
        }
        given
    }

    #[rstest]
    #[case::flag(given("socket", "/s"), Some("/e"), Some("a"), "/s")]
    #[case::context_flag(given("context", "b"), Some("/e"), Some("a"), "/b.sock")]
    #[case::socket_variable(given("", ""), Some("/e"), Some("a"), "/e")]
    #[case::context_variable(given("", ""), None, Some("a"), "a:7443")]
    #[case::current(given("", ""), None, None, "/b.sock")]
    fn nearest_setting_selects_the_daemon(
        #[case] given: Connection,
        #[case] socket: Option<&str>,
        #[case] context: Option<&str>,
        #[case] expected: &str,
    ) {
        let environment = Environment {
            socket: socket.map(Into::into),
            context: context.map(Into::into),
        };
        let chosen = match choose(&given, environment, || Ok(contexts())).unwrap() {
            Target::Socket(path) => path.display().to_string(),
            Target::Remote(remote) => remote.address(),
        };
        assert_eq!(chosen, expected);
    }

    #[test]
    fn options_override_a_context() {
        let mut given = given("context", "a");
        given.cert = Some("/other.crt".into());
        let Target::Remote(remote) = choose(&given, Environment::default(), || Ok(contexts())).unwrap()
        else {
            panic!("no endpoint");
        };
        assert_eq!((remote.cert, remote.key), ("/other.crt".into(), "/a.key".into()));
        given.context = Some("c".into());
        let failure = choose(&given, Environment::default(), || Ok(contexts())).unwrap_err();
        assert_eq!(failure.code, Code::NotFound);
        let none = choose(&Connection::default(), Environment::default(), || {
            Ok(Contexts::default())
        });
        assert_eq!(none.unwrap(), Target::Socket(SOCKET.into()));
        given.context = None;
        given.endpoint = Some("https://a".into());
        let failure = choose(&given, Environment::default(), || Ok(contexts())).unwrap_err();
        assert!(
            failure.code == Code::Usage && failure.message.contains("--ca"),
            "{failure}"
        );
    }
}
