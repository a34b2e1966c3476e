//! `ssh`, `scp` and `shell`: the programs of this machine, over a port of a VM that the daemon forwards.
//!
//! The VM needs no address that is reachable from here, and no published port. The guest's host key is remembered by the VM's
//! uid: another VM of the same name is another host, and a key that changes under the same uid is refused by ssh.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::DirBuilder,
    io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::DirBuilderExt as _,
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::Command,
};

use vmmd_api::v1;

use super::port_forward;
use crate::{
    args::{
        ssh::{Place, Reach, Scp, Shell, Ssh, place},
        verbs::Console,
    },
    client::Client,
    console,
    contexts::Connection,
    failure::{Code, Failure, Result},
};

/// ssh sends a keep-alive message after 15 s of silence, and ends the session after four without an answer.
const KEEP_ALIVE: [&str; 2] = ["-oServerAliveInterval=15", "-oServerAliveCountMax=4"];

/// Replaces this process by ssh; returns only on failure.
pub async fn ssh(client: &Client, given: &Connection, args: &Ssh) -> Result<()> {
    let vm = client.get(&args.vm.vm).await?;
    let mut command = Command::new("ssh");
    command.args(options(&vm, given, &args.vm.vm, &by_vsock(&vm, &args.reach))?);
    // Options come before the host, the command after it.
    let (options, rest) = option_words(&args.rest);
    // ssh goes by the first that it reads: the user's options are stronger.
    command.args(options).args(KEEP_ALIVE);
    if args.vm.user.is_none() {
        command.args(user_option(client, &vm).await);
    }
    command.arg("--").arg(args.vm.word()).args(rest);
    Err(failed(&command))
}

/// Selects the socket device for a VM without an address in a network of its node.
fn by_vsock(vm: &v1::Vm, reach: &Reach) -> Reach {
    let mut reach = reach.clone();
    if !reach.vsock && reach.nic.is_none() && has_vsock(vm) && !has_address(vm) {
        let name = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
        eprintln!("vm/{name} has no address in a network of its node: connecting by its socket device.");
        reach.vsock = true;
    }
    reach
}

fn has_vsock(vm: &v1::Vm) -> bool {
    vm.spec.as_ref().is_some_and(|spec| spec.vsock.is_some())
}

fn has_address(vm: &v1::Vm) -> bool {
    let mut nics = vm.status.iter().flat_map(|status| &status.nics);
    nics.any(|nic| !nic.addresses.is_empty())
}

/// Port of the guest's SSH server.
const SSH: u16 = 22;

/// Opens a shell: by SSH over the first way at which a server answers, else at the serial console.
pub async fn shell(client: &Client, given: &Connection, args: Shell) -> Result<()> {
    let name = args.vm.vm.clone();
    let vm = client.get(&name).await?;
    let ways = [
        (has_vsock(&vm), true, "socket device"),
        (has_address(&vm), false, "network"),
    ];
    let ways = if args.console { &[][..] } else { &ways };
    let mut failures = Vec::new();
    for (exists, vsock, way) in ways.iter().copied() {
        if !exists {
            failures.push(format!("it has no {way} to connect by"));
            continue;
        }
        match port_forward::greets(client, &name, SSH, vsock).await {
            Ok(()) => {
                eprintln!("Connecting to vm/{name} by SSH over its {way}.");
                let user = args.user.or(args.vm.user);
                let ssh_args = Ssh {
                    vm: Place { user, vm: name },
                    reach: Reach {
                        port: SSH,
                        nic: None,
                        vsock,
                        identity: args.identity,
                    },
                    rest: Vec::new(),
                };
                return ssh(client, given, &ssh_args).await;
            }
            Err(failure) if matches!(failure.code, Code::NotFound | Code::Permission) => return Err(failure),
            Err(failure) => failures.push(format!("{way}: {}", failure.message)),
        }
    }
    for failure in failures {
        eprintln!("No SSH to vm/{name}: {failure}");
    }
    eprintln!("Connecting to the serial console of vm/{name}; ^] detaches.");
    let args = Console {
        name,
        ..Console::default()
    };
    console::run(client, &args).await
}

/// The default users of images of distributions, in which root and other users cannot log in, by a word in the image's name or source.
const DEFAULT_USERS: [(&str, &str); 7] = [
    ("debian", "debian"),
    ("ubuntu", "ubuntu"),
    ("fedora", "fedora"),
    ("rocky", "rocky"),
    ("almalinux", "almalinux"),
    ("alpine", "alpine"),
    ("arch", "arch"),
];

/// The option of ssh that selects the default user of the VM's image, when the SSH keys of the VM are for that user.
async fn user_option(client: &Client, vm: &v1::Vm) -> Option<String> {
    let spec = vm.spec.as_ref()?;
    if !is_for_default_user(spec.cloud_init.as_ref()?, rustix::process::geteuid().is_root()) {
        return None;
    }
    let image = image_of(client, spec).await?;
    let user = default_user(&image)?;
    eprintln!(
        "Logging in as {user}, the default user of image {image}. `vmmctl ssh USER@VM` selects another user."
    );
    Some(format!("-oUser={user}"))
}

/// Whether a login without a user's name is for the default user of the image. User data may make other users, such as one with the name of the
/// local user, but not root.
fn is_for_default_user(init: &v1::CloudInit, local_is_root: bool) -> bool {
    let has_user_data = [&init.user_data, &init.user_data_base64, &init.user_data_digest]
        .iter()
        .any(|data| !data.is_empty());
    !init.ssh_authorized_keys.is_empty() && (local_is_root || !has_user_data)
}

/// The image that the VM's first disk was made of.
async fn image_of(client: &Client, spec: &v1::VmSpec) -> Option<String> {
    let Some(v1::disk_spec::Source::Disk(disk)) = &spec.disks.first()?.source else {
        return None;
    };
    match client.object::<v1::Disk>(disk).await.ok()?.spec?.source? {
        v1::volume_spec::Source::Image(image) => Some(image.name),
        _ => None,
    }
}

/// The default user of an image with this name: `debian` for `debian13`.
fn default_user(image: &str) -> Option<&'static str> {
    let image = image.to_lowercase();
    let mut words = image.split(|letter: char| !letter.is_ascii_alphabetic());
    words.find_map(|word| {
        let known = DEFAULT_USERS
            .iter()
            .find(|(distribution, _)| *distribution == word);
        known.map(|(_, user)| *user)
    })
}

/// The options of ssh that `words` begin with, and the rest. Options with a value take the next word.
fn option_words(words: &[String]) -> (&[String], &[String]) {
    /// ssh(1): letters of options with a value.
    const WITH_VALUE: &str = "BbcDEeFIiJLlmOoPpQRSWw";
    let mut at = 0;
    while let Some(word) = words.get(at)
        && let Some(letters) = word.strip_prefix('-')
    {
        at += 1;
        if letters == "-" {
            break;
        }
        // "-L 80:…" takes the next word, "-L80:…" has its value in itself.
        let position = letters.find(|letter| WITH_VALUE.contains(letter));
        if position.is_some_and(|position| position + 1 == letters.len()) {
            at += 1;
        }
    }
    words.split_at(at.min(words.len()))
}

/// Replaces this process by scp; returns only on failure.
pub async fn scp(client: &Client, given: &Connection, args: &Scp) -> Result<()> {
    let places = args.files.iter().map(|file| remote(file));
    let places: Vec<_> = places.collect::<Result<_, _>>().map_err(usage)?;
    let mut vms = places.iter().flatten().map(|place| place.vm.as_str());
    let Some(vm) = vms.next() else {
        return Err(usage("name a file of a VM: [USER@]VM:PATH".to_owned()));
    };
    if let Some(other) = vms.find(|other| *other != vm) {
        return Err(usage(format!(
            "all files must be of one VM, but these are of {vm} and {other}: copy in two steps"
        )));
    }
    let spec = client.get(vm).await?;
    let mut command = Command::new("scp");
    command.args(options(&spec, given, vm, &by_vsock(&spec, &args.reach))?);
    command.args(KEEP_ALIVE);
    if places.iter().flatten().all(|place| place.user.is_none()) {
        command.args(user_option(client, &spec).await);
    }
    if args.recursive {
        command.arg("-r");
    }
    command.arg("--").args(&args.files);
    Err(failed(&command))
}

/// The VM that a file is of, if it is of one, by the rule of scp: a colon before any slash.
fn remote(file: &str) -> Result<Option<Place>, String> {
    let before_slash = file.split('/').next().unwrap_or_default();
    match before_slash.split_once(':') {
        None => Ok(None),
        Some((host, _)) => place(host).map(Some),
    }
}

/// Options for both programs.
fn options(vm: &v1::Vm, given: &Connection, name: &str, reach: &Reach) -> Result<Vec<OsString>> {
    let uid = vm.metadata.as_ref().map_or("", |metadata| metadata.uid.as_str());
    let program = env::current_exe();
    let program = program.map_err(|error| Failure::new(Code::Other, format!("finding vmmctl: {error}")))?;
    let known = known_hosts()?;
    let mut options: Vec<OsString> = Vec::new();
    let mut option = |name: &str, value: &OsStr| {
        let mut word = OsString::from(name);
        word.push("=");
        word.push(value);
        options.extend(["-o".into(), word]);
    };
    option("ProxyCommand", &proxy(&program, given, name, reach)?);
    option("HostKeyAlias", format!("vmmd-{uid}").as_ref());
    option("UserKnownHostsFile", quoted(&known)?.as_ref());
    // The first key is taken, as the way there is the daemon's; another one later is not.
    option("StrictHostKeyChecking", "accept-new".as_ref());
    option("CheckHostIP", "no".as_ref());
    if let Some(identity) = &reach.identity {
        options.extend(["-i".into(), identity.into()]);
    }
    Ok(options)
}

/// The shell command that leads to the guest's port: this program with the same daemon.
fn proxy(program: &Path, given: &Connection, vm: &str, reach: &Reach) -> Result<OsString> {
    let mut words: Vec<OsString> = vec![program.into()];
    let text = |value: &Option<String>| value.as_ref().map(OsString::from);
    let path = |value: &Option<PathBuf>| value.as_ref().map(OsString::from);
    for (option, value) in [
        ("--context", text(&given.context)),
        ("--socket", path(&given.socket)),
        ("--endpoint", text(&given.endpoint)),
        ("--ca", path(&given.ca)),
        ("--cert", path(&given.cert)),
        ("--key", path(&given.key)),
    ] {
        words.extend(value.into_iter().flat_map(|value| [option.into(), value]));
    }
    match reach.vsock {
        true => words.extend(["vsock".into(), "connect".into()]),
        false => words.extend(["port-forward".into(), "--stdio".into()]),
    }
    if let Some(nic) = &reach.nic {
        words.extend(["--nic".into(), nic.into()]);
    }
    words.extend(["--".into(), vm.into(), reach.port.to_string().into()]);
    // ssh puts an `exec` of its own in front, which becomes this program.
    let quoted: Vec<_> = words
        .iter()
        .map(|word| OsString::from_vec(in_quotes(word.as_bytes())))
        .collect();
    Ok(quoted.join(OsStr::new(" ")))
}

/// A word as the shell reads it, in which ssh finds nothing to put in (`%h`).
fn in_quotes(word: &[u8]) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in word {
        match byte {
            b'\'' => quoted.extend(b"'\\''"),
            b'%' => quoted.extend(b"%%"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

/// A path as ssh's configuration has it.
fn quoted(path: &Path) -> Result<String> {
    let text = path.to_str().filter(|text| !text.contains(['"', '\\']));
    let text = text.ok_or_else(|| {
        let message = format!(
            "ssh cannot use {}: set XDG_STATE_HOME to another folder",
            path.display()
        );
        Failure::new(Code::Other, message)
    })?;
    Ok(format!("\"{}\"", text.replace('%', "%%")))
}

/// The file with the host keys of VMs; its folder is made.
fn known_hosts() -> Result<PathBuf> {
    let state = env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.filter(|path| path.is_absolute());
    let state = state.or_else(|| Some(env::home_dir()?.join(".local/state")));
    let folder = state.map(|state| state.join("vmmctl"));
    let folder = folder.ok_or_else(|| {
        Failure::new(
            Code::Other,
            "there is no home folder to keep host keys in: set XDG_STATE_HOME",
        )
    })?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| {
        Failure::new(
            Code::Other,
            format!("make the folder {}: {error}", folder.display()),
        )
    })?;
    Ok(folder.join("known_hosts"))
}

/// Becomes `command`, which takes this process's place; why it could not.
fn failed(command: &Command) -> Failure {
    let mut again = Command::new(command.get_program());
    let error = again.args(command.get_args()).exec();
    let program = command.get_program().to_string_lossy().into_owned();
    if error.kind() == io::ErrorKind::NotFound {
        return Failure::new(
            Code::Other,
            format!("there is no program {program} on this machine"),
        )
        .hint("install the package openssh-client");
    }
    Failure::new(Code::Other, format!("start {program}: {error}"))
}

fn usage(message: String) -> Failure {
    Failure::new(Code::Usage, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_place_is_a_vm_with_or_without_a_user() {
        assert_eq!(place("web").unwrap().word(), "web");
        assert_eq!(place("debian@web").unwrap().word(), "debian@web");
        for wrong in ["-oProxyCommand=x@web", "@web", "a b@web", "root@"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_of_a_vm_have_a_colon_before_any_slash() {
        let vm = |file| remote(file).unwrap().map(|place| place.vm);
        assert_eq!(vm("web:/tmp"), Some("web".into()));
        assert_eq!(vm("root@web:"), Some("web".into()));
        assert_eq!((vm("notes"), vm("./a:b"), vm("/a:b")), (None, None, None));
        assert!(remote("-x@web:").is_err());
    }

    #[test]
    fn options_of_ssh_end_where_the_command_begins() {
        for (text, options) in [
            ("uptime -p", 0),
            ("-v uptime", 1),
            ("-L 8080:localhost:80 -N", 3),
            ("-L8080:localhost:80 uptime", 1),
            ("-vvo BatchMode=yes ls -l", 2),
            ("-t -- ls", 2),
            ("-l", 1),
        ] {
            let words = words(text);
            assert_eq!(option_words(&words).0.len(), options, "{text}");
        }
    }

    #[test]
    fn default_user_is_that_of_the_distribution() {
        for (image, user) in [
            ("debian13", Some("debian")),
            ("Ubuntu-24.04-server", Some("ubuntu")),
            ("my-rocky-9", Some("rocky")),
            ("arch", Some("arch")),
            ("archive", None),
            ("golden", None),
            ("", None),
        ] {
            assert_eq!(default_user(image), user, "{image}");
        }
    }

    #[test]
    fn default_user_is_taken_where_the_keys_are_for_it() {
        let init = |keys: &[&str], user_data: &str| v1::CloudInit {
            ssh_authorized_keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            user_data_digest: user_data.to_owned(),
            ..Default::default()
        };
        let (without, with) = (init(&["key"], ""), init(&["key"], "hmac-sha256:1"));
        assert!(is_for_default_user(&without, true) && is_for_default_user(&without, false));
        assert!(is_for_default_user(&with, true), "root cannot log in");
        assert!(
            !is_for_default_user(&with, false),
            "a user of the user data may be meant"
        );
        assert!(!is_for_default_user(&init(&[], ""), true));
    }

    #[test]
    fn proxy_command_is_quoted_for_shell_and_ssh() {
        let given = Connection {
            socket: Some("/run/it's 100%/vmmd.sock".into()),
            ..Connection::default()
        };
        let mut reach = Reach {
            port: 2222,
            nic: Some("lan".into()),
            vsock: false,
            identity: None,
        };
        let line = |reach: &Reach| proxy(Path::new("/usr/bin/vmmctl"), &given, "web", reach).unwrap();
        assert_eq!(
            line(&reach),
            "'/usr/bin/vmmctl' '--socket' '/run/it'\\''s 100%%/vmmd.sock' 'port-forward' '--stdio' '--nic' 'lan' \
             '--' 'web' '2222'"
        );
        (reach.vsock, reach.nic) = (true, None);
        assert_eq!(
            line(&reach),
            "'/usr/bin/vmmctl' '--socket' '/run/it'\\''s 100%%/vmmd.sock' 'vsock' 'connect' '--' 'web' '2222'"
        );
    }
}
