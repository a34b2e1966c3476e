//! The VM in the answer of a request: the store keeps which VM it is, and a retry shows the VM as it is then. So an answer is small,
//! also for a VM with a large spec.

use prost::Message;
use uuid::Uuid;
use vmmd_api::v1;

use super::Ports;

macro_rules! responses {
    ($($method:literal: $response:ident),* $(,)?) => {
        /// The methods whose response shows a VM.
        #[cfg(test)]
        pub const METHODS: &[&str] = &[$($method),*];

        /// Changes the VM in the response of a method; `None` when the response shows no VM.
        fn change(method: &str, response: &[u8], change: impl FnOnce(&mut v1::Vm)) -> Option<Vec<u8>> {
            match method {
                $($method => {
                    let mut decoded = v1::$response::decode(response).ok()?;
                    change(decoded.vm.as_mut()?);
                    Some(decoded.encode_to_vec())
                })*
                _ => None,
            }
        }
    };
}

responses! {
    "CreateVm": CreateVmResponse,
    "UpdateVm": UpdateVmResponse,
    "ResetVm": ResetVmResponse,
    "InjectNmi": InjectNmiResponse,
    "StartVm": StartVmResponse,
    "StopVm": StopVmResponse,
    "RestartVm": RestartVmResponse,
    "PauseVm": PauseVmResponse,
    "ResumeVm": ResumeVmResponse,
    "AttachDisk": AttachDiskResponse,
    "DetachDisk": DetachDiskResponse,
    "ResizeVmDisk": ResizeVmDiskResponse,
    "RestoreVm": RestoreVmResponse,
}

/// The response with the name, uid and generation of its VM only.
pub fn brief(method: &str, response: Vec<u8>) -> Vec<u8> {
    let brief = change(method, &response, |vm| {
        let metadata = vm.metadata.take().unwrap_or_default();
        *vm = v1::Vm {
            metadata: Some(v1::ObjectMetadata {
                name: metadata.name,
                uid: metadata.uid,
                generation: metadata.generation,
                ..Default::default()
            }),
            ..Default::default()
        };
    });
    brief.unwrap_or(response)
}

/// The response with its VM as it is now. A VM that is not on the node any more stays as the response has it.
pub fn filled(host: &impl Ports, method: &str, response: Vec<u8>) -> Vec<u8> {
    let filled = change(method, &response, |vm| {
        let uid = vm
            .metadata
            .as_ref()
            .map(|metadata| Uuid::parse_str(&metadata.uid));
        if let Some(now) = uid.and_then(Result::ok).and_then(|uid| host.vm(uid)) {
            *vm = now.as_ref().clone();
        }
    });
    filled.unwrap_or(response)
}
