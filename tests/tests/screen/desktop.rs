//! A guest with a desktop: an X server that draws with the processor alone, a window manager and a terminal, looked at with TigerVNC's viewer.
//! `make nightly` runs this.

use std::time::Duration;

use super::picture::Picture;
use super::viewer::{Viewer, kept};
use base64::Engine as _;
use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::quote;
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::wait::Deadline;

/// The whole Debian boots for one to three minutes in an emulated node, and the desktop comes after it.
const BOOT: u64 = 400;
const LARGE: (usize, usize) = (1920, 1080);
const SMALL: (usize, usize) = (1280, 800);
/// No cursor reaches further from the pointer's place, in pixels.
const CURSOR: usize = 64;
/// Interval between two pictures: no event reports a new picture.
const PAUSE: Duration = Duration::from_millis(500);

/// The guest, and a viewer of its screen.
struct Desktop<'a> {
    case: &'a Case,
    console: Console,
    viewer: Viewer<'a>,
}

impl Desktop<'_> {
    /// Runs a command on the guest's X server, from outside of it.
    fn guest(&mut self, command: &str) -> String {
        let command = format!("export DISPLAY=:0; {command}");
        self.console.run(&command)
    }

    /// Waits until a command on the guest's X server prints something.
    fn prints(&mut self, command: &str, wanted: &str) {
        let deadline = Deadline::seconds(120);
        loop {
            let text = self.guest(command);
            if text.trim() == wanted {
                return;
            }
            assert!(!deadline.passed(), "{command}: {text:?} and not {wanted:?}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Content of the screen according to the guest's X server, without the cursor.
    fn own_picture(&mut self, name: &str) -> Picture {
        let text = self.guest(
            "xwd -root -silent | xwdtopnm -quiet | pnmtopng -quiet -force -compression 9 | base64 -w 0",
        );
        let png = base64::engine::general_purpose::STANDARD
            .decode(text.trim())
            .expect("base64");
        let file = kept(self.case, name);
        std::fs::write(&file, png).expect("a file");
        Picture::read(&file)
    }

    /// Moves the viewer's pointer to a place of the guest's screen, and returns the cursor: pixels around it that the guest's own picture has not,
    /// by their places from the pointer. All others are the same.
    fn looks_the_same(&mut self, name: &str, pointer: (usize, usize)) -> Vec<(usize, usize, u32)> {
        let deadline = Deadline::seconds(120);
        let (left, top) = self.window();
        let (x, y) = (left + pointer.0, top + pointer.1);
        let place = format!("x:{} y:{} ", pointer.0, pointer.1);
        // A pointer movement before the viewer has received a new screen size refers to the old
        // size.
        loop {
            self.viewer
                .acts(&format!("xdotool mousemove {} {y} mousemove {x} {y}", x - 1));
            let told = self.guest("xdotool getmouselocation");
            if told.starts_with(&place) {
                break;
            }
            assert!(
                !deadline.passed(),
                "the guest's pointer is at {told:?} and not at {place}"
            );
            std::thread::sleep(PAUSE);
        }
        loop {
            let own = self.own_picture(&format!("{name}-guest"));
            let seen = self.viewer.picture(name);
            let near = |at: usize, place: usize| at + CURSOR > place && at < place + CURSOR;
            let (cursor, wrong): (Vec<_>, Vec<_>) = differences(&seen, &own)
                .into_iter()
                .partition(|(x, y, _)| near(*x, pointer.0) && near(*y, pointer.1));
            if wrong.is_empty() && !cursor.is_empty() {
                let from_pointer = |(x, y, pixel)| (x + CURSOR - pointer.0, y + CURSOR - pointer.1, pixel);
                return cursor.into_iter().map(from_pointer).collect();
            }
            assert!(
                !deadline.passed(),
                "{name}: {} pixels are others than in the guest, {:?} the first; the cursor has {}",
                wrong.len(),
                wrong.first(),
                cursor.len()
            );
            std::thread::sleep(PAUSE);
        }
    }

    /// Where the viewer's window is, when it has got the screen's size.
    fn window(&self) -> (usize, usize) {
        let deadline = Deadline::seconds(120);
        loop {
            if let Some(place) = self.viewer.place() {
                return place;
            }
            assert!(
                !deadline.passed(),
                "the viewer has no window of {:?}",
                self.viewer.size
            );
            std::thread::sleep(PAUSE);
        }
    }

    /// Types a line with the viewer.
    fn enters(&self, line: &str) {
        self.viewer.acts(&format!(
            "xdotool type --delay 60 {} && xdotool key Return",
            quote(line)
        ));
    }

    /// Checks the size of the screen, for the guest and the viewer.
    fn has_size(&mut self, size: (usize, usize)) {
        self.prints("xdotool getdisplaygeometry", &format!("{} {}", size.0, size.1));
        self.viewer.size = size;
        self.window();
    }
}

/// Positions at which two pictures differ, with the pixels of the first picture.
fn differences(here: &Picture, there: &Picture) -> Vec<(usize, usize, u32)> {
    if here.size() != there.size() {
        return vec![(0, 0, 0)];
    }
    let pixels = here.pixels.iter().zip(&there.pixels).enumerate();
    pixels
        .filter(|(_, (here, there))| here != there)
        .map(|(at, (pixel, _))| (at % here.width, at / here.width, *pixel))
        .collect()
}

#[test]
fn desktop_in_a_viewer_equals_the_guests_drawing() {
    let case = Case::new("desktop");
    let guests = case.node().guests();
    let disk = case.desktop_disk();
    let spec = VmSpec::new(guests.desktop("vmlinuz"), Some(guests.desktop("initrd")))
        .memory_mib(768)
        .disk("root", &disk, false)
        .set("/display", json!({ "width": LARGE.0, "height": LARGE.1 }))
        .cmdline("root=/dev/vda rw quiet");
    let vm = Vm::start(&case, "", &spec);
    let mut console = vm.console();
    console.until("root@desktop", BOOT);
    let viewer = Viewer::start(&case, LARGE, &format!("vmmctl vnc {}", vm.name()));
    let mut desktop = Desktop {
        case: &case,
        console,
        viewer,
    };
    desktop.guest("timeout 110 sh -c 'until xdotool search --onlyvisible --class xterm; do sleep 1; done' >/dev/null 2>&1");
    desktop.has_size(LARGE);

    // The viewer says nothing of moves before the first click.
    let (left, top) = desktop.window();
    desktop.viewer.acts(&format!(
        "xdotool mousemove {} {} click 1",
        left + 1700,
        top + 900
    ));

    // Over the empty desktop, then over the terminal, whose cursor is another.
    let arrow = desktop.looks_the_same("desktop", (1800, 1000));
    let beam = desktop.looks_the_same("desktop-terminal", (400, 400));
    let shape = |cursor: &[(usize, usize, u32)]| -> Vec<(usize, usize)> {
        cursor.iter().map(|(x, y, _)| (*x, *y)).collect()
    };
    assert_ne!(shape(&arrow), shape(&beam), "a terminal's cursor is no arrow");
    // The driver's cursor has 64 x 64 pixels, and most of them are transparent.
    for cursor in [arrow, beam] {
        assert!(cursor.len() < 400, "a cursor of {} pixels", cursor.len());
    }

    // Somebody types, and the terminal scrolls.
    desktop.enters("seq 1 300; echo $((6 * 7)) >/tmp/typed");
    // The terminal is still busy with what scrolls.
    desktop.prints(
        "timeout 60 sh -c 'until [ -s /tmp/typed ]; do sleep 0.2; done'; cat /tmp/typed",
        "42",
    );
    // The pointer is outside the terminal, which hides the pointer during typing.
    desktop.looks_the_same("desktop-scrolled", (1800, 1000));

    // The window is moved by its title, 300 pixels to the right and 200 down.
    let place =
        "xwininfo -id $(xdotool search --onlyvisible --class xterm) | awk '/Absolute/ { print $NF }' | xargs";
    let before = desktop.guest(place);
    let (x, y) = before.trim().split_once(' ').expect("two numbers");
    let [x, y]: [usize; 2] = [x, y].map(|number| number.parse().expect("a number"));
    let (left, top) = desktop.window();
    let title = (left + x + 200, top + y - 10);
    desktop.viewer.acts(&format!(
        "xdotool mousemove {} {} && xdotool mousedown 1 && for step in 1 2 3 4 5 6 7 8 9 10; do xdotool mousemove_relative 30 20; done; xdotool mouseup 1",
        title.0, title.1
    ));
    desktop.prints(place, &format!("{} {}", x + 300, y + 200));
    desktop.looks_the_same("desktop-moved", (1800, 1000));

    // The viewer makes the window smaller and larger again, and the guest follows.
    for size in [SMALL, LARGE] {
        desktop.viewer.acts(&format!(
            "xdotool search --onlyvisible --name TigerVNC windowsize %1 {} {}",
            size.0, size.1
        ));
        desktop.has_size(size);
        desktop.looks_the_same(&format!("desktop-{}", size.0), (size.0 - 70, size.1 - 70));
    }

    // The guest changes its screen size, and the viewer follows.
    desktop.guest("xrandr --output Virtual-1 --mode 1024x768");
    desktop.has_size((1024, 768));
    desktop.looks_the_same("desktop-1024", (900, 700));
}
