//! The stored probes of a VM.

use vmmd_api::v1;

use super::{Mirror, stored};

stored! {
    /// Periodic checks of a guest.
    ProbesSpec of v1::ProbesSpec {
        #[prost(message, optional, tag = "1")]
        startup: Option<Probe>,
        #[prost(message, optional, tag = "2")]
        readiness: Option<Probe>,
        #[prost(message, optional, tag = "3")]
        liveness: Option<Probe>,
    }
}

stored! {
    /// A periodic check.
    Probe of v1::Probe {
        #[prost(oneof = "Check", tags = "1, 2, 3, 4, 5")]
        check: Option<Check>,
        #[prost(uint32, tag = "10")]
        initial_delay_seconds: u32,
        #[prost(uint32, tag = "11")]
        period_seconds: u32,
        #[prost(uint32, tag = "12")]
        timeout_seconds: u32,
        #[prost(uint32, tag = "13")]
        success_threshold: u32,
        #[prost(uint32, tag = "14")]
        failure_threshold: u32,
    }
}

/// Of [`Probe`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Check {
    #[prost(message, tag = "1")]
    Tcp(TcpCheck),
    #[prost(message, tag = "2")]
    Http(HttpCheck),
    #[prost(message, tag = "3")]
    Exec(ExecCheck),
    #[prost(message, tag = "4")]
    Agent(AgentCheck),
    #[prost(message, tag = "5")]
    Notify(NotifyCheck),
}

stored! {
    /// A connection.
    TcpCheck of v1::TcpCheck {
        #[prost(uint32, tag = "1")]
        port: u32,
        #[prost(string, tag = "2")]
        nic: String,
    }
}

stored! {
    /// A request by HTTP.
    HttpCheck of v1::HttpCheck {
        #[prost(uint32, tag = "1")]
        port: u32,
        #[prost(string, tag = "2")]
        path: String,
        #[prost(string, tag = "3")]
        nic: String,
        #[prost(bool, tag = "4")]
        tls: bool,
        #[prost(message, repeated, tag = "5")]
        headers: Vec<HttpHeader>,
    }
}

stored! {
    /// A header of a request.
    HttpHeader of v1::HttpHeader {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "2")]
        value: String,
    }
}

stored! {
    /// A command in the guest.
    ExecCheck of v1::ExecCheck {
        #[prost(string, repeated, tag = "1")]
        command: Vec<String>,
    }
}

stored! {
    /// A question to the agent.
    AgentCheck of v1::AgentCheck {}
}

stored! {
    /// Notifications of the guest.
    NotifyCheck of v1::NotifyCheck {}
}

impl Mirror<Check> for v1::probe::Check {
    fn mirror(self) -> Check {
        match self {
            Self::Tcp(tcp) => Check::Tcp(tcp.mirror()),
            Self::Http(http) => Check::Http(http.mirror()),
            Self::Exec(exec) => Check::Exec(exec.mirror()),
            Self::Agent(agent) => Check::Agent(agent.mirror()),
            Self::Notify(notify) => Check::Notify(notify.mirror()),
        }
    }
}

impl Mirror<v1::probe::Check> for Check {
    fn mirror(self) -> v1::probe::Check {
        match self {
            Self::Tcp(tcp) => v1::probe::Check::Tcp(tcp.mirror()),
            Self::Http(http) => v1::probe::Check::Http(http.mirror()),
            Self::Exec(exec) => v1::probe::Check::Exec(exec.mirror()),
            Self::Agent(agent) => v1::probe::Check::Agent(agent.mirror()),
            Self::Notify(notify) => v1::probe::Check::Notify(notify.mirror()),
        }
    }
}
