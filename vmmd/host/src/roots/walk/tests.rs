//! The walk beside openat2(2) itself.

use std::{
    fs,
    os::unix::fs::symlink,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use rustix::fs::ResolveFlags;

use super::*;

/// Reference for the walk.
fn by_kernel(folder: &OwnedFd, rest: &Path, flags: OFlags, links: Links) -> Result<OwnedFd, Errno> {
    let mut resolve = ResolveFlags::NO_MAGICLINKS | ResolveFlags::BENEATH;
    resolve.set(ResolveFlags::NO_SYMLINKS, links == Links::Refused);
    // openat2(2): EAGAIN when anything is renamed or mounted anywhere while a `..` is followed, as other tests do.
    let mut tries = 0;
    loop {
        match rustix::fs::openat2(folder, rest, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) if tries < 1000 => tries += 1,
            opened => return opened,
        }
    }
}

fn folder(path: &Path) -> OwnedFd {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).unwrap()
}

fn inode(fd: &OwnedFd) -> (u64, u64) {
    let stat = rustix::fs::fstat(fd).unwrap();
    (stat.st_dev, stat.st_ino)
}

#[test]
fn each_path_leads_where_the_kernel_would_lead_it() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir_all(at("in/sub/deep")).unwrap();
    fs::create_dir(at("out")).unwrap();
    for file in ["in/file", "in/sub/file", "in/sub/deep/file", "out/secret"] {
        fs::write(at(file), file).unwrap();
    }
    for (target, link) in [
        ("sub", "in/link"),
        ("sub/../sub/deep", "in/around"),
        ("../file", "in/sub/up"),
        ("../../out", "in/sub/escape"),
        ("../out/secret", "in/secret"),
        ("deep/../../../out", "in/sub/far"),
        ("/", "in/absolute"),
        ("/proc/self/root", "in/magic"),
        ("none", "in/dangling"),
        ("loop", "in/loop"),
        (".", "in/here"),
        ("../in/file", "in/out-and-back"),
    ] {
        symlink(target, at(link)).unwrap();
    }
    // 40 links one behind the other are followed, 41 are not.
    for number in 0..41 {
        let target = if number == 0 {
            "file".into()
        } else {
            format!("chain{}", number - 1)
        };
        symlink(target, at(&format!("in/chain{number}"))).unwrap();
    }
    let inside = folder(&at("in"));
    let paths = [
        ".",
        "file",
        "sub",
        "sub/file",
        "sub/deep/file",
        "link",
        "link/file",
        "around",
        "around/file",
        "sub/up",
        "sub/escape",
        "sub/escape/secret",
        "secret",
        "sub/far",
        "sub/far/secret",
        "absolute",
        "absolute/etc",
        "magic",
        "magic/etc",
        "dangling",
        "dangling/below",
        "loop",
        "loop/below",
        "here/here/file",
        "sub/../file",
        "..",
        "../in",
        "../in/file",
        "../out",
        "sub/../..",
        "sub/../../out",
        "file/below",
        "file/..",
        "none",
        "none/..",
        "link/..",
        "link/../file",
        "around/../../..",
        "around/../../file",
        "here/..",
        "out-and-back",
        "chain39",
        "chain40",
        "chain39/..",
    ];
    let mut opened = 0;
    for path in paths {
        let kinds = [
            OFlags::PATH | OFlags::DIRECTORY,
            OFlags::RDONLY | OFlags::DIRECTORY,
            OFlags::RDONLY,
            OFlags::RDWR,
            OFlags::PATH,
        ];
        let both = [Links::Followed, Links::Refused];
        for (flags, links) in kinds.iter().flat_map(|flags| both.map(|links| (*flags, links))) {
            let flags = flags | OFlags::CLOEXEC;
            let kernel = by_kernel(&inside, Path::new(path), flags, links);
            let walked = open(inside.as_fd(), Path::new(path), flags, links);
            opened += u32::from(walked.is_ok());
            let seen = |opened: Result<OwnedFd, Errno>| opened.map(|fd| inode(&fd));
            assert_eq!(seen(walked), seen(kernel), "{path} {flags:?} {links:?}");
        }
    }
    assert!(opened > 40, "{opened}");
}

#[test]
fn links_of_procfs_lead_nowhere() {
    let own = folder(Path::new("/proc/self"));
    for path in ["root", "root/etc", "cwd", "exe", "fd/0", "ns/net"] {
        let (walked, kernel) = (
            open(
                own.as_fd(),
                Path::new(path),
                OFlags::PATH | OFlags::CLOEXEC,
                Links::Followed,
            ),
            by_kernel(
                &own,
                Path::new(path),
                OFlags::PATH | OFlags::CLOEXEC,
                Links::Followed,
            ),
        );
        assert!(
            walked.is_err() && kernel.is_err(),
            "{path}: {walked:?} {kernel:?}"
        );
    }
    let status = open(
        own.as_fd(),
        Path::new("status"),
        OFlags::RDONLY | OFlags::CLOEXEC,
        Links::Followed,
    );
    assert!(status.is_ok(), "{status:?}");
}

#[test]
fn a_path_that_is_too_deep_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let deep = |folders: usize| "d/".repeat(folders);
    fs::create_dir_all(root.path().join(deep(MAX_DEPTH + 1))).unwrap();
    let inside = folder(root.path());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    assert!(
        open(
            inside.as_fd(),
            Path::new(&deep(MAX_DEPTH)),
            flags,
            Links::Followed
        )
        .is_ok()
    );
    let refused = open(
        inside.as_fd(),
        Path::new(&deep(MAX_DEPTH + 1)),
        flags,
        Links::Followed,
    );
    assert_eq!(refused.unwrap_err(), Errno::NAMETOOLONG);
}

/// Opens `paths` beneath `in`, at first alone and then while another thread does `change` over and over. Each file that is opened has
/// "inside". Returns the number of files that were opened; a busy machine may open none during the changes.
fn race(root: &Path, paths: &[&str], change: impl Fn() + Send) -> u32 {
    let over = AtomicBool::new(false);
    let mut opened = 0;
    let mut open_all = || {
        for path in paths {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let inside = folder(&root.join("in"));
            if let Ok(file) = open(inside.as_fd(), Path::new(path), flags, Links::Followed) {
                let text = std::io::read_to_string(fs::File::from(file)).unwrap();
                assert_eq!(text, "inside", "{path}");
                opened += 1;
            }
        }
    };
    open_all();
    thread::scope(|scope| {
        let over = &over;
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                change();
            }
        });
        for _ in 0..5000 {
            open_all();
        }
        over.store(true, Ordering::Relaxed);
    });
    opened
}

#[test]
fn whatever_is_renamed_meanwhile_nothing_outside_is_opened() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir_all(at("in/a/b/c")).unwrap();
    fs::create_dir_all(at("out/b/c")).unwrap();
    for file in ["in/name", "in/a/name", "in/a/b/name"] {
        fs::write(at(file), "inside").unwrap();
    }
    for file in ["name", "out/name", "out/b/name"] {
        fs::write(at(file), "outside").unwrap();
    }
    // A folder of the way moves out, and a link takes its place.
    let opened = race(
        root.path(),
        &["a/b/name", "a/b/c/../../name", "a/b/c/../name", "a/b/../../name"],
        || {
            let _ = fs::rename(at("in/a/b"), at("moved"));
            let _ = symlink("../../out/b", at("in/a/b"));
            let _ = fs::remove_file(at("in/a/b"));
            let _ = fs::rename(at("moved"), at("in/a/b"));
        },
    );
    assert!(opened > 0);
}

#[test]
fn a_link_that_takes_the_place_of_a_file_is_not_followed_out() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir_all(at("in")).unwrap();
    fs::write(at("secret"), "outside").unwrap();
    fs::write(at("in/file"), "inside").unwrap();
    fs::write(at("in/kept"), "inside").unwrap();
    let opened = race(root.path(), &["file"], || {
        // Each takes the name at once: there is always one of the two.
        let _ = symlink("../secret", at("in/new"));
        let _ = fs::rename(at("in/new"), at("in/file"));
        let _ = fs::hard_link(at("in/kept"), at("in/new"));
        let _ = fs::rename(at("in/new"), at("in/file"));
        let _ = fs::remove_file(at("in/new"));
    });
    assert!(opened > 0);
}
