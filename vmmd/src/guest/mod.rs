//! The agent in a guest: qemu-guest-agent, which reads a line of JSON from its channel and answers
//! with a line of JSON.
//!
//! Questions go through a [`Session`], which has the agent for itself. An agent is not trusted: its
//! answers are bounded in length and time, and its texts in length and characters.

mod account;
mod command;
mod exec;
mod file;
mod freeze;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod info;
mod list;
mod notice;
mod session;
mod shutdown;
mod socket;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

pub use self::{
    command::Command,
    exec::{Ended, FIRST_LOOK, LAST_LOOK, end_of},
    file::GuestFile,
    freeze::{Frozen, freeze, may_be_frozen, thaw},
    info::look,
    notice::Notices,
    session::Session,
    shutdown::shut_down_late,
    socket::open_socket,
};
use crate::{host::Host, paths::RuntimeDir, registry::vms::Entry};

/// Channel to the agent of a VM.
#[derive(Debug)]
pub struct Agent<'a> {
    host: &'a Host,
    entry: &'a Entry,
}

impl<'a> Agent<'a> {
    /// The agent of a VM that runs and has a channel to one. Whether it answers is seen at the first
    /// question.
    pub fn of(host: &'a Host, entry: &'a Entry) -> Result<Self, Failure> {
        let vm = entry.state.borrow();
        if vm.spec.as_ref().is_none_or(|spec| spec.guest_agent.is_none()) {
            let message = "the VM has no channel to an agent: give it a `guestAgent` and restart it";
            return Err(Failure::precondition("NO_GUEST_AGENT", message));
        }
        let phase = vm.status.as_ref().map(v1::VmStatus::phase);
        if phase != Some(v1::VmPhase::Running) {
            let message = "the VM is not running: start or resume it first";
            return Err(Failure::precondition("NOT_RUNNING", message));
        }
        drop(vm);
        Ok(Self { host, entry })
    }

    /// Waits for a turn at the agent, and connects to it. The agent answers.
    pub async fn session(&self) -> Result<Session, Failure> {
        let turn = self.host.agents.turn(self.entry.uid).await;
        let path = RuntimeDir::of(&self.host.config, self.entry.uid).agent();
        let Ok(stream) = UnixStream::connect(path).await else {
            let message = "this run of the VM has no channel to an agent: restart the VM";
            return Err(Failure::precondition("NO_GUEST_AGENT", message));
        };
        Session::begin(stream, turn).await
    }

    /// Asks one question.
    async fn ask<T: DeserializeOwned>(&self, command: &str, arguments: Value) -> Result<T, Failure> {
        self.session().await?.ask(command, arguments).await
    }
}

fn silent() -> Failure {
    let message =
        "no agent answers in the guest: has the guest started, and does qemu-guest-agent run in it?";
    Failure::new(Kind::Unavailable, "GUEST_AGENT_SILENT", message)
}

fn confused(why: &str) -> Failure {
    let message = format!("the guest's agent gave an invalid answer: {}", text::brief(why));
    Failure::precondition("GUEST_AGENT_ERROR", message)
}
