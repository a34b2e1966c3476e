//! Names of requests in the log.

use vmm_protocol::vmm::request::Op;

/// One CamelCase word.
pub(super) fn name(op: &Op) -> &'static str {
    match op {
        Op::Hello(_) => "Hello",
        Op::Boot(_) => "Boot",
        Op::Pause(_) => "Pause",
        Op::Resume(_) => "Resume",
        Op::PowerButton(_) => "PowerButton",
        Op::Stop(_) => "Stop",
        Op::GetStatus(_) => "GetStatus",
        Op::AttachDisk(_) => "AttachDisk",
        Op::DetachDisk(_) => "DetachDisk",
        Op::AttachNic(_) => "AttachNic",
        Op::DetachNic(_) => "DetachNic",
        Op::ResizeDisk(_) => "ResizeDisk",
        Op::SetRateLimit(_) => "SetRateLimit",
        Op::GetDiskStats(_) => "GetDiskStats",
        Op::ResetMachine(_) => "ResetMachine",
        Op::AttachShare(_) => "AttachShare",
        Op::DetachShare(_) => "DetachShare",
        Op::SetShareBackend(_) => "SetShareBackend",
        Op::UpdateNic(_) => "UpdateNic",
        Op::SetBalloon(_) => "SetBalloon",
        Op::GetMachineStats(_) => "GetMachineStats",
        Op::Save(_) => "Save",
        Op::Send(_) => "Send",
        Op::Release(_) => "Release",
        Op::UnlockDisks(_) => "UnlockDisks",
        Op::SendBreak(_) => "SendBreak",
        Op::ResizeConsole(_) => "ResizeConsole",
    }
}
