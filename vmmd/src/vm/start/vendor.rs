//! Vendor data of a VM's cloud-init: the data of the spec, or data that the daemon generates. The
//! daemon generates the default user's password and a script that mounts the VM's shares.
//!
//! Passwords in the user data take precedence. The mounts use a script instead of cloud-init's
//! `mounts` for two reasons: a list of that name in the user data replaces the whole list, and
//! cloud-init reads the list only in the guest's first boot.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::json;
use vmmd_spec::{cloud_init::CloudInit, share::Share};

/// Between the parts. It is never in them: base64 has `=` only at the end of a line.
const BOUNDARY: &str = "==part==";
/// Longest line of base64 (RFC 2045, 6.8).
const LINE: usize = 76;

/// As the guest gets it; empty when there is none.
pub fn data(init: &CloudInit, shares: &[Share]) -> String {
    let parts = [
        ("text/cloud-config", password(&init.password_hash)),
        ("text/cloud-boothook", mounts(shares)),
    ];
    let parts: Vec<_> = parts.iter().filter(|(_, part)| !part.is_empty()).collect();
    match parts.as_slice() {
        [] => init.vendor_data.clone(),
        [(_, part)] => part.clone(),
        several => multipart(several),
    }
}

fn password(hash: &str) -> String {
    if hash.is_empty() {
        return String::new();
    }
    let config = json!({
        "password": hash,
        "chpasswd": {"expire": false},
        "ssh_pwauth": false,
    });
    format!("#cloud-config\n{config}\n")
}

/// A script that cloud-init runs early in each boot.
fn mounts(shares: &[Share]) -> String {
    let mounted = shares
        .iter()
        .filter_map(|share| Some((share.mount.as_ref()?, share)));
    let mut mounted: Vec<_> = mounted.collect();
    if mounted.is_empty() {
        return String::new();
    }
    // A directory is mounted before its subdirectories.
    mounted.sort_by_key(|(mount, _)| *mount);
    let lines = mounted.iter().map(|(mount, share)| {
        let mode = if share.read_only { "ro" } else { "rw" };
        let mount = quoted(&mount.display().to_string());
        format!("share {} {mount} {mode}\n", quoted(&share.tag))
    });
    let lines: String = lines.collect();
    format!(
        r#"#cloud-boothook
#!/bin/sh
# Mounts what the node shares with this VM.
failed=0
share() {{
    mountpoint -q "$2" && return
    mkdir -p "$2" && mount -t virtiofs -o "$3" -- "$1" "$2" || failed=1
}}
{lines}exit $failed
"#
    )
}

/// As one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn multipart(parts: &[&(&str, String)]) -> String {
    let parts = parts.iter().map(|(kind, part)| {
        let coded = STANDARD.encode(part);
        let lines = coded.as_bytes().chunks(LINE).map(String::from_utf8_lossy);
        let lines: Vec<_> = lines.collect();
        format!(
            "--{BOUNDARY}\nMIME-Version: 1.0\nContent-Type: {kind}; charset=\"utf-8\"\n\
             Content-Transfer-Encoding: base64\n\n{}\n",
            lines.join("\n")
        )
    });
    let parts: String = parts.collect();
    format!(
        "Content-Type: multipart/mixed; boundary=\"{BOUNDARY}\"\nMIME-Version: 1.0\n\n{parts}--{BOUNDARY}--\n"
    )
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

    use vmmd_api::v1;
    use vmmd_spec::Violations;

    use super::*;

    fn share(name: &str, mount: &str, read_only: bool) -> Share {
        let wire = v1::ShareSpec {
            name: name.into(),
            path: "/srv/x".into(),
            tag: format!("{name}'s tag"),
            mount: mount.into(),
            read_only,
            ..Default::default()
        };
        Share::new(&mut Violations::default(), "", &wire).unwrap()
    }

    /// Folder with substitutes for the guest's programs: `mount` logs its arguments, and fails for
    /// the tag `bad's tag`.
    fn programs(is_mounted: bool) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mountpoint = format!("exit {}", u8::from(!is_mounted));
        let mount = r#"printf '[%s]' "$@" >>"$LOG"; echo >>"$LOG"; [ "$6" != "bad's tag" ]"#;
        for (name, script) in [("mountpoint", mountpoint.as_str()), ("mount", mount)] {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        folder
    }

    /// Runs the script without its first line, as cloud-init does. Returns whether it succeeded,
    /// and the logged mounts.
    fn boot(script: &str, is_mounted: bool) -> (bool, Vec<String>) {
        let programs = programs(is_mounted);
        let (hook, log) = (programs.path().join("hook"), programs.path().join("log"));
        let body = script.strip_prefix("#cloud-boothook\n").unwrap();
        assert!(body.starts_with("#!/bin/sh\n"));
        fs::write(&hook, body).unwrap();
        let path = format!("{}:/usr/bin:/bin", programs.path().display());
        let mut command = Command::new("sh");
        let status = command.arg(&hook).env("PATH", path).env("LOG", &log).status();
        let said = fs::read_to_string(log).unwrap_or_default();
        let said = said.lines().map(str::to_owned);
        (status.unwrap().success(), said.collect())
    }

    #[test]
    fn share_is_mounted_at_its_mount_point_once_in_each_boot() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let (inner, outer) = (at("my $HOME's/inner"), at("my $HOME's"));
        let shares = [
            share("inner", &inner, true),
            share("by-hand", "", false),
            share("outer", &outer, false),
        ];
        let script = data(&CloudInit::default(), &shares);
        let (good, mounted) = boot(&script, false);
        assert!(good);
        assert_eq!(
            mounted,
            [
                format!("[-t][virtiofs][-o][rw][--][outer's tag][{outer}]"),
                format!("[-t][virtiofs][-o][ro][--][inner's tag][{inner}]"),
            ]
        );
        assert!(Path::new(&inner).is_dir());
        assert_eq!(boot(&script, true), (true, Vec::new()));
    }

    #[test]
    fn one_that_can_not_be_mounted_is_told_and_the_others_are() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let shares = [share("bad", &at("a"), false), share("good", &at("b"), false)];
        let (good, mounted) = boot(&data(&CloudInit::default(), &shares), false);
        assert_eq!((good, mounted.len()), (false, 2));
    }

    #[test]
    fn password_and_mounts_are_two_parts_beside_the_specs_data() {
        let own = CloudInit {
            vendor_data: "#!/bin/sh\ntrue\n".into(),
            ..Default::default()
        };
        assert_eq!(data(&own, &[share("x", "", false)]), own.vendor_data);
        let init = CloudInit {
            password_hash: "$6$salt$hash".into(),
            ..Default::default()
        };
        let alone = data(&init, &[]);
        assert!(alone.starts_with("#cloud-config\n") && alone.contains("$6$salt$hash"));
        let shares = [share("x", "/srv/\u{e4}", false)];
        let both = data(&init, &shares);
        let (head, body) = both.split_once("\n\n").unwrap();
        assert!(head.contains("multipart/mixed; boundary=\"==part==\""));
        let parts: Vec<_> = body.split("--==part==").collect();
        assert_eq!((parts.len(), parts[3]), (4, "--\n"));
        let decoded = |part: &str| {
            let (head, body) = part.trim_start().split_once("\n\n").unwrap();
            assert!(body.lines().all(|line| line.len() <= LINE));
            let content = STANDARD.decode(body.replace('\n', "")).unwrap();
            let kind = head.lines().find(|line| line.starts_with("Content-Type: "));
            (kind.unwrap().to_owned(), String::from_utf8(content).unwrap())
        };
        let kind = |kind| format!("Content-Type: {kind}; charset=\"utf-8\"");
        assert_eq!(decoded(parts[1]), (kind("text/cloud-config"), alone));
        let script = data(&CloudInit::default(), &shares);
        assert_eq!(decoded(parts[2]), (kind("text/cloud-boothook"), script));
    }
}
