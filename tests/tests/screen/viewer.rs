//! TigerVNC's viewer, or another one, on an X server without a screen in the node; and pictures that are kept.

use std::path::{Path, PathBuf};

use vmmd_tests::Case;
use vmmd_tests::node::Stream;
use vmmd_tests::wait::Deadline;

use super::picture::Picture;

/// By how much the X server's screen is larger, as a viewer shows scroll bars where there is no room for its window.
pub const ROOM: usize = 200;

/// The file that keeps a picture.
pub fn kept(case: &Case, name: &str) -> PathBuf {
    let folder = case.node().dir().join("screens");
    std::fs::create_dir_all(&folder).expect("a folder for pictures");
    folder.join(format!("{name}.png"))
}

/// An X server in the node whose picture is in a file, and a viewer in it. Both end when this is dropped.
pub struct Viewer<'a> {
    /// Size of the guest's screen, and so of the viewer's window.
    pub size: (usize, usize),
    case: &'a Case,
    display: String,
    folder: String,
    /// Both processes.
    pids: [String; 2],
    _streams: [Stream; 2],
}

impl<'a> Viewer<'a> {
    /// Starts `viewer`, a command of the shell.
    pub fn start(case: &'a Case, size: (usize, usize), viewer: &str) -> Self {
        let folder = case.folder();
        let line = |stream: &mut Stream| {
            let text = stream.until("\n", Deadline::seconds(60));
            text.trim().to_owned()
        };
        // The server says which number it has taken.
        let screen = format!("{}x{}x24", size.0 + ROOM, size.1 + ROOM);
        let command =
            format!("echo $$; exec Xvfb -displayfd 1 -screen 0 {screen} -fbdir {folder} 2>/dev/null");
        let mut server = case.node().stream(&command);
        let server_pid = line(&mut server);
        let display = format!(":{}", line(&mut server));
        case.node().sh(&format!("mkdir -p {folder}/.vnc"));
        let command = format!("echo $$; HOME={folder} DISPLAY={display} exec {viewer} 2>&1");
        let mut viewer = case.node().stream(&command);
        let viewer_pid = line(&mut viewer);
        Self {
            size,
            case,
            display,
            folder,
            pids: [viewer_pid, server_pid],
            _streams: [viewer, server],
        }
    }

    /// Where the viewer's window is, once it has the screen's size.
    pub fn place(&self) -> Option<(usize, usize)> {
        let ask = format!(
            "DISPLAY={} xdotool search --onlyvisible --name TigerVNC getwindowgeometry --shell %@ 2>/dev/null",
            self.display
        );
        let windows = self.case.node().ssh(&ask).expect("ssh").stdout;
        windows
            .split("WINDOW=")
            .find_map(|window| placed(window, self.size))
    }

    /// Does what somebody at the X server does, by a command of the shell, when the viewer's window has the focus.
    pub fn acts(&self, command: &str) {
        // Without a window manager no window has it.
        let command = format!(
            "export DISPLAY={}; xdotool search --onlyvisible --name TigerVNC windowfocus --sync %1 && {command}",
            self.display
        );
        self.case.node().sh(&command);
    }

    /// Picture of the viewer's window, or of the corner while the window does not have the screen's
    /// size. The PNG is kept as `name` beside the node's console.
    pub fn picture(&self, name: &str) -> Picture {
        let folder = tempfile::tempdir().expect("a folder");
        let raw = folder.path().join("screen.xwd");
        self.case
            .node()
            .copy_out(&format!("{}/Xvfb_screen0", self.folder), &raw)
            .expect("the X server's picture");
        let png = kept(self.case, name);
        let dump = std::fs::read(&raw).expect("the picture");
        convert(&dump, self.place().unwrap_or_default(), self.size, &png);
        let picture = Picture::read(&png);
        assert_eq!(picture.size(), self.size);
        picture
    }
}

impl Drop for Viewer<'_> {
    fn drop(&mut self) {
        // They may have ended.
        let _ = self.case.node().ssh(&format!("kill {}", self.pids.join(" ")));
    }
}

/// The place of a window of that size, of what xdotool prints of it.
fn placed(window: &str, wanted: (usize, usize)) -> Option<(usize, usize)> {
    let number = |key: &str| {
        window
            .lines()
            .find_map(|line| line.strip_prefix(key)?.parse().ok())
    };
    let size = (number("WIDTH=")?, number("HEIGHT=")?);
    (size == wanted).then_some((number("X=")?, number("Y=")?))
}

/// Converts the area at `(left, top)` in an X window dump (X11/XWDFile.h) to a PNG. The dump has a
/// header of big-endian words, a colour map, and then pixels.
fn convert(dump: &[u8], (left, top): (usize, usize), size: (usize, usize), png: &Path) {
    let word = |index: usize| {
        let bytes = dump[index * 4..index * 4 + 4].try_into().expect("four bytes");
        usize::try_from(u32::from_be_bytes(bytes)).expect("a number")
    };
    let (header, bits, line, colours) = (word(0), word(11), word(12), word(19));
    assert_eq!(bits, 32, "bits of a pixel");
    let start = header + colours * 12;
    let little = word(7) == 0;
    let rgb: Vec<u8> = (top..top + size.1)
        .flat_map(|y| dump[start + y * line..].chunks_exact(4).skip(left).take(size.0))
        .flat_map(|pixel| {
            if little {
                [pixel[2], pixel[1], pixel[0]]
            } else {
                [pixel[1], pixel[2], pixel[3]]
            }
        })
        .collect();
    save(&rgb, size, png);
}

/// Makes a PNG of pixels.
pub fn save(rgb: &[u8], size: (usize, usize), png: &Path) {
    let file = std::fs::File::create(png).expect("a file");
    let [width, height] = [size.0, size.1].map(|side| u32::try_from(side).expect("a side"));
    let mut encoder = png::Encoder::new(file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder
        .write_header()
        .expect("a header")
        .write_image_data(rgb)
        .expect("pixels");
}
