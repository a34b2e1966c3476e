//! Real programs that show screens: TigerVNC's viewer on an X server without a screen, and noVNC in Chromium.

#[path = "screen/glyphs.rs"]
mod glyphs;
#[path = "screen/picture.rs"]
mod picture;
#[path = "screen/viewer.rs"]
mod viewer;

use std::time::Duration;

use glyphs::Font;
use picture::Picture;
use serde_json::json;
use vmmd_tests::browser::{Area, Browser};
use vmmd_tests::node::{Forward, Kernel, SCREENS, quote};
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Guests, paths};

use viewer::{ROOM, Viewer, kept, save};

/// Size of the guest's screen.
const SIZE: (usize, usize) = (1024, 768);

/// Of the guest's root. It is short, as nobody sees whether all of it has come: an older keyboard controller keeps a few keys only.
const PASSWORD: &str = "lab1";

/// From one picture to the next. Neither an X server nor a page tells when it shows something new.
const PAUSE: Duration = Duration::from_millis(500);

/// A guest whose text console is on its screen, without a driver for the adapter.
fn with_text(case: &Case) -> (Vm<'_>, Console) {
    let kernel = Kernel::Cloud612;
    // As a bzImage: an ELF is entered another way, which does not tell of screens.
    let spec = VmSpec::new(Guests.vmlinuz(kernel), Some(Guests.initrd(kernel)))
        .cmdline(kernel.arguments())
        .set("/display", json!({ "width": SIZE.0, "height": SIZE.1 }));
    let vm = Vm::start(case, "", &spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    (vm, console)
}

/// Whatever shows the guest's screen, and has a keyboard.
trait Shows {
    /// Types a line that nothing may be shown of.
    fn enters(&mut self, line: &str);

    /// Logs in where the guest asks for that, in the third row. What is typed then is in the sixth.
    fn logs_in(&mut self, name: &str, font: &Font) {
        self.shows(name, font, 2, "lab login:");
        self.enters("root");
        self.shows(name, font, 2, "lab login: root");
        self.shows(name, font, 3, "Password:");
        self.enters(PASSWORD);
        // What is typed before the shell reads is thrown away.
        self.shows(name, font, 4, "welcome");
    }

    /// What is shown of the screen now. The PNG is kept as `name` beside the node's console.
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

/// Clears the guest's screen, writes the alphabet into its first row, and has somebody asked for a name and a password below. Who gives them can type
/// commands.
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
        console.run(command, 60).expect(command);
    }
}

#[test]
fn tigervncs_viewer_shows_the_text_console_and_what_is_typed_in_it() {
    let case = Case::new("tigervnc").expect("node");
    let (vm, mut console) = with_text(&case);
    prepare(&mut console);
    // Without a window's frame and a toolbar, the window is the screen. The address needs no password.
    let mut viewer = Viewer::start(&case, SIZE, &format!("vmmctl vnc {}", vm.name()));
    let font = viewer.learn("tigervnc-alphabet");
    viewer.logs_in("tigervnc-login", &font);
    viewer.enters("echo $((6 * 7)) {A} '~' ok");
    viewer.shows("tigervnc-typed", &font, 5, "echo $((6 * 7)) {A} '~' ok");
    viewer.shows("tigervnc-typed", &font, 6, "42 {A} ~ ok");

    let picture = snapshot(&case, &vm, "vncsnapshot");
    let font = picture.learn(0).expect("the alphabet");
    assert_eq!(picture.text(&font, 2), "lab login: root");
    assert_eq!(picture.text(&font, 6), "42 {A} ~ ok");
}

/// The picture that vncsnapshot takes of a screen, an old client without a window. It makes JPEG of it, so each of its pixels counts as light or dark.
fn snapshot(case: &Case, vm: &Vm<'_>, name: &str) -> Picture {
    let folder = case.folder().expect("folder");
    let serve = format!(
        "echo $$; exec vmmctl vnc {} --listen 127.0.0.1:0 2>/dev/null",
        vm.name()
    );
    let mut served = case.node().stream(&serve).expect("vmmctl vnc");
    served
        .until("127.0.0.1:", Deadline::seconds(60))
        .expect("an address");
    served.until("\n", Deadline::seconds(60)).expect("a whole line");
    let text = served.text();
    let (process, address) = text.trim().split_once('\n').expect("two lines");
    let address = address.replace(':', "::");
    case.node()
        .sh(&format!(
            "vncsnapshot -quality 100 {address} {folder}/{name}.jpg && djpeg -pnm {folder}/{name}.jpg >{folder}/{name}.pnm; \
             code=$?; kill -INT {process}; exit $code"
        ))
        .expect("a snapshot");
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

#[test]
fn tigervncs_viewer_gets_in_by_tls_with_a_password() {
    let case = Case::new("password").expect("node");
    let (vm, mut console) = with_text(&case);
    prepare(&mut console);
    let way = vm.ctl_with("vnc", "--password 2>/dev/null").expect("a password");
    let (address, password) = way.trim().split_once(' ').expect("two words");
    let address = address.replace(':', "::");
    let file = format!("{}/password", case.folder().expect("folder"));
    case.node()
        .sh(&format!(
            "printf '%s\\n' {} | vncpasswd -f > {file}",
            quote(password)
        ))
        .expect("a file for the viewer");
    let mut viewer = Viewer::start(
        &case,
        SIZE,
        &format!(
            "vncviewer -Shared -SecurityTypes X509Vnc -X509CA {SCREENS}/ca.crt -PasswordFile {file} {address}"
        ),
    );
    let font = viewer.learn("password-alphabet");
    viewer.logs_in("password-login", &font);
    viewer.enters("echo in");
    viewer.shows("password-typed", &font, 6, "in");
}

/// noVNC's page in a browser on this machine.
struct Page<'a> {
    case: &'a Case,
    browser: Browser,
}

/// Size of the page: noVNC shows the guest's screen in its middle.
const PAGE: (usize, usize) = (SIZE.0 + 2 * ROOM, SIZE.1 + ROOM);

/// The place of the guest's screen in the page; `null` as long as noVNC is not connected.
const CANVAS: &str = "(() => { const canvas = document.querySelector('#noVNC_container canvas'); if (!canvas) return null; \
                      const place = canvas.getBoundingClientRect(); return [place.left, place.top]; })()";

impl Page<'_> {
    /// Types a line into a row of the screen. Like somebody at a keyboard, it is no quicker than the guest: an older keyboard controller keeps
    /// a few keys only.
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

    /// Keeps a picture of the whole page.
    fn keep(&mut self, name: &str) {
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
fn address(vm: &Vm<'_>, web: &Forward) -> String {
    let url = vm.ctl_with("vnc", "--web 2>/dev/null").expect("an address");
    let (_, page) = url.trim().split_once("/vnc.html").expect("noVNC's page");
    format!("https://127.0.0.1:{}/vnc.html{page}", web.port)
}

#[test]
fn novnc_in_a_browser_shows_the_text_console_and_what_is_typed_in_it_once_for_each_address() {
    let case = Case::new("novnc").expect("node");
    let node = case.node();
    let package = format!("{}/novnc.deb", case.folder().expect("folder"));
    node.copy_in(&paths::novnc(), &package)
        .expect("noVNC, which tests/setup-host.sh fetches");
    node.sh(&format!("dpkg-deb -x {package} /"))
        .expect("noVNC's files");
    let (vm, mut console) = with_text(&case);
    prepare(&mut console);
    let web = node.forward("127.0.0.1:6080").expect("a port");

    // A browser that does not know the CA warns, and has used nothing up.
    let first = address(&vm, &web);
    let mut stranger = Browser::start(PAGE, None).expect("a browser");
    let warning = stranger.open(&first).expect_err("the CA is unknown").to_string();
    assert!(warning.contains("ERR_CERT_AUTHORITY_INVALID"), "{warning}");
    drop(stranger);

    let folder = tempfile::tempdir().expect("a folder");
    let authority = folder.path().join("ca.crt");
    node.copy_out(&format!("{SCREENS}/ca.crt"), &authority)
        .expect("the CA");
    let browser = Browser::start(PAGE, Some(&authority)).expect("a browser");
    let mut page = Page { case: &case, browser };
    page.browser.open(&first).expect("the page");
    let font = page.learn("novnc-alphabet");
    page.logs_in("novnc-login", &font);
    page.types("novnc-typed", &font, 5, "echo $((6 * 7)) {A} '~' ok");
    page.shows("novnc-typed", &font, 6, "42 {A} ~ ok");
    page.keep("novnc-page");

    page.browser.reload().expect("an answer");
    let text = page.browser.text().expect("a text");
    assert!(
        text.contains("`vmmctl vnc <VM> --web` prints another one"),
        "{text}"
    );
    page.keep("novnc-used");
    page.browser.open(&address(&vm, &web)).expect("the page");
    page.shows("novnc-again", &font, 6, "42 {A} ~ ok");
}
