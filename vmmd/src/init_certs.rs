//! `vmmd init-certs`: creates a CA for a first setup, with certificates for the server and for
//! clients. Sites with a CA use that CA instead.

use std::{
    fs::{self, DirBuilder, File},
    io::Write,
    net::{IpAddr, ToSocketAddrs, UdpSocket},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, bail, ensure};
use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use webpki::EndEntityCert;

use crate::{auth::Role, tls::common_name};

/// A day.
const DAY: Duration = Duration::from_secs(24 * 3600);
/// How long the CA is valid.
const AUTHORITY_DAYS: u32 = 3650;
/// Certificates are valid since a bit before now, for clocks that are behind.
const BEHIND: Duration = Duration::from_secs(3600);

/// Arguments of `init-certs`.
#[derive(Debug, Args)]
pub struct InitCerts {
    /// Folder for the files; those of an earlier run are never overwritten.
    #[arg(long, value_name = "DIR", default_value = "/etc/vmmd/tls")]
    dir: PathBuf,
    /// Name or address by which clients reach this node; may be given several times [default: the host's name, its
    /// addresses, localhost].
    #[arg(long = "server-name", value_name = "NAME")]
    server_names: Vec<String>,
    /// Client and its role: viewer, operator, admin, peer or agent; may be given several times.
    /// With an existing CA in the folder, only the missing files are created.
    #[arg(long = "client", value_name = "NAME=ROLE", value_parser = client)]
    clients: Vec<(String, Role)>,
    /// How many days the certificates of the server and the clients are valid.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=AUTHORITY_DAYS as i64))]
    days: u32,
}

fn client(text: &str) -> Result<(String, Role), String> {
    let (name, role) = text.split_once('=').ok_or("must be NAME=ROLE")?;
    let role = Role::parse(role).ok_or("the role must be viewer, operator, admin, peer or agent")?;
    let letters = name
        .chars()
        .all(|letter| letter.is_ascii_alphanumeric() || "-_.@".contains(letter));
    if name.is_empty() || name.len() > 64 || !letters || name.starts_with(['.', '-']) {
        return Err("the name must be 1 to 64 letters, digits, '-', '_', '.' or '@'".into());
    }
    if ["ca", "server"].contains(&name) {
        return Err(format!("\"{name}\" is the name of another file"));
    }
    Ok((name.to_owned(), role))
}

/// A file to be written.
struct Made {
    name: String,
    text: String,
    secret: bool,
}

/// Creates the missing files and prints the next steps.
pub fn run(arguments: &InitCerts) -> anyhow::Result<()> {
    let dir = &arguments.dir;
    let there = |name: &str| dir.join(name).symlink_metadata().is_ok();
    let mut made = Vec::new();
    let authority = if there("ca.crt") || there("ca.key") {
        known_authority(dir)?
    } else {
        new_authority(&mut made)?
    };
    let with_server = made.len() > 1 || !there("server.crt") || !arguments.server_names.is_empty();
    if with_server {
        let names = server_names(&arguments.server_names)?;
        let params =
            CertificateParams::new(names).context("a server name is neither a name nor an address")?;
        let name = params.subject_alt_names.first().map(name_of).unwrap_or_default();
        issue(
            &mut made,
            &authority,
            params,
            "server",
            &name,
            ExtendedKeyUsagePurpose::ServerAuth,
            arguments.days,
        )?;
    }
    for (name, role) in &arguments.clients {
        let mut params = CertificateParams::default();
        let uri = format!("{}{role}", Role::URI)
            .try_into()
            .context("make the role's URI")?;
        params.subject_alt_names.push(SanType::URI(uri));
        issue(
            &mut made,
            &authority,
            params,
            name,
            name,
            ExtendedKeyUsagePurpose::ClientAuth,
            arguments.days,
        )?;
    }
    ensure!(
        !made.is_empty(),
        "there is nothing to make: name a --client or a --server-name"
    );
    for file in &made {
        ensure!(
            !there(&file.name),
            "{} exists: nothing was made; move it away, or choose another --dir",
            dir.join(&file.name).display()
        );
    }
    write(dir, &made)?;
    let now = jiff::Timestamp::now();
    print!("{}", next_steps(arguments, &made, with_server, now));
    Ok(())
}

fn new_authority(made: &mut Vec<Made>) -> anyhow::Result<Issuer<'static, KeyPair>> {
    let key = KeyPair::generate().context("make a key")?;
    // Bytes of the public key distinguish two CAs of one host.
    let id: String = key
        .public_key_raw()
        .iter()
        .rev()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let params = authority_params(&format!("vmmd CA {} {id}", host_name()));
    let certificate = params.self_signed(&key).context("make the CA")?;
    keep(made, "ca", &certificate.pem(), &key);
    Ok(Issuer::new(params, key))
}

fn authority_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid(&mut params, AUTHORITY_DAYS);
    params
}

/// The CA of an earlier run.
fn known_authority(dir: &Path) -> anyhow::Result<Issuer<'static, KeyPair>> {
    let read = |name: &str| {
        let path = dir.join(name);
        fs::read_to_string(&path).with_context(|| {
            format!(
                "read {}: the CA's certificate and key must be there, or none of both",
                path.display()
            )
        })
    };
    let (certificate, key) = (read("ca.crt")?, read("ca.key")?);
    let foreign =
        "the CA in ca.crt and ca.key was not made by init-certs: sign certificates with its own tools";
    let key = KeyPair::from_pem(&key).context(foreign)?;
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).context(foreign)?;
    let params = authority_params(&common_name(&certificate).context(foreign)?);
    let certificate = EndEntityCert::try_from(&certificate).context(foreign)?;
    // A CA made from these parameters must have the same subject and key.
    let same = params.self_signed(&key).context(foreign)?;
    let same = EndEntityCert::try_from(same.der()).context(foreign)?;
    let key_of = |certificate: &EndEntityCert<'_>| certificate.subject_public_key_info();
    if same.subject() != certificate.subject() || key_of(&same).as_ref() != key_of(&certificate).as_ref() {
        bail!(foreign);
    }
    Ok(Issuer::new(params, key))
}

fn issue(
    made: &mut Vec<Made>,
    authority: &Issuer<'static, KeyPair>,
    mut params: CertificateParams,
    file: &str,
    name: &str,
    purpose: ExtendedKeyUsagePurpose,
    days: u32,
) -> anyhow::Result<()> {
    params.distinguished_name = named(name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![purpose];
    params.use_authority_key_identifier_extension = true;
    valid(&mut params, days);
    let key = KeyPair::generate().context("make a key")?;
    let certificate = params
        .signed_by(&key, authority)
        .with_context(|| format!("make the certificate of {name}"))?;
    keep(made, file, &certificate.pem(), &key);
    Ok(())
}

fn keep(made: &mut Vec<Made>, name: &str, certificate: &str, key: &KeyPair) {
    made.push(Made {
        name: format!("{name}.key"),
        text: key.serialize_pem(),
        secret: true,
    });
    made.push(Made {
        name: format!("{name}.crt"),
        text: certificate.to_owned(),
        secret: false,
    });
}

fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

fn valid(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(BEHIND);
    params.not_after = epoch + now + DAY * days;
}

fn name_of(name: &SanType) -> String {
    match name {
        SanType::DnsName(name) => name.to_string(),
        SanType::IpAddress(address) => address.to_string(),
        _ => String::new(),
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The given names, or those by which this host is likely to be reached.
fn server_names(given: &[String]) -> anyhow::Result<Vec<String>> {
    ensure!(
        given.iter().all(|name| !name.is_empty()),
        "a server name is empty"
    );
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let host = host_name();
    let mut addresses: Vec<IpAddr> = (host.as_str(), 0)
        .to_socket_addrs()
        .map(|found| found.map(|address| address.ip()).collect())
        .unwrap_or_default();
    // The addresses of the default routes. Connecting a UDP socket sends nothing.
    for (any, somewhere) in [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")] {
        let route = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(somewhere)?;
            socket.local_addr()
        });
        addresses.extend(route.ok().map(|address| address.ip()));
    }
    addresses.extend([
        IpAddr::from([127, 0, 0, 1]),
        IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1_u16]),
    ]);
    let mut names = vec![host, "localhost".to_owned()];
    for address in addresses.into_iter().filter(|address| !address.is_unspecified()) {
        let address = address.to_string();
        if !names.contains(&address) {
            names.push(address);
        }
    }
    Ok(names)
}

fn write(dir: &Path, made: &[Made]) -> anyhow::Result<()> {
    let folder = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    folder.with_context(|| format!("make {}", dir.display()))?;
    for file in made {
        let path = dir.join(&file.name);
        let mode = if file.secret { 0o600 } else { 0o644 };
        let open = File::options()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path);
        let written = open.and_then(|mut open| {
            open.write_all(file.text.as_bytes())?;
            open.sync_all()
        });
        written.with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn next_steps(arguments: &InitCerts, made: &[Made], with_server: bool, now: jiff::Timestamp) -> String {
    let dir = &arguments.dir;
    let names: Vec<_> = made.iter().map(|file| file.name.as_str()).collect();
    let days = arguments.days;
    let until = now + DAY.saturating_mul(days);
    let mut text = format!(
        "Made in {}: {}\nCertificates are valid for {days} days, until {}; make new ones before, with the CA that is there.\n\nNext:\n",
        dir.display(),
        names.join(" "),
        until.strftime("%Y-%m-%d"),
    );
    if with_server {
        text += "- Let vmmd listen, in /etc/vmmd/config.toml:\n    [tcp]\n    listen = \"0.0.0.0:7443\"\n";
        if dir != Path::new("/etc/vmmd/tls") {
            for (key, file) in [
                ("certificate", "server.crt"),
                ("key", "server.key"),
                ("client_ca", "ca.crt"),
            ] {
                text += &format!("    {key} = {:?}\n", dir.join(file));
            }
        }
        text += "  Then: systemctl restart vmmd\n";
    }
    for (name, role) in &arguments.clients {
        text += &format!(
            "- Give {name} ({role}) the files ca.crt, {name}.crt and {name}.key. There:\n    vmmctl config set-context {host} \
             --endpoint https://{host}:7443 --ca ca.crt --cert {name}.crt --key {name}.key\n    vmmctl --context {host} get vm\n",
            host = host_name()
        );
    }
    text += "- Keep ca.key away from this node: it is needed only to make more certificates, in a folder with ca.crt and ca.key:\n    \
             vmmd init-certs --dir DIR --client NAME=ROLE\n";
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn arguments(dir: &Path, server_names: &[&str], clients: &[&str]) -> InitCerts {
        InitCerts {
            dir: dir.to_owned(),
            server_names: server_names.iter().map(|name| (*name).to_owned()).collect(),
            clients: clients.iter().map(|text| client(text).unwrap()).collect(),
            days: 30,
        }
    }

    #[test]
    fn files_are_never_overwritten_and_a_later_run_adds_clients() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("tls");
        run(&arguments(&dir, &["node1", "192.0.2.1"], &["alice=operator"])).unwrap();
        let before: Vec<_> = [
            "ca.crt",
            "ca.key",
            "server.crt",
            "server.key",
            "alice.crt",
            "alice.key",
        ]
        .map(|name| (dir.join(name), fs::read(dir.join(name)).unwrap()))
        .into();
        for (path, _) in &before {
            let mode = fs::metadata(path).unwrap().permissions().mode() & 0o777;
            let secret = path.extension().unwrap() == "key";
            assert!(mode == if secret { 0o600 } else { 0o644 }, "{path:?}: {mode:o}");
        }
        for (names, clients, what) in [
            (&["node2"][..], &[][..], "server.key exists"),
            (&[], &["bob=viewer", "alice=viewer"], "alice.key exists"),
            (&[], &[], "nothing to make"),
        ] {
            let refused = run(&arguments(&dir, names, clients)).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
        assert!(!dir.join("bob.key").exists(), "all or nothing");
        run(&arguments(&dir, &[], &["bob=viewer"])).unwrap();
        assert!(dir.join("bob.key").exists());
        for (path, content) in before {
            assert_eq!(fs::read(&path).unwrap(), content, "{path:?}");
        }
        // The renewal as documented: move the old files, keep the CA.
        for name in ["server.crt", "server.key", "alice.crt", "alice.key"] {
            fs::rename(dir.join(name), folder.path().join(name)).unwrap();
        }
        run(&arguments(&dir, &["node1", "192.0.2.1"], &["alice=operator"])).unwrap();
        for name in ["server.crt", "alice.crt"] {
            let before = fs::read(folder.path().join(name)).unwrap();
            assert!(fs::read(dir.join(name)).unwrap() != before, "{name}");
        }
        fs::remove_file(dir.join("ca.key")).unwrap();
        assert!(run(&arguments(&dir, &[], &["carol=viewer"])).is_err());
        let other = KeyPair::generate().unwrap();
        fs::write(dir.join("ca.key"), other.serialize_pem()).unwrap();
        let refused = run(&arguments(&dir, &[], &["carol=viewer"]))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("not made by init-certs"), "{refused}");
    }

    #[test]
    fn last_day_of_the_certificates_is_printed() {
        let arguments = arguments(Path::new("/etc/vmmd/tls"), &["node1"], &["alice=admin"]);
        let now = "2026-11-29T12:00:00Z".parse().unwrap();
        let text = next_steps(&arguments, &[], true, now);
        assert!(
            text.contains("valid for 30 days, until 2026-12-29; make new ones"),
            "{text}"
        );
    }

    #[test]
    fn clients_have_a_name_that_is_a_file_and_a_role_that_there_is() {
        assert_eq!(client("alice=admin"), Ok(("alice".into(), Role::Admin)));
        for wrong in [
            "alice",
            "alice=root",
            "=admin",
            "a/b=admin",
            "../x=admin",
            "ca=admin",
            "server=peer",
            ".a=peer",
        ] {
            assert!(client(wrong).is_err(), "{wrong}");
        }
    }
}
