//! The address of a VM's screen for any client.

use vmmd_tests::Case;
use vmmd_tests::node::Stream;
use vmmd_tests::vm::Vm;
use vmmd_tests::wait::Deadline;

/// `vmmctl vnc --listen` in the node. It ends when this is dropped.
pub struct Served<'a> {
    /// Without a password.
    pub address: String,
    pub case: &'a Case,
    /// Of vmmctl.
    pub process: String,
    _stream: Stream,
}

impl<'a> Served<'a> {
    pub fn start(case: &'a Case, vm: &Vm<'_>) -> Self {
        let serve = format!(
            "echo $$; exec vmmctl vnc {} --listen 127.0.0.1:0 2>/dev/null",
            vm.name()
        );
        let mut stream = case.node().stream(&serve);
        stream.until("127.0.0.1:", Deadline::seconds(60));
        stream.until("\n", Deadline::seconds(60));
        let text = stream.text();
        let (process, address) = text.trim().split_once('\n').expect("two lines");
        Self {
            address: address.to_owned(),
            case,
            process: process.to_owned(),
            _stream: stream,
        }
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.case.node().ssh(&format!("kill -INT {}", self.process));
    }
}
