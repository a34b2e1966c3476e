//! Landlock without a single rule: no file is opened, made, removed, run or truncated by path, no TCP port bound
//! or connected to; where the kernel has scopes (ABI 6, Linux 6.12), no signal goes to a process outside and no
//! abstract UNIX socket of others is connected to; no socket file either from ABI 9 on (Linux 7.1), and from ABI 10 on (7.2) no
//! UDP port. Descriptors that are open stay usable.

use anyhow::{Context, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, Ruleset, RulesetAttr, Scope,
};

/// How much of a restriction the host's kernel can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// All that was asked for.
    Full,
    /// A part.
    Partial,
    /// Nothing.
    None,
}

/// Newest ABI that is asked for. An older kernel does a part of it.
const NEWEST: ABI = ABI::V10;
/// A kernel with this ABI limits files, TCP, signals and abstract sockets.
const FULL: ABI = ABI::V6;

/// Restricts this thread and all that it makes. Says how much of it the kernel does.
///
/// # Errors
///
/// The kernel has Landlock and refuses the restriction.
pub fn enforce() -> Result<Level> {
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|rules| rules.scope(Scope::from_all(NEWEST)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self())
        .context("restricting the process with Landlock")?;
    Ok(match status.landlock {
        LandlockStatus::Available { effective_abi, .. } if effective_abi >= FULL => Level::Full,
        LandlockStatus::Available { .. } => Level::Partial,
        _ => Level::None,
    })
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::CString,
        fs::{self, File},
        io,
        net::{TcpListener, TcpStream, UdpSocket},
        os::{
            linux::net::SocketAddrExt as _,
            unix::{
                ffi::OsStrExt as _,
                fs::symlink,
                net::{SocketAddr, UnixDatagram, UnixListener, UnixStream},
            },
        },
        path::{Path, PathBuf},
        process::Command,
        thread,
    };

    use rustix::process::{Pid, test_kill_process};

    use super::*;

    type OnFiles = fn(&Path) -> io::Result<()>;
    type Does = Box<dyn Fn(&Path) -> io::Result<()> + Send>;

    /// Something that Landlock forbids.
    struct Deed {
        name: &'static str,
        /// From this ABI on.
        since: libc::c_long,
        errno: i32,
        /// Does it in a folder that has two files and an empty folder.
        deed: Does,
    }

    fn deed(
        (name, since, errno): (&'static str, libc::c_long, i32),
        deed: impl Fn(&Path) -> io::Result<()> + Send + 'static,
    ) -> Deed {
        let deed = Box::new(deed);
        Deed {
            name,
            since,
            errno,
            deed,
        }
    }

    fn with_files() -> Vec<Deed> {
        let on_files: [(&'static str, OnFiles); 12] = [
            ("read", |own| File::open(own.join("file")).map(drop)),
            ("write", |own| {
                File::options().append(true).open(own.join("file")).map(drop)
            }),
            ("list", |own| fs::read_dir(own).map(drop)),
            ("execute", |_| Command::new("/bin/true").status().map(drop)),
            ("make a file", |own| File::create(own.join("new")).map(drop)),
            ("make a folder", |own| fs::create_dir(own.join("folder"))),
            ("make a symbolic link", |own| symlink("x", own.join("link"))),
            ("make a socket", |own| {
                UnixDatagram::bind(own.join("socket")).map(drop)
            }),
            ("link", |own| fs::hard_link(own.join("file"), own.join("second"))),
            ("rename", |own| fs::rename(own.join("file"), own.join("renamed"))),
            ("remove a file", |own| fs::remove_file(own.join("other"))),
            ("remove a folder", |own| fs::remove_dir(own.join("empty"))),
        ];
        let on_files = on_files.map(|(name, does)| deed((name, 1, libc::EACCES), does));
        on_files.into_iter().collect()
    }

    fn with_others(shared: &Path, process: Pid) -> Vec<Deed> {
        let (tcp, udp) = (
            TcpListener::bind("127.0.0.1:0").unwrap(),
            UdpSocket::bind("127.0.0.1:0").unwrap(),
        );
        let (path, file) = (shared.join("socket"), shared.join("truncated"));
        let listener = UnixListener::bind(&path).unwrap();
        fs::write(&file, "long").unwrap();
        let name = SocketAddr::from_abstract_name(shared.as_os_str().as_bytes()).unwrap();
        let named = UnixListener::bind_addr(&name).unwrap();
        vec![
            deed(("truncate", 3, libc::EACCES), move |_| truncate(&file)),
            deed(("connect by TCP", 4, libc::EACCES), move |_| {
                TcpStream::connect(tcp.local_addr()?).map(drop)
            }),
            deed(("listen by TCP", 4, libc::EACCES), |_| {
                TcpListener::bind("127.0.0.1:0").map(drop)
            }),
            deed(("signal another process", 6, libc::EPERM), move |_| {
                Ok(test_kill_process(process)?)
            }),
            deed(("connect to an abstract socket", 6, libc::EPERM), move |_| {
                UnixStream::connect_addr(&named.local_addr()?).map(drop)
            }),
            deed(("connect to a socket file", 9, libc::EACCES), move |_| {
                let address = listener.local_addr()?;
                UnixStream::connect(address.as_pathname().unwrap_or(&path)).map(drop)
            }),
            deed(("send by UDP", 10, libc::EACCES), move |_| {
                let own = UdpSocket::bind("127.0.0.1:0")?;
                own.send_to(b"x", udp.local_addr()?).map(drop)
            }),
        ]
    }

    #[allow(unsafe_code)]
    fn truncate(path: &Path) -> io::Result<()> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: the path ends with a NUL.
        match unsafe { libc::truncate(path.as_ptr(), 1) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The running kernel's ABI (landlock_create_ruleset(2), LANDLOCK_CREATE_RULESET_VERSION).
    #[allow(unsafe_code)]
    fn kernel() -> libc::c_long {
        // SAFETY: with this flag it reads no structure.
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) }
    }

    fn folder(of: &Path, name: &str) -> PathBuf {
        let folder = of.join(name);
        fs::create_dir_all(folder.join("empty")).unwrap();
        for file in ["file", "other"] {
            fs::write(folder.join(file), "x").unwrap();
        }
        folder
    }

    /// Landlock restricts the thread that asks for it.
    #[test]
    fn landlock_of_this_kernel_denies_each_forbidden_deed() {
        let shared = tempfile::tempdir().unwrap();
        let folders = ["before", "after"].map(|name| folder(shared.path(), name));
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Pid::from_child(&other);
        let deeds: Vec<_> = with_files()
            .into_iter()
            .chain(with_others(shared.path(), process))
            .collect();
        let restricted = thread::spawn(move || {
            let [before, after] = &folders;
            let open: Vec<_> = deeds.iter().map(|deed| (deed.deed)(before)).collect();
            let level = enforce().unwrap();
            let closed: Vec<_> = deeds.iter().map(|deed| (deed.deed)(after)).collect();
            (level, deeds, open, closed)
        });
        let (level, deeds, open, closed) = restricted.join().unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        let kernel = kernel();
        assert_eq!(level == Level::Full, kernel >= 6, "{kernel}");
        for ((deed, open), closed) in deeds.iter().zip(open).zip(closed) {
            assert!(open.is_ok(), "{}: {open:?}", deed.name);
            let errno = closed.err().and_then(|error| error.raw_os_error());
            let expected = (kernel >= deed.since).then_some(deed.errno);
            assert_eq!(errno, expected, "{}, ABI {kernel}", deed.name);
        }
    }
}
