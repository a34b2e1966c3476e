//! The fuzz target of a launcher's messages.

use vmmd_pod::message::LauncherMessage;
use vmmd_wire::Receiver;

use super::{
    hello::{Assembly, Checked},
    stream::LIMITS,
};
use crate::registry::pods::Pods;

/// Takes bytes as a launcher's frames, up to a Hello.
pub fn launcher_messages(bytes: &[u8]) {
    let (ours, theirs) = match std::os::unix::net::UnixStream::pair() {
        Ok(pair) => pair,
        Err(_) => return,
    };
    let bytes = bytes.get(..64 << 10).unwrap_or(bytes);
    if std::io::Write::write_all(&mut &theirs, bytes).is_err() {
        return;
    }
    drop(theirs);
    let (pods, mut assembly) = (Pods::default(), Assembly::default());
    let mut receiver = Receiver::<LauncherMessage>::limited(LIMITS);
    while let Ok(Some((message, fds))) = vmmd_wire::receive(&ours, &mut receiver) {
        match assembly.take(&pods, message, fds) {
            Ok(None) => {}
            Ok(Some((hello, _))) => {
                let _checked = Checked::new(hello);
                return;
            }
            Err(_) => return,
        }
    }
}
