//! `ConnectChannel`: the bytes of a channel to a program of a guest, over a stream.

use std::sync::Arc;

use tokio::net::UnixStream;
use tonic::Streaming;
use vmmd_api::v1::{ConnectChannelRequest, ConnectChannelResponse, connect_channel_request::Message};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use super::relay::{self, AtEnd, Messages, relay_with};
use crate::{host::Host, paths::RuntimeDir};

/// The stream to the client.
pub type Stream = relay::Stream<ConnectChannelResponse>;

/// Connects to the channel that the client's first message names.
pub async fn open(host: Arc<Host>, mut input: Streaming<ConnectChannelRequest>) -> Result<Stream, Failure> {
    let first = input.message().await.ok().flatten();
    let Some(Message::Open(open)) = first.and_then(|request| request.message) else {
        return Err(Failure::field("open", "must be the first message"));
    };
    let entry = host
        .vms
        .get(&open.name)
        .ok_or_else(|| Failure::no_vm(&open.name))?;
    let (runs, exists) = {
        let vm = entry.state.borrow();
        let runs = vm.status.as_ref().is_some_and(|status| status.instance.is_some());
        let mut channels = vm.spec.iter().flat_map(|spec| &spec.channels);
        (runs, channels.any(|channel| channel.name == open.channel))
    };
    if !runs {
        let message = "the VM is not running: start it first";
        return Err(Failure::precondition("NOT_RUNNING", message));
    }
    let none = |whose: &str, next: &str| {
        let name = text::brief(&open.channel);
        let message = format!("{whose} has no channel \"{name}\": {next}");
        Failure::precondition("NO_CHANNEL", message)
    };
    if !exists {
        return Err(none("the VM", "give it one in `channels` and restart it"));
    }
    let client = host.channels.take(entry.uid, &open.channel).ok_or_else(|| {
        let message = "another client has the channel: end its connection first";
        Failure::new(Kind::Precondition, "CHANNEL_IN_USE", message)
    })?;
    let path = RuntimeDir::of(&host.config, entry.uid).channel(&open.channel);
    let Ok(connection) = UnixStream::connect(path).await else {
        return Err(none("this run of the VM", "restart the VM"));
    };
    let messages = Messages {
        data: |request: ConnectChannelRequest| match request.message {
            Some(Message::Data(bytes)) => Some(bytes),
            _ => None,
        },
        answer: |data| ConnectChannelResponse { data },
        at_end: AtEnd::Stays,
    };
    Ok(relay_with(host, input, connection, messages, client))
}
