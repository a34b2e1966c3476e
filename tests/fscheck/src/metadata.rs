//! Metadata operations.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Timespec, Timestamps, XattrFlags};

use crate::{Check, Outcome, io_of, of};

/// In the order of the table.
pub const CHECKS: &[Check] = &[
    ("modes", modes),
    ("a mode is cut by the umask", umask),
    ("set-user-id and set-group-id bits", set_ids),
    ("times to the nanosecond", times),
    ("a folder's time changes with its entries", folder_time),
    ("links of a folder", folder_links),
    ("a write changes the time of a file", write_time),
    ("the longest name that is promised", promised),
    ("extended attributes", attributes),
    ("an attribute that is not there", no_attribute),
    (
        "a file without write permission is open to its user",
        own_permission,
    ),
];

fn modes(at: &Path) -> Outcome {
    fs::write(at.join("a"), "")?;
    let mut seen = Vec::new();
    for mode in [0o000, 0o400, 0o640, 0o777, 0o1755] {
        fs::set_permissions(at.join("a"), Permissions::from_mode(mode))?;
        seen.push(format!("{:o}", fs::metadata(at.join("a"))?.mode() & 0o7777));
    }
    Ok(seen.join(" "))
}

fn umask(at: &Path) -> Outcome {
    let before = rustix::process::umask(Mode::from_raw_mode(0o027));
    let made = rustix::fs::open(
        at.join("a"),
        OFlags::CREATE | OFlags::WRONLY,
        Mode::from_raw_mode(0o666),
    );
    let folder = fs::create_dir(at.join("b"));
    rustix::process::umask(before);
    made?;
    folder?;
    let mode = |name: &str| fs::metadata(at.join(name)).map(|metadata| metadata.mode() & 0o7777);
    Ok(format!("{:o} {:o}", mode("a")?, mode("b")?))
}

fn set_ids(at: &Path) -> Outcome {
    fs::write(at.join("a"), "")?;
    let set = |mode| io_of(fs::set_permissions(at.join("a"), Permissions::from_mode(mode)));
    let said = format!("{} {}", set(0o4755), set(0o2755));
    Ok(format!(
        "{said} {:o}",
        fs::metadata(at.join("a"))?.mode() & 0o7777
    ))
}

fn times(at: &Path) -> Outcome {
    let file = File::create(at.join("a"))?;
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    rustix::fs::futimens(
        &file,
        &Timestamps {
            last_access: time(1_000_000_001, 123_456_789),
            last_modification: time(2_000_000_002, 987_654_321),
        },
    )?;
    let known = fs::metadata(at.join("a"))?;
    Ok(format!(
        "{}.{} {}.{}",
        known.atime(),
        known.atime_nsec(),
        known.mtime(),
        known.mtime_nsec()
    ))
}

fn folder_time(at: &Path) -> Outcome {
    let old = Timespec {
        tv_sec: 1_000_000_000,
        tv_nsec: 0,
    };
    let folder = at.join("a");
    fs::create_dir(&folder)?;
    let times = Timestamps {
        last_access: old,
        last_modification: old,
    };
    rustix::fs::utimensat(CWD, &folder, &times, AtFlags::empty())?;
    fs::write(folder.join("b"), "")?;
    Ok((fs::metadata(&folder)?.mtime() > 1_000_000_000).to_string())
}

fn folder_links(at: &Path) -> Outcome {
    fs::create_dir_all(at.join("a/b"))?;
    fs::create_dir_all(at.join("a/c"))?;
    Ok(fs::metadata(at.join("a"))?.nlink().to_string())
}

fn write_time(at: &Path) -> Outcome {
    use std::io::Write as _;
    let mut file = File::create(at.join("a"))?;
    let old = Timespec {
        tv_sec: 1_000_000_000,
        tv_nsec: 0,
    };
    rustix::fs::futimens(
        &file,
        &Timestamps {
            last_access: old,
            last_modification: old,
        },
    )?;
    file.write_all(b"x")?;
    drop(file);
    Ok((fs::metadata(at.join("a"))?.mtime() > 1_000_000_000).to_string())
}

fn promised(at: &Path) -> Outcome {
    Ok(rustix::fs::statvfs(at)?.f_namemax.to_string())
}

fn attributes(at: &Path) -> Outcome {
    let path = at.join("a");
    fs::write(&path, "")?;
    rustix::fs::setxattr(&path, "user.one", b"1", XattrFlags::CREATE)?;
    let again = of(rustix::fs::setxattr(&path, "user.one", b"2", XattrFlags::CREATE));
    rustix::fs::setxattr(&path, "user.two", &[7; 1000], XattrFlags::empty())?;
    let mut value = [0; 2000];
    let (one, two) = (
        rustix::fs::getxattr(&path, "user.one", &mut value)?,
        rustix::fs::getxattr(&path, "user.two", &mut value)?,
    );
    rustix::fs::removexattr(&path, "user.one")?;
    let mut names = [0; 200];
    let listed = rustix::fs::listxattr(&path, &mut names)?;
    let listed = String::from_utf8_lossy(names.get(..listed).unwrap_or_default()).replace('\0', ",");
    let ours: Vec<_> = listed
        .split(',')
        .filter(|name| name.starts_with("user."))
        .collect();
    Ok(format!("{again} {one} {two} {ours:?}"))
}

fn no_attribute(at: &Path) -> Outcome {
    fs::write(at.join("a"), "")?;
    let mut value = [0; 10];
    Ok(of(rustix::fs::getxattr(at.join("a"), "user.none", &mut value)))
}

fn own_permission(at: &Path) -> Outcome {
    let flags = OFlags::CREATE | OFlags::WRONLY;
    // The mode counts from the next opening on.
    Ok(of(rustix::fs::open(at.join("a"), flags, Mode::empty())))
}
