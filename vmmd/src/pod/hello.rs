//! The first messages of a launcher: its files in pieces, then Hello. All of them are bounded and checked.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, stat};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use vmmd_host::text;
use vmmd_network::Resolver;
use vmmd_pod::{
    FIXED_FDS, MAX_DOMAIN, MAX_FILE, MAX_FILE_PATH, MAX_FILES, MAX_FILES_TOTAL, MAX_SEARCH, MAX_SERVERS,
    MAX_VOLUMES, message,
    message::{FilePiece, Hello, LauncherMessage, Position, launcher_message::Kind},
};
use vmmd_spec::{name::Name, pod::PodUid};

use super::{
    peer::Peer,
    stream::{Reader, Stream},
};
use crate::{
    host::Host,
    registry::pods::{Files, Names, Pod, Pods, Volume},
};

/// Longest name of a pod, a namespace or a VirtualMachine in bytes (RFC 1123, 2.1).
const MAX_NAME: usize = 253;

/// A pod that has said Hello.
#[derive(Debug)]
pub struct Greeted {
    /// The pod.
    pub pod: Pod,
    /// Behind the output that the launcher has received.
    pub position: Option<Position>,
    /// For the messages that follow.
    pub reader: Reader,
}

/// Receives the files and Hello; `None` when the launcher has closed the connection. The error is the reason of a refusal.
pub async fn receive(host: &Host, stream: &Arc<Stream>, peer: Peer) -> Result<Option<Greeted>, String> {
    let mut reader = Reader::new(stream);
    let mut assembly = Assembly::default();
    loop {
        let next = reader.next().await;
        let Some((message, fds)) = next.map_err(|error| format!("what the launcher sent: {error}"))? else {
            return Ok(None);
        };
        let Some((hello, fds)) = assembly.take(&host.pods, message, fds)? else {
            continue;
        };
        if !peer.is(&hello.uid) {
            return Err(format!(
                "the launcher claims the pod {}, and its cgroup is that of the pod {}",
                text::brief(&hello.uid),
                peer.uid
            ));
        }
        let checked = Checked::new(hello)?;
        let position = checked.position;
        let pod = pod(checked, assembly.files, fds, peer)?;
        return Ok(Some(Greeted {
            pod,
            position,
            reader,
        }));
    }
}

/// The files that have come.
#[derive(Debug, Default)]
pub struct Assembly {
    files: Files,
    /// Path of the last piece.
    last: String,
    total: usize,
}

impl Assembly {
    /// Takes the next message; returns Hello with its descriptors when that has come. The error is the reason of a refusal.
    pub fn take(
        &mut self,
        pods: &Pods,
        message: LauncherMessage,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<(Hello, Vec<OwnedFd>)>, String> {
        match message.kind {
            Some(Kind::Hello(hello)) => Ok(Some((hello, fds))),
            Some(Kind::File(piece)) => self.append(pods, piece).map(|()| None),
            Some(Kind::Stop(_) | Kind::Input(_)) | None => Err("the launcher sends no Hello".to_owned()),
        }
    }

    fn append(&mut self, pods: &Pods, piece: FilePiece) -> Result<(), String> {
        let FilePiece { path, content } = piece;
        if !is_file_path(&path) {
            return Err(format!("\"{}\" is no path of a file", text::brief(&path)));
        }
        let files = self.files.content();
        let before = files.get(&path).map(Vec::len);
        let continues = path == self.last;
        if before.is_some() && !continues {
            return Err(format!("file \"{path}\" is sent twice"));
        }
        let count = files.len() + usize::from(before.is_none());
        self.total = self.total.saturating_add(content.len());
        let length = before.unwrap_or(0).saturating_add(content.len());
        if length > MAX_FILE || self.total > MAX_FILES_TOTAL || count > MAX_FILES {
            return Err(format!(
                "the pod has too many files: at most {MAX_FILES} with {MAX_FILE} bytes each and {MAX_FILES_TOTAL} bytes together"
            ));
        }
        self.files.append(pods, &path, &content)?;
        self.last = path;
        Ok(())
    }
}

/// `NAME/KEY`: a DNS label, and a key as Kubernetes has it.
fn is_file_path(path: &str) -> bool {
    let key = |key: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        !key.is_empty() && key.bytes().all(allowed) && key != "." && key != ".."
    };
    let parts = path.split_once('/').filter(|_| path.len() <= MAX_FILE_PATH);
    parts.is_some_and(|(name, rest)| Name::try_from(name).is_ok() && key(rest))
}

/// A Hello within its bounds.
#[derive(Debug)]
pub struct Checked {
    uid: PodUid,
    names: Names,
    resolver: Resolver,
    volumes: Vec<message::Volume>,
    position: Option<Position>,
}

impl Checked {
    /// Checks a Hello. The error is the reason of a refusal.
    pub fn new(hello: Hello) -> Result<Self, String> {
        let uid = PodUid::new(&hello.uid).ok_or("the uid of the pod is none")?;
        for (what, name) in [
            ("pod", &hello.name),
            ("namespace", &hello.namespace),
            ("VirtualMachine", &hello.vm),
        ] {
            let allowed =
                |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
            if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(allowed) {
                return Err(format!("\"{}\" is no name of a {what}", text::brief(name)));
            }
        }
        if hello.volumes.len() > MAX_VOLUMES {
            let count = hello.volumes.len();
            return Err(format!(
                "the pod has {count} volumes: at most {MAX_VOLUMES} are possible"
            ));
        }
        for volume in &hello.volumes {
            if Name::try_from(volume.name.as_str()).is_err() {
                return Err(format!(
                    "\"{}\" is no name of a volume",
                    text::brief(&volume.name)
                ));
            }
        }
        let names = Names {
            namespace: hello.namespace,
            name: hello.name,
            vm: hello.vm,
            run: hello.run,
        };
        Ok(Self {
            uid,
            names,
            resolver: resolver(hello.resolver.unwrap_or_default()),
            volumes: hello.volumes,
            position: hello.position,
        })
    }
}

/// The usable part of a pod's resolv.conf.
fn resolver(wire: message::Resolver) -> Resolver {
    let servers = wire.servers.iter().filter_map(|server| server.parse().ok());
    let is_domain = |domain: &String| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        (1..=MAX_DOMAIN).contains(&domain.len()) && domain.bytes().all(allowed)
    };
    Resolver {
        servers: servers.take(MAX_SERVERS).collect(),
        search: wire
            .search
            .into_iter()
            .filter(is_domain)
            .take(MAX_SEARCH)
            .collect(),
    }
}

/// The pod of a Hello with its descriptors.
fn pod(checked: Checked, files: Files, fds: Vec<OwnedFd>, peer: Peer) -> Result<Pod, String> {
    if fds.len() != FIXED_FDS + checked.volumes.len() {
        return Err(format!(
            "{} descriptors came with {} volumes",
            fds.len(),
            checked.volumes.len()
        ));
    }
    let mut fds = fds.into_iter();
    let (Some(network), Some(lifeline)) = (fds.next(), fds.next()) else {
        return Err("descriptors are missing".to_owned());
    };
    let identity = fstat(&network).map(|found| (found.st_dev, found.st_ino));
    if identity != Ok(peer.network) {
        return Err("the descriptor of the network namespace is not that of the launcher's".to_owned());
    }
    let own = stat("/proc/self/ns/net").map(|found| (found.st_dev, found.st_ino));
    let network = (own != identity).then_some(network);
    let is_read_end = fcntl_getfl(&lifeline).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDONLY);
    if kind(&lifeline) != Some(FileType::Fifo) || !is_read_end {
        return Err("the lifeline is not the read end of a pipe".to_owned());
    }
    let mut volumes = BTreeMap::new();
    for (wire, fd) in checked.volumes.into_iter().zip(fds) {
        let wanted = match wire.block_device {
            false => FileType::Directory,
            true => FileType::BlockDevice,
        };
        if kind(&fd) != Some(wanted) {
            return Err(format!(
                "the descriptor of volume \"{}\" has another kind",
                wire.name
            ));
        }
        let volume = Volume {
            fd,
            block_device: wire.block_device,
            read_only: wire.read_only,
        };
        if volumes.insert(wire.name.clone(), volume).is_some() {
            return Err(format!("two volumes with the name \"{}\"", wire.name));
        }
    }
    Ok(Pod {
        number: 0,
        uid: checked.uid,
        names: checked.names,
        network,
        resolver: checked.resolver,
        volumes,
        files,
        lifeline,
        cgroup: peer.cgroup,
        launcher: peer.process,
        connected_ms: text::now_ms(),
        report: watch::channel(None).0,
        replaced: CancellationToken::new(),
    })
}

fn kind(fd: impl AsFd) -> Option<FileType> {
    Some(FileType::from_raw_mode(fstat(fd).ok()?.st_mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(path: &str, length: usize) -> LauncherMessage {
        let piece = FilePiece {
            path: path.to_owned(),
            content: vec![1; length],
        };
        LauncherMessage {
            kind: Some(Kind::File(piece)),
        }
    }

    #[test]
    fn pieces_become_files_within_their_bounds() {
        let pods = Pods::default();
        let mut assembly = Assembly::default();
        for (path, length) in [("a/key", 10), ("a/key", 5), ("b/.x_Y-1", 0)] {
            assert!(
                assembly
                    .take(&pods, piece(path, length), Vec::new())
                    .unwrap()
                    .is_none()
            );
        }
        let lengths = assembly.files.content().values().map(Vec::len);
        assert_eq!(lengths.collect::<Vec<_>>(), [15, 0]);
        let mut refused = |path: &str, length| assembly.take(&pods, piece(path, length), Vec::new()).is_err();
        assert!(refused("a/key", 1), "not in a row");
        for path in ["", "a", "a/", "/a", "A/b", "a/b/c", "a/..", "a/b\n"] {
            assert!(refused(path, 1), "{path}");
        }
        assert!(refused("c/large", MAX_FILE + 1));
        let mut assembly = Assembly::default();
        for number in 0..4 {
            let file = piece(&format!("a/{number}"), MAX_FILE);
            assembly.take(&pods, file, Vec::new()).unwrap();
        }
        assert!(assembly.take(&pods, piece("a/5", 1), Vec::new()).is_err());
        let mut assembly = Assembly::default();
        for number in 0..MAX_FILES {
            assembly
                .take(&pods, piece(&format!("a/{number}"), 0), Vec::new())
                .unwrap();
        }
        assert!(assembly.take(&pods, piece("a/more", 0), Vec::new()).is_err());
    }

    #[test]
    fn files_of_all_pods_together_are_bounded_and_given_back() {
        let pods = Pods::default();
        let full = || {
            let mut assembly = Assembly::default();
            for number in 0..4 {
                let file = piece(&format!("a/{number}"), MAX_FILE);
                assembly.take(&pods, file, Vec::new())?;
            }
            Ok::<_, String>(assembly)
        };
        let all: Vec<_> = (0..32).map(|_| full().unwrap()).collect();
        assert!(full().unwrap_err().contains("all pods"));
        drop(all);
        full().unwrap();
    }

    fn hello() -> Hello {
        Hello {
            name: "web-1".into(),
            namespace: "default".into(),
            uid: "6fd1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10".into(),
            vm: "web".into(),
            run: 1,
            ..Hello::default()
        }
    }

    #[test]
    fn hello_out_of_bounds_is_refused() {
        assert!(Checked::new(hello()).is_ok());
        let volume = |name: &str| message::Volume {
            name: name.into(),
            ..Default::default()
        };
        let wrong: [fn(&mut Hello); 5] = [
            |hello| hello.uid = "../x".into(),
            |hello| hello.name = String::new(),
            |hello| hello.namespace = "x".repeat(254),
            |hello| hello.vm = "a\u{1b}[2J".into(),
            |hello| hello.volumes = vec![message::Volume::default()],
        ];
        for change in wrong {
            let mut hello = hello();
            change(&mut hello);
            assert!(Checked::new(hello.clone()).is_err(), "{hello:?}");
        }
        let many = Hello {
            volumes: (0..=MAX_VOLUMES)
                .map(|number| volume(&format!("v{number}")))
                .collect(),
            ..hello()
        };
        assert!(Checked::new(many).unwrap_err().contains("at most 64"));
    }

    #[test]
    fn resolver_keeps_what_is_usable() {
        let wire = message::Resolver {
            servers: vec!["10.0.0.10".into(), "nonsense".into(), "fd00::a".into()],
            search: vec!["svc.cluster.local".into(), String::new(), "a b".into()],
        };
        let found = resolver(wire);
        assert_eq!(found.servers.len(), 2);
        assert_eq!(found.search, ["svc.cluster.local"]);
    }
}
