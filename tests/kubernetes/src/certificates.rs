//! The cluster's authority, and certificates from it.

use std::{fs, net::IpAddr, path::Path};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};

pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    key: String,
}

fn named(name: &str, organization: Option<&str>) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    if let Some(organization) = organization {
        subject.push(DnType::OrganizationName, organization);
    }
    subject
}

impl Authority {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = named("the test's authority", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        Self {
            certificate: params.self_signed(&key).unwrap().pem(),
            key: key.serialize_pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// Writes `ca.crt` and `ca.key`.
    pub fn write(&self, folder: &Path) {
        fs::write(folder.join("ca.crt"), &self.certificate).unwrap();
        fs::write(folder.join("ca.key"), &self.key).unwrap();
    }

    /// Writes `<name>.crt` and `<name>.key` of a server at this address.
    pub fn server(&self, folder: &Path, name: &str, address: IpAddr) {
        let names = ["kubernetes".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.subject_alt_names.push(SanType::IpAddress(address));
        params.distinguished_name = named(name, None);
        self.issue(folder, name, params, ExtendedKeyUsagePurpose::ServerAuth);
    }

    /// Writes `<name>.crt` and `<name>.key` of a client that is `user` in `group`.
    pub fn client(&self, folder: &Path, name: &str, user: &str, group: &str) {
        let mut params = CertificateParams::default();
        params.distinguished_name = named(user, Some(group));
        self.issue(folder, name, params, ExtendedKeyUsagePurpose::ClientAuth);
    }

    fn issue(
        &self,
        folder: &Path,
        name: &str,
        mut params: CertificateParams,
        purpose: ExtendedKeyUsagePurpose,
    ) {
        params.extended_key_usages = vec![purpose];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(folder.join(format!("{name}.crt")), certificate.pem()).unwrap();
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}
