//! As `swtpm`: says in the directory of its state how it was started, and serves nothing.

use std::{
    env,
    fs::{self, File},
    io::Read,
    os::fd::{FromRawFd, OwnedFd},
};

/// Ends when its client goes.
pub fn run() -> ! {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let state = arguments
        .iter()
        .find_map(|word| word.strip_prefix("--tpmstate=dir="));
    let (state, _) = state.unwrap().split_once(',').unwrap();
    let own = rustix::process::getpid().as_raw_nonzero();
    fs::write(
        format!("{state}/served"),
        format!("{own}\n{}", arguments.join("\n")),
    )
    .unwrap();
    #[allow(unsafe_code)]
    // SAFETY: the descriptor was passed to this process for this use.
    let mut data = File::from(unsafe { OwnedFd::from_raw_fd(3) });
    let _ = data.read_to_end(&mut Vec::new());
    std::process::exit(0)
}
