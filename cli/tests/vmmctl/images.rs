//! `vmmctl image import` of OCI images.

use vmmd_api::v1::{self, image_spec::Source};

use crate::support::{Daemon, done, image::MANIFEST, run, run_with_input};

fn source(daemon: &Daemon, name: &str) -> Source {
    daemon.state.image(name).unwrap().spec.unwrap().source.unwrap()
}

#[test]
fn registry_password_comes_from_a_file() {
    let daemon = Daemon::start();
    let import = [
        "image",
        "import",
        "debian",
        "oci://registry.example:5000/debian:13",
        "--quiet",
    ];
    let flags = [
        "--platform",
        "linux/arm64",
        "--username",
        "ci",
        "--password-file",
        "-",
    ];
    let made = "image/debian imported, 3Gi, blocks-sha256:5d0c\n";
    assert_eq!(
        run_with_input(&daemon, &[&import[..], &flags].concat(), "correct horse\n"),
        done(made)
    );
    let expected = v1::OciSource {
        reference: "registry.example:5000/debian:13".into(),
        platform: "linux/arm64".into(),
        plain_http: false,
        credentials: Some(v1::OciCredentials {
            username: "ci".into(),
            password: "correct horse".into(),
        }),
    };
    assert_eq!(source(&daemon, "debian"), Source::Oci(expected));
    let (code, shown, _) = run(&daemon, &["image", "describe", "debian"]);
    let wanted = |line: &str| {
        shown
            .lines()
            .any(|shown| shown.split_whitespace().collect::<Vec<_>>().join(" ") == line)
    };
    assert_eq!(code, 0);
    assert!(wanted("Source: oci://registry.example:5000/debian:13"), "{shown}");
    assert!(wanted(&format!("Manifest: {MANIFEST}")), "{shown}");
}

#[test]
fn import_is_followed_across_a_slow_restart() {
    let daemon = Daemon::start();
    daemon.state.refuse_watches(6);
    let import = ["image", "import", "debian", "https://mirror.example/debian.qcow2"];
    let made = "image/debian imported, 3Gi, blocks-sha256:5d0c\n";
    assert_eq!(run(&daemon, &[&import[..], &["--quiet"]].concat()), done(made));
}

#[test]
fn an_image_of_a_folder_is_imported_by_tag() {
    let daemon = Daemon::start();
    let (code, _, said) = run(
        &daemon,
        &[
            "image",
            "import",
            "debian",
            "oci-layout:/srv/debian:13",
            "--quiet",
        ],
    );
    assert_eq!((code, said.as_str()), (0, ""));
    let expected = v1::OciLayoutSource {
        path: "/srv/debian".into(),
        reference: "13".into(),
        platform: String::new(),
    };
    assert_eq!(source(&daemon, "debian"), Source::OciLayout(expected));
}

#[test]
fn flags_that_do_not_fit_are_refused_before_anything_is_asked() {
    let daemon = Daemon::start();
    let registry = "oci://registry.example/debian";
    for (args, words) in [
        (vec![registry, "--username", "ci"], "--password-file"),
        (vec![registry, "--password-file", "-"], "--username"),
        (
            vec!["https://a.b/c", "--platform", "linux/arm64"],
            "--platform is for an OCI image",
        ),
        (
            vec!["oci-layout:/a", "--plain-http"],
            "for an image of a registry",
        ),
    ] {
        let (code, _, said) = run(&daemon, &[vec!["image", "import", "debian"], args].concat());
        assert_eq!((code, said.contains(words)), (2, true), "{said}");
    }
    assert_eq!(daemon.state.image("debian"), None);
}
