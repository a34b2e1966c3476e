//! noVNC's page in Chromium on this machine.

use vmmd_tests::Case;
use vmmd_tests::browser::{Area, Browser};
use vmmd_tests::node::Forward;
use vmmd_tests::vm::Vm;

use super::glyphs::Font;
use super::picture::Picture;
use super::shows::{SIZE, Shows};
use super::viewer::{ROOM, kept};

/// noVNC's page in a browser on this machine.
pub struct Page<'a> {
    pub case: &'a Case,
    pub browser: Browser,
}

/// Size of the page: noVNC shows the guest's screen in its middle.
pub const PAGE: (usize, usize) = (SIZE.0 + 2 * ROOM, SIZE.1 + ROOM);

/// The place of the guest's screen in the page; `null` as long as noVNC is not connected.
const CANVAS: &str = "(() => { const canvas = document.querySelector('#noVNC_container canvas'); if (!canvas) return null; \
                      const place = canvas.getBoundingClientRect(); return [place.left, place.top]; })()";

impl Page<'_> {
    /// Keeps a picture of the whole page.
    pub fn keep(&mut self, name: &str) {
        let (width, height) = PAGE;
        let page = Area {
            left: 0,
            top: 0,
            width,
            height,
        };
        let png = self.browser.screenshot(page).expect("a picture");
        std::fs::write(kept(self.case, name), png).expect("a file");
    }
}

impl Shows for Page<'_> {
    fn enters(&mut self, line: &str) {
        self.browser.type_text(line).expect("keys");
        self.browser.press("Enter", "Enter").expect("a key");
    }

    /// Like somebody at a keyboard, it is no quicker than the guest: an older keyboard controller keeps a few keys only.
    fn types(&mut self, name: &str, font: &Font, row: usize, line: &str) {
        let characters: Vec<char> = line.chars().collect();
        let mut typed = String::new();
        for word in characters.chunks(8) {
            let word: String = word.iter().collect();
            self.browser.type_text(&word).expect("keys");
            typed.push_str(&word);
            self.shows(name, font, row, typed.trim_end());
        }
        self.enters("");
    }

    fn picture(&mut self, name: &str) -> Picture {
        let place = self.browser.evaluate(CANVAS).expect("the page");
        let place =
            serde_json::from_value::<Option<(usize, usize)>>(place).expect("a whole number of pixels");
        let (left, top) = place.unwrap_or_default();
        let (width, height) = SIZE;
        let area = Area {
            left,
            top,
            width,
            height,
        };
        let png = self.browser.screenshot(area).expect("a picture");
        let file = kept(self.case, name);
        std::fs::write(&file, png).expect("a file");
        Picture::read(&file)
    }
}

/// The address of a page with a VM's screen, as this machine reaches it.
pub fn address(vm: &Vm<'_>, web: &Forward) -> String {
    let url = vm.ctl_with("vnc", "--web 2>/dev/null");
    let (_, page) = url.trim().split_once("/vnc.html").expect("noVNC's page");
    format!("https://127.0.0.1:{}/vnc.html{page}", web.port)
}
