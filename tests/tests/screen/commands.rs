//! Clients without a window: vncdotool, which looks and types, and vncsnapshot, which looks.

use std::process::Command;

use vmmd_tests::node::Forward;
use vmmd_tests::vm::Vm;
use vmmd_tests::{Case, paths};

use super::picture::Picture;
use super::served::Served;
use super::shows::{SIZE, Shows};
use super::viewer::{kept, save};

/// vncdotool on this machine. It reconnects for each line and for each picture.
pub struct CommandLine<'a> {
    port: Forward,
    served: Served<'a>,
}

impl<'a> CommandLine<'a> {
    /// Has the VM's screen served for it.
    pub fn new(case: &'a Case, vm: &Vm<'_>) -> Self {
        let served = Served::start(case, vm);
        let port = case.node().forward(&served.address).expect("a port");
        Self { port, served }
    }

    fn does(&self, actions: &[&str]) {
        let server = format!("--server=127.0.0.1::{}", self.port.port);
        // Like somebody at a keyboard: an older keyboard controller keeps a few keys only.
        let output = Command::new(paths::vncdo())
            .args([server.as_str(), "--delay=60", "--timeout=60"])
            .args(actions)
            .output()
            .expect("vncdotool, which .ci/setup installs");
        assert!(output.status.success(), "{actions:?}: {output:?}");
    }
}

impl Shows for CommandLine<'_> {
    fn enters(&mut self, line: &str) {
        self.does(&["type", line, "key", "enter"]);
    }

    fn picture(&mut self, name: &str) -> Picture {
        let png = kept(self.served.case, name);
        self.does(&["capture", png.to_str().expect("a path in UTF-8")]);
        Picture::read(&png)
    }
}

/// The picture that vncsnapshot takes of a screen, an old client without a window. It makes JPEG of it, so each of its pixels counts as light or dark.
pub fn snapshot(case: &Case, vm: &Vm<'_>, name: &str) -> Picture {
    let folder = case.folder();
    let served = Served::start(case, vm);
    let address = served.address.replace(':', "::");
    case.node()
        .sh(&format!(
            "vncsnapshot -quality 100 {address} {folder}/{name}.jpg && djpeg -pnm {folder}/{name}.jpg >{folder}/{name}.pnm"
        ));
    let local = tempfile::tempdir().expect("a folder");
    let pnm = local.path().join("picture.pnm");
    case.node()
        .copy_out(&format!("{folder}/{name}.pnm"), &pnm)
        .expect("the picture");
    let bytes = std::fs::read(&pnm).expect("the picture");
    let header = format!("P6\n{} {}\n255\n", SIZE.0, SIZE.1);
    let pixels = bytes
        .strip_prefix(header.as_bytes())
        .expect("a picture of the screen's size");
    let clear: Vec<u8> = pixels
        .chunks_exact(3)
        .flat_map(|rgb| [if rgb[1] < 85 { 0 } else { 255 }; 3])
        .collect();
    let png = kept(case, name);
    save(&clear, SIZE, &png);
    Picture::read(&png)
}
