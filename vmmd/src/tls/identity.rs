//! What a verified certificate says of its owner: the role in a URI of the subject alternative name, and for people the name
//! in the subject.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use crate::{auth::Role, text};

/// OID 2.5.4.3 in DER: commonName (RFC 5280, A.1).
const COMMON_NAME: [u8; 3] = [0x55, 4, 3];

/// Tags of DER (X.690).
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 6;

/// The name and the role of a certificate that the handshake has verified.
pub fn identify(certificate: &CertificateDer<'_>) -> Option<(String, Option<Role>)> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    let name =
        common_name(certificate.subject()).unwrap_or_else(|| "a certificate without a name".to_owned());
    Some((name, Role::of_uris(certificate.valid_uri_names())))
}

/// The last common name in a subject (the content of its RDNSequence), at most 100 bytes and without control characters.
pub fn common_name(mut subject: &[u8]) -> Option<String> {
    let mut name = None;
    while !subject.is_empty() {
        let mut attributes = take(&mut subject, SET)?;
        while !attributes.is_empty() {
            let mut attribute = take(&mut attributes, SEQUENCE)?;
            if take(&mut attribute, OBJECT_IDENTIFIER)? == COMMON_NAME {
                // PrintableString and UTF8String are both UTF-8; of the others nothing is read but their ASCII.
                let (_, value) = element(&mut attribute)?;
                name = Some(text::brief_line(text::brief(&String::from_utf8_lossy(value))));
            }
        }
    }
    name.filter(|name| !name.is_empty())
}

fn take<'a>(der: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    let (found, content) = element(der)?;
    (found == tag).then_some(content)
}

/// The next element: its tag and content.
fn element<'a>(der: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (tag, rest) = der.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        0x81 | 0x82 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (
                bytes
                    .iter()
                    .fold(0, |length, byte| length << 8 | usize::from(*byte)),
                rest,
            )
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    *der = rest;
    Some((*tag, content))
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
        fn anything_can_be_read(subject: Vec<u8>) {
            let _ = common_name(&subject);
        }
    }
}
