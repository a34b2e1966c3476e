//! Programs that show screens, and input in them: TigerVNC's viewer on an X server without a
//! screen, vncdotool, and noVNC in Chromium.

use super::commands::{CommandLine, snapshot};
use super::page::{PAGE, Page, address};
use super::shows::{ANSWER, SIZE, Shows, guest};
use super::viewer::Viewer;
use rstest::rstest;
use vmmd_tests::browser::Browser;
use vmmd_tests::node::{Kernel, SCREENS, quote};
use vmmd_tests::{Case, paths};

#[rstest]
#[case::without_a_driver(Kernel::Cloud612)]
#[case::nightly_with_a_driver(Kernel::Generic612)]
fn vncdotool_shows_the_text_console_and_takes_input(#[case] kernel: Kernel) {
    let case = Case::new("vncdotool");
    let vm = guest(&case, kernel);
    CommandLine::new(&case, &vm).is_used(&format!("vncdotool-{}", kernel.name()));
}

#[test]
fn tigervncs_viewer_gets_in_by_tls_with_a_password() {
    let case = Case::new("password");
    let vm = guest(&case, Kernel::Cloud612);
    let way = vm.ctl_with("vnc", "--password 2>/dev/null");
    let (address, password) = way.trim().split_once(' ').expect("two words");
    let address = address.replace(':', "::");
    let file = format!("{}/password", case.folder());
    case.node().sh(&format!(
        "printf '%s\\n' {} | vncpasswd -f > {file}",
        quote(password)
    ));
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

#[rstest]
#[case::nightly_without_a_driver(Kernel::Cloud612)]
#[case::with_a_driver(Kernel::Generic612)]
fn novnc_shows_the_text_console_once_for_each_address(#[case] kernel: Kernel) {
    let case = Case::new("novnc");
    let node = case.node();
    let package = format!("{}/novnc.deb", case.folder());
    node.copy_in(&paths::novnc(), &package)
        .expect("noVNC, which tests/setup-host.sh fetches");
    // Another case of this test may have brought them, or is about to.
    node.sh(&format!(
        "flock /run/novnc sh -c '[ -e /usr/share/novnc/vnc.html ] || dpkg-deb -x {package} /'"
    ));
    let vm = guest(&case, kernel);
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
    let name = format!("novnc-{}", kernel.name());
    let font = page.is_used(&name);
    page.keep(&format!("{name}-page"));

    page.browser.reload().expect("an answer");
    let text = page.browser.text().expect("a text");
    assert!(
        text.contains("`vmmctl vnc <VM> --web` prints another one"),
        "{text}"
    );
    page.keep(&format!("{name}-used"));
    page.browser.open(&address(&vm, &web)).expect("the page");
    page.shows(&format!("{name}-again"), &font, 6, ANSWER);
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[rstest]
    #[case::without_a_driver(Kernel::Cloud612)]
    #[case::with_a_driver(Kernel::Generic612)]
    fn tigervnc_shows_the_text_console_and_takes_input(#[case] kernel: Kernel) {
        let case = Case::new("tigervnc");
        let vm = guest(&case, kernel);
        // Without a window's frame and a toolbar, the window is the screen. The address needs no password.
        let mut viewer = Viewer::start(&case, SIZE, &format!("vmmctl vnc {}", vm.name()));
        viewer.is_used(&format!("tigervnc-{}", kernel.name()));

        let picture = snapshot(&case, &vm, &format!("vncsnapshot-{}", kernel.name()));
        let font = picture.learn(0).expect("the alphabet");
        assert_eq!(picture.text(&font, 2), "lab login: root");
        assert_eq!(picture.text(&font, 6), ANSWER);
    }
}
