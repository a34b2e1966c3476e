//! Identity in a verified certificate: the role from a URI of the subject alternative name, and the
//! subject's name for people.

use rustls::pki_types::CertificateDer;
use vmmd_host::text;
use webpki::EndEntityCert;
use x509_parser::parse_x509_certificate;

use crate::auth::Role;

/// The name and the role of a certificate that the handshake has verified.
pub fn identify(certificate: &CertificateDer<'_>) -> Option<(String, Option<Role>)> {
    let name = common_name(certificate).unwrap_or_else(|| "a certificate without a name".to_owned());
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    Some((name, Role::of_uris(certificate.valid_uri_names())))
}

/// Whether a certificate says that it is for servers. Without the extension any use is allowed, and nothing is said.
pub fn is_for_servers(certificate: &CertificateDer<'_>) -> bool {
    let Ok((_, certificate)) = parse_x509_certificate(certificate) else {
        return false;
    };
    let usage = certificate.extended_key_usage().ok().flatten();
    usage.is_some_and(|usage| usage.value.server_auth)
}

/// The end of a certificate's validity, in seconds of Unix time.
pub fn valid_until(certificate: &CertificateDer<'_>) -> Option<i64> {
    let (_, certificate) = parse_x509_certificate(certificate).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

/// The last common name of the subject, at most 100 bytes and without control characters.
pub fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = parse_x509_certificate(certificate).ok()?;
    let name = certificate.subject().iter_common_name().last()?;
    // PrintableString and UTF8String are both UTF-8; of the others nothing is read but their ASCII.
    let name = String::from_utf8_lossy(name.attr_value().data);
    Some(text::brief_line(text::brief(&name))).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn made(names: &[(DnType, &str)], uris: &[&str]) -> (String, Option<Role>) {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, name) in names {
            params.distinguished_name.push(kind.clone(), *name);
        }
        let uris = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap()));
        params.subject_alt_names = uris.collect();
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        identify(certificate.der()).unwrap()
    }

    #[test]
    fn the_name_is_the_common_name_and_the_role_the_uri() {
        use DnType::{CommonName, OrganizationName, OrganizationalUnitName};
        let names = [
            (OrganizationName, "Example"),
            (CommonName, "alice"),
            (OrganizationalUnitName, "admin"),
        ];
        assert_eq!(
            made(&names, &["vmmd://role/viewer"]),
            ("alice".into(), Some(Role::Viewer))
        );
        assert_eq!(made(&names, &["https://example.com"]), ("alice".into(), None));
        let long = "ä".repeat(100);
        assert_eq!(made(&[(CommonName, &long)], &[]).0, "ä".repeat(50));
        assert_eq!(made(&[], &[]).0, "a certificate without a name");
    }

    proptest::proptest! {
        #[test]
        fn anything_can_be_read(bytes: Vec<u8>) {
            let _ = identify(&CertificateDer::from(bytes));
        }
    }
}
