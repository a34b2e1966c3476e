//! A registry (OCI Distribution Specification 1.1): documents and blobs by GET, and being let in.

use std::{fs::File, io, os::unix::fs::FileExt as _, sync::Arc, time::Duration};

use reqwest::{
    Client, StatusCode, Url,
    header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE},
};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;
use vmmd_host::failure::{Failure, Kind, file_failed};
use vmmd_objects::operation::Control;
use vmmd_spec::{image::checksum_text, oci::Reference};
use vmmd_store::{RegistryCredentials, SourceVersion};

use super::{
    MAX_DOCUMENT, Target,
    challenge::{Challenge, UNAUTHORIZED, token_address},
    manifest, not_found,
};
use crate::{
    Ports,
    digest::Checksum,
    fetch::{self, Blob, Download, Downloaded},
    import::has_room,
    reach::Reach,
    rules::ImportRules as Rules,
};

/// How long a document or a token may take to come.
const DOCUMENT: Duration = Duration::from_secs(300);
/// Most tokens for one blob: 24 hours of tokens that are good for two minutes.
const MOST_LOGINS: u32 = 720;
/// Most bytes of an answer with a token.
const MAX_TOKEN: usize = 256 << 10;
/// The reason of a failure inside of this module: there is no such manifest or blob.
const MISSING: &str = "OCI_IMAGE_NOT_FOUND";

/// A repository of a registry.
pub struct Registry {
    client: Client,
    reach: Reach,
    reference: Reference,
    /// `https://HOST/v2/REPOSITORY/`.
    root: Url,
    credentials: Option<RegistryCredentials>,
    /// Authorization of requests, after the registry has demanded it.
    authorization: Option<HeaderValue>,
    first_wait: Duration,
}

/// The address of a request and its authorization.
struct Grant {
    address: Url,
    authorization: Option<HeaderValue>,
}

/// An answer with a token; registries call it by one of two names.
#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// Sends no request. For a tenant, only the configuration decides which registries are reached by HTTP.
    pub fn new(
        reference: Reference,
        rules: &Rules,
        plain_http: bool,
        for_tenant: bool,
        credentials: Option<RegistryCredentials>,
    ) -> Result<Self, Failure> {
        let insecure = rules.is_insecure(reference.host());
        let scheme = match insecure || (!for_tenant && (plain_http || reference.is_loopback())) {
            true => "http",
            false => "https",
        };
        let root = format!("{scheme}://{}/v2/{}/", reference.host(), reference.repository());
        let root = Url::parse(&root).map_err(|error| Failure::field("image.spec.oci.reference", error))?;
        let reach = Reach::new(rules, reference.host(), insecure || !for_tenant);
        reach.check(&root)?;
        Ok(Self {
            client: reach.client()?,
            reach,
            reference,
            root,
            credentials,
            authorization: None,
            first_wait: fetch::FIRST_WAIT,
        })
    }

    /// Requested reference.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// A document and its digest.
    pub async fn document<H: Ports>(
        &mut self,
        host: &Arc<H>,
        target: &Target,
        control: &Control,
    ) -> Result<(Vec<u8>, [u8; 32]), Failure> {
        let path = match target {
            Target::Blob(digest) => format!("blobs/{}", checksum_text(digest)),
            Target::Manifest(digest) => format!("manifests/{}", checksum_text(digest)),
            Target::Named => match self.reference.digest() {
                Some(digest) => format!("manifests/{}", checksum_text(&digest)),
                None => format!("manifests/{}", self.reference.tag()),
            },
        };
        let failed = |error| file_failed("read the manifest of the image", &error);
        let folder = host.folder();
        let opening = host.pools().bulk.run(&[folder.root()], move || folder.scratch());
        let file = opening.await?.map_err(failed)?;
        self.document_into(file, &path, control).await
    }

    /// The same with an empty file, which has it then.
    async fn document_into(
        &mut self,
        file: File,
        path: &str,
        control: &Control,
    ) -> Result<(Vec<u8>, [u8; 32]), Failure> {
        let control = control.silent();
        let reading = timeout(DOCUMENT, self.get(path, &file, None, &control));
        let found = reading.await.unwrap_or_else(|_| Err(slow()))?;
        // At most MAX_DOCUMENT.
        let mut bytes = vec![0; usize::try_from(found.bytes).unwrap_or_default()];
        file.read_exact_at(&mut bytes, 0)
            .map_err(|error| file_failed("read the manifest of the image", &error))?;
        let digest = Sha256::digest(&bytes).into();
        Ok((bytes, digest))
    }

    /// Brings a blob to its place in a file, which may have its beginning.
    pub async fn blob(
        &mut self,
        digest: &[u8; 32],
        file: &File,
        place: Blob,
        control: &Control,
    ) -> Result<Downloaded, Failure> {
        let path = format!("blobs/{}", checksum_text(digest));
        self.get(&path, file, Some(place), control).await
    }

    /// Downloads the content at a path below the repository. Authenticates when the registry
    /// demands it, and again when the token expires.
    async fn get(
        &mut self,
        path: &str,
        file: &File,
        blob: Option<Blob>,
        control: &Control,
    ) -> Result<Downloaded, Failure> {
        let own = self.root.join(path);
        let own = own.map_err(|error| Failure::internal(error.to_string()))?;
        let mut grant = Grant {
            address: own.clone(),
            authorization: self.authorization.clone(),
        };
        let failed = |error: &io::Error| file_failed("write the download", error);
        let (mut let_in_at, mut logins) = (None, 0);
        loop {
            let mut headers = HeaderMap::new();
            if blob.is_none() {
                headers.insert(ACCEPT, HeaderValue::from_static(manifest::ACCEPT));
            }
            headers.extend(grant.authorization.clone().map(|value| (AUTHORIZATION, value)));
            let download = Download {
                client: self.client.clone(),
                url: grant.address.as_str(),
                headers,
                unauthorized: UNAUTHORIZED,
                missing: MISSING,
                blob,
                file: file.try_clone().map_err(|error| failed(&error))?,
                version: SourceVersion::default(),
                hash: Checksum::like(&[]),
                max_size: blob.map_or(MAX_DOCUMENT, |blob| blob.size),
                first_wait: self.first_wait,
                room: has_room,
            };
            match fetch::fetch(download, control, |_| async { Ok(()) }).await {
                Err(failure) if failure.reason == UNAUTHORIZED => {
                    // A token expires in minutes, and a blob may take hours. Each token has to bring the file further.
                    let have = file.metadata().map_err(|error| failed(&error))?.len();
                    if let_in_at.is_some_and(|at| have <= at) || logins == MOST_LOGINS {
                        return Err(self.not_let_in());
                    }
                    let_in_at = Some(have);
                    logins += 1;
                    let entering = timeout(DOCUMENT, self.enter(&own));
                    grant = tokio::select! {
                        entered = entering => entered.unwrap_or_else(|_| Err(slow()))?,
                        () = control.cancel().cancelled() => return Err(fetch::cancelled()),
                    }
                }
                Err(failure) if failure.reason == MISSING => {
                    return Err(not_found(&self.reference, path));
                }
                ended => return ended,
            }
        }
    }

    /// Asks for the challenge of an address, and answers the challenge.
    ///
    /// The registry may redirect to any server, for example to the registry that its images have moved to. That server must not name the
    /// place that gets the password. Without a password, that server gets its own anonymous token. No redirect carries a token to
    /// another server, so the request is sent to that server directly.
    async fn enter(&mut self, own: &Url) -> Result<Grant, Failure> {
        self.authorization = None;
        let request = self.client.get(own.clone());
        let response = request.send().await.map_err(|error| unreachable(&error))?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(Grant {
                address: own.clone(),
                authorization: None,
            });
        }
        let address = response.url().clone();
        let is_other = address.origin() != self.root.origin();
        if is_other && self.credentials.is_some() {
            let message = "the registry redirects to another server, and that server asks for a password or token: neither is sent there";
            return Err(Failure::precondition(UNAUTHORIZED, message));
        }
        let headers = response.headers().get_all(WWW_AUTHENTICATE);
        let headers = headers.iter().filter_map(|value| value.to_str().ok());
        let value = match (Challenge::of(headers), &self.credentials) {
            (
                Some(Challenge::Bearer {
                    realm,
                    service,
                    scope,
                }),
                _,
            ) => {
                let realm = token_address(&realm, &address)?;
                self.reach.check(&realm)?;
                // Another server may have another name for the repository.
                let scope = scope.filter(|_| is_other);
                format!("Bearer {}", self.token(realm, service, scope).await?)
            }
            (Some(Challenge::Basic), Some(known)) => basic(known),
            (Some(Challenge::Basic), None) => return Err(self.not_let_in()),
            (None, _) => {
                let message =
                    "the registry wants neither a password nor a token: how to be let in is not known";
                return Err(Failure::precondition(UNAUTHORIZED, message));
            }
        };
        let mut value = HeaderValue::try_from(value).map_err(|_| no_token())?;
        value.set_sensitive(true);
        let mut grant = Grant {
            address,
            authorization: Some(value),
        };
        if !is_other {
            grant.address = own.clone();
            self.authorization.clone_from(&grant.authorization);
        }
        Ok(grant)
    }

    /// A token with which this repository can be read (Distribution, "Token Authentication Specification").
    async fn token(
        &self,
        mut address: Url,
        service: Option<String>,
        scope: Option<String>,
    ) -> Result<String, Failure> {
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.reference.repository()));
        if let Some(service) = service {
            address.query_pairs_mut().append_pair("service", &service);
        }
        address.query_pairs_mut().append_pair("scope", &scope);
        let mut request = self.client.get(address);
        if let Some(known) = &self.credentials {
            let mut value = HeaderValue::try_from(basic(known)).map_err(|_| self.not_let_in())?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let mut response = request.send().await.map_err(|error| unreachable(&error))?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(self.not_let_in()),
            status => {
                let message = format!("the registry's tokens can't be had: the server says {status}");
                return Err(Failure::new(Kind::Unavailable, UNAUTHORIZED, message));
            }
        }
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|error| unreachable(&error))? {
            body.extend_from_slice(&piece);
            if body.len() > MAX_TOKEN {
                return Err(no_token());
            }
        }
        let answer: Token = serde_json::from_slice(&body).map_err(|_| no_token())?;
        answer.token.or(answer.access_token).ok_or_else(no_token)
    }

    fn not_let_in(&self) -> Failure {
        let message = match &self.credentials {
            Some(_) => format!(
                "the registry refuses {} to this user name and password",
                self.reference
            ),
            None => format!(
                "the registry gives {} only with a user name and password, or the image does not exist",
                self.reference
            ),
        };
        Failure::precondition(UNAUTHORIZED, message)
    }
}

/// RFC 7617.
fn basic(known: &RegistryCredentials) -> String {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let both = format!("{}:{}", known.username, known.password);
    format!("Basic {}", STANDARD.encode(both))
}

fn slow() -> Failure {
    let message = format!("the registry has not answered within {} s", DOCUMENT.as_secs());
    Failure::new(Kind::Unavailable, "DOWNLOAD_FAILED", message)
}

fn no_token() -> Failure {
    Failure::precondition(
        UNAUTHORIZED,
        "what the registry's server for tokens sends has no token",
    )
}

fn unreachable(error: &reqwest::Error) -> Failure {
    let message = format!("the registry can't be asked: {}", fetch::words(error));
    Failure::new(Kind::Unavailable, "DOWNLOAD_FAILED", message)
}

#[cfg(test)]
mod tests;
