//! One check of a guest. Guests are not trusted: of an answer by HTTP only the status is used, and
//! the time limit is that of the caller.

use std::{
    net::{IpAddr, SocketAddr},
    sync::OnceLock,
};

use http::header::HOST;
use reqwest::{Client, redirect};
use tokio::net::TcpStream;
use uuid::Uuid;
use vmmd_host::{failure::Failure, text};
use vmmd_spec::probe::{Check, Port};

use crate::{
    guest::{Agent, end_of},
    host::Host,
    registry::vms::Entry,
    vm::address::address,
};

/// Name of the client in requests.
const USER_AGENT: &str = concat!("vmmd-probe/", env!("CARGO_PKG_VERSION"));

/// Carries out the checks of a prober.
#[derive(Debug, Default)]
pub struct Checker {
    /// Made for the first request.
    client: OnceLock<Result<Client, String>>,
}

impl Checker {
    /// Carries out a check. The error says why it has failed.
    pub async fn check(&self, host: &Host, uid: Uuid, check: &Check) -> Result<(), String> {
        let entry = host.vms.find(uid).ok_or("the VM is gone")?;
        match check {
            Check::Tcp(port) => connect(socket(&entry, port)?).await,
            Check::Http {
                port,
                path,
                tls,
                headers,
            } => {
                let scheme = if *tls { "https" } else { "http" };
                let url = format!("{scheme}://{}{path}", socket(&entry, port)?);
                self.get(&url, headers).await
            }
            Check::Exec(command) => exec(host, &entry, command).await,
            Check::Agent => match Agent::of(host, &entry) {
                // The agent has answered when a session begins.
                Ok(agent) => agent.session().await.map(drop).map_err(words),
                Err(failure) => Err(words(failure)),
            },
            // The prober follows the notifications.
            Check::Notify => Ok(()),
        }
    }

    async fn get(&self, url: &str, headers: &[(String, String)]) -> Result<(), String> {
        let client = self.client.get_or_init(client).as_ref().map_err(String::clone)?;
        let mut request = client.get(url);
        for (name, value) in headers {
            request = match name.eq_ignore_ascii_case(HOST.as_str()) {
                true => request.header(HOST, value),
                false => request.header(name, value),
            };
        }
        let answer = request.send().await;
        let answer = answer.map_err(|error| format!("{url}: {}", vmmd_images::http_words(&error)))?;
        let status = answer.status();
        match status.as_u16() {
            200..400 => Ok(()),
            _ => Err(format!("{url}: status {status}")),
        }
    }
}

/// A client that connects to guests only: it follows no redirect and uses no proxy.
fn client() -> Result<Client, String> {
    let client = Client::builder()
        .user_agent(USER_AGENT)
        .no_proxy()
        .redirect(redirect::Policy::none())
        .danger_accept_invalid_certs(true)
        .http1_only()
        .pool_max_idle_per_host(0)
        .build();
    client.map_err(|error| error.to_string())
}

fn socket(entry: &Entry, port: &Port) -> Result<SocketAddr, String> {
    let address: IpAddr = address(&entry.state.borrow(), &port.nic).map_err(words)?;
    Ok((address, port.number).into())
}

async fn connect(address: SocketAddr) -> Result<(), String> {
    let connection = TcpStream::connect(address).await;
    connection
        .map(drop)
        .map_err(|error| format!("connect to {address}: {}", text::words(&error)))
}

async fn exec(host: &Host, entry: &Entry, command: &[String]) -> Result<(), String> {
    let ended = async {
        let pid = Agent::of(host, entry)?.start(command, &[], &[]).await?;
        end_of(host, entry, pid).await
    };
    let ended = ended.await.map_err(words)?;
    match (ended.code, ended.signal) {
        (Some(0), None) => Ok(()),
        (_, Some(signal)) => Err(format!("the command was ended by signal {signal}")),
        (code, None) => {
            let said = String::from_utf8_lossy(&ended.stderr);
            let said = text::one_line(said.trim(), 200);
            let code = code.unwrap_or_default();
            Err(format!("the command ended with code {code}: {said}"))
        }
    }
}

fn words(failure: Failure) -> String {
    failure.message
}
