//! Guests with an agent.

use tonic::{Response, Status, Streaming};
use vmmd_api::v1::{self, write_guest_file_request::Message};

use super::{Answer, Events, State};

impl State {
    pub(super) fn set_password(
        &self,
        request: &v1::SetGuestPasswordRequest,
    ) -> Answer<v1::SetGuestPasswordResponse> {
        self.find(&request.name)?;
        let v1::SetGuestPasswordRequest {
            user,
            password,
            crypted,
            ..
        } = request;
        self.called(format!("password of {user}: {password:?}, crypted={crypted}"));
        Ok(Response::new(v1::SetGuestPasswordResponse {}))
    }

    pub(super) fn ssh_keys(
        &self,
        request: &v1::ListGuestSshKeysRequest,
    ) -> Answer<v1::ListGuestSshKeysResponse> {
        self.find(&request.name)?;
        let keys = vec![format!("ssh-ed25519 AAAA {}", request.user)];
        Ok(Response::new(v1::ListGuestSshKeysResponse { keys }))
    }

    pub(super) fn change_ssh_keys(
        &self,
        request: &v1::UpdateGuestSshKeysRequest,
    ) -> Answer<v1::UpdateGuestSshKeysResponse> {
        self.find(&request.name)?;
        self.called(format!(
            "keys of {}: +{:?} -{:?}",
            request.user, request.add, request.remove
        ));
        Ok(Response::new(v1::UpdateGuestSshKeysResponse {}))
    }

    /// The file `/cut` ends early.
    pub(super) fn read_file(
        &self,
        request: &v1::ReadGuestFileRequest,
    ) -> Answer<Events<v1::ReadGuestFileResponse>> {
        use v1::read_guest_file_response::Message;
        self.find(&request.name)?;
        let message = |message| {
            Ok(v1::ReadGuestFileResponse {
                message: Some(message),
            })
        };
        let mut messages = vec![message(Message::Data(
            format!("content of {}", request.path).into_bytes(),
        ))];
        if request.path != "/cut" {
            let bytes = 11 + request.path.len() as u64;
            messages.push(message(Message::End(v1::GuestFileEnd { bytes })));
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(messages))))
    }

    pub(super) async fn write_file(
        &self,
        mut messages: Streaming<v1::WriteGuestFileRequest>,
    ) -> Answer<v1::WriteGuestFileResponse> {
        let (mut path, mut content) = (String::new(), Vec::new());
        while let Some(request) = messages.message().await? {
            match request.message {
                Some(Message::Open(open)) => {
                    self.find(&open.name)?;
                    path = open.path;
                }
                Some(Message::Data(data)) => content.extend(data),
                Some(Message::End(end)) => {
                    assert_eq!(end.bytes, content.len() as u64);
                    self.called(format!("{path}: {}", String::from_utf8(content).unwrap()));
                    return Ok(Response::new(v1::WriteGuestFileResponse { bytes: end.bytes }));
                }
                None => {}
            }
        }
        Err(Status::aborted("incomplete"))
    }
}

/// The description of each guest by its agent.
pub fn info() -> v1::GuestInfo {
    v1::GuestInfo {
        agent_version: "7.2.0".into(),
        os: Some(v1::GuestOs {
            pretty_name: "Debian GNU/Linux 12 (bookworm)".into(),
            kernel_release: "6.1.0-18-amd64".into(),
            machine: "x86_64".into(),
            ..Default::default()
        }),
        host_name: "web".into(),
        time_zone: "CET".into(),
        utc_offset_seconds: -5400,
        interfaces: vec![v1::GuestInterface {
            name: "eth0".into(),
            mac: "52:54:00:00:00:01".into(),
            addresses: vec!["10.0.0.5/24".into(), "fe80::1/64".into()],
        }],
        file_systems: vec![v1::GuestFileSystem {
            name: "vda1".into(),
            mount_point: "/".into(),
            r#type: "ext4".into(),
            total_bytes: Some(4 << 30),
            used_bytes: Some(1 << 30),
        }],
        users: vec![v1::GuestUser {
            name: "ann".into(),
            login_time: None,
        }],
        incomplete: true,
        ..Default::default()
    }
}
