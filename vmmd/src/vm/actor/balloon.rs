//! How much of its memory a guest is asked to leave to the node.

use std::time::Duration;

use tokio::time::timeout;
use vmm_protocol::vmm::{ErrorKind, SetBalloon, request::Op};
use vmmd_host::failure::{Failure, Kind};

use crate::{
    control::{self, Client},
    vm::start,
};

/// Timeout of the request to the `vmm`.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Has a machine's balloon hold that many bytes.
pub async fn tell(client: Client, held_bytes: u64) -> Result<(), Failure> {
    let op = Op::SetBalloon(SetBalloon {
        target_bytes: held_bytes,
    });
    let asked = timeout(TIMEOUT, client.request(op, &[])).await;
    match asked.unwrap_or(Err(control::Error::Timeout(TIMEOUT))) {
        Ok(_) => Ok(()),
        Err(control::Error::Refused(remote)) if remote.kind() == ErrorKind::NotFound => {
            let message = "the running machine has no balloon: restart the VM to give it one";
            Err(Failure::precondition("NO_BALLOON", message))
        }
        Err(control::Error::Refused(remote)) if remote.kind() == ErrorKind::State => {
            Err(Failure::precondition("NOT_NOW", remote.message))
        }
        Err(error @ control::Error::Timeout(_)) => Err(Failure::new(
            Kind::Unavailable,
            "VMM_UNRESPONSIVE",
            error.to_string(),
        )),
        Err(error) => Err(start::refused(&error)),
    }
}
