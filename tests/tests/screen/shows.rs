//! A guest with somebody to log in on its screen, and what each client does with it.

use std::time::Duration;

use serde_json::json;
use vmmd_tests::node::{Kernel, quote};
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Guests};

use super::glyphs::{self, Font};
use super::picture::Picture;
use super::viewer::Viewer;

/// Size of the guest's screen.
pub const SIZE: (usize, usize) = (1024, 768);

/// Password of the guest's root. It is short because its echo is invisible and an older keyboard
/// controller buffers only a few keys.
pub const PASSWORD: &str = "lab1";

/// Has characters that need Shift and AltGr on some keyboards.
const COMMAND: &str = "echo $((6 * 7)) {A} '~' ok";

/// Output of a shell for the command.
pub const ANSWER: &str = "42 {A} ~ ok";

/// Interval between two pictures. Neither an X server nor a page reports new content.
const PAUSE: Duration = Duration::from_millis(500);

/// A guest with its text console on its screen, by the kernel's initial framebuffer, or by a driver
/// for the adapter where the kernel has one. After a login there, commands can be typed.
pub fn guest(case: &Case, kernel: Kernel) -> Vm<'_> {
    let spec = if kernel == Kernel::Generic612 {
        case.screen_guest(kernel)
    } else {
        // A bzImage, because the entry path of an ELF does not report screens.
        VmSpec::new(Guests.vmlinuz(kernel), Some(Guests.initrd(kernel))).cmdline(kernel.arguments())
    };
    let spec = spec.set("/display", json!({ "width": SIZE.0, "height": SIZE.1 }));
    let (vm, mut console) = Vm::boot(case, "", &spec);
    prepare(&mut console);
    vm
}

/// Clears the guest's screen, writes the alphabet into its first row, and starts a login prompt
/// with name and password below. After the login, commands can be typed.
fn prepare(console: &mut Console) {
    let alphabet: String = glyphs::alphabet().collect();
    let quoted = alphabet.replace('\'', "'\\''");
    for command in [
        &format!("printf '\\033[?25l\\033[2J\\033[H%s\\n\\n' '{quoted}' > /dev/tty1"),
        "hostname lab; mkdir -p /etc; ln -sf busybox /bin/login",
        "printf '#!/bin/sh\\necho welcome\\nwhile read -r line; do eval \"$line\"; done\\n' >/bin/lines; chmod 755 /bin/lines",
        &format!(
            "printf 'root:%s:0:0::/:/bin/lines\\n' \"$(busybox mkpasswd -m sha512 {PASSWORD} </dev/null)\" >/etc/passwd"
        ),
        "setsid busybox getty -i -L 0 tty1 linux & true",
    ] {
        console.run(command);
    }
}

/// A viewer of the guest's screen with a keyboard.
pub trait Shows {
    /// Types a line that nothing may be shown of.
    fn enters(&mut self, line: &str);

    /// Logs in at the prompt in the third row. Later input appears in the sixth row.
    fn logs_in(&mut self, name: &str, font: &Font) {
        self.shows(name, font, 2, "lab login:");
        self.enters("root");
        self.shows(name, font, 2, "lab login: root");
        self.shows(name, font, 3, "Password:");
        self.enters(PASSWORD);
        // Input before the shell reads is lost.
        self.shows(name, font, 4, "welcome");
    }

    /// Types a line into a row of the screen, and waits until the screen shows it.
    fn types(&mut self, name: &str, font: &Font, row: usize, line: &str) {
        self.enters(line);
        self.shows(name, font, row, line);
    }

    /// Finds the login prompt on the guest's screen, logs in, types a command, and checks the
    /// shell's output. Pictures of each step are kept under names that begin with `name`.
    fn is_used(&mut self, name: &str) -> Font {
        let font = self.learn(&format!("{name}-alphabet"));
        self.logs_in(&format!("{name}-login"), &font);
        self.types(&format!("{name}-typed"), &font, 5, COMMAND);
        self.shows(&format!("{name}-typed"), &font, 6, ANSWER);
        font
    }

    /// Current picture of the screen. The PNG is kept as `name` beside the node's console.
    fn picture(&mut self, name: &str) -> Picture;

    /// Waits until the picture has the alphabet, and learns the font from it.
    fn learn(&mut self, name: &str) -> Font {
        let deadline = Deadline::seconds(120);
        loop {
            if let Some(font) = self.picture(name).learn(0) {
                return font;
            }
            assert!(!deadline.passed(), "no text on the screen");
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until a row of the picture has a text.
    fn shows(&mut self, name: &str, font: &Font, row: usize, wanted: &str) {
        let deadline = Deadline::seconds(90);
        loop {
            let text = self.picture(name).text(font, row);
            if text == wanted {
                return;
            }
            assert!(!deadline.passed(), "row {row} has {text:?} and not {wanted:?}");
            std::thread::sleep(PAUSE);
        }
    }
}

impl Shows for Viewer<'_> {
    fn enters(&mut self, line: &str) {
        self.acts(&format!(
            "xdotool type --delay 60 {} && xdotool key Return",
            quote(line)
        ));
    }

    fn picture(&mut self, name: &str) -> Picture {
        Viewer::picture(self, name)
    }
}
