//! Images of container disks, which vmmd imports from registries.

use std::{
    collections::HashMap,
    sync::{MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::ByteString;
use serde_json::Value;
use tokio::time::Instant;
use tonic::{Code, Status};
use vmmd_api::v1::{self, ImagePhase, OperationPhase};

use super::{Data, Error, IMPORTING_IMAGE, Kind, Lack, Objects, Provisioner, RunPod};
use crate::{
    daemon::{self, CALL, within},
    names,
    sources::SecretName,
};

/// Key of a Secret of type kubernetes.io/dockerconfigjson.
pub const DOCKER_CONFIG: &str = ".dockerconfigjson";
/// How soon an import that failed is tried again; twice as long each time.
const FIRST_WAIT: Duration = Duration::from_secs(10);
/// How long it waits at most.
const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// Most imports of one namespace under way on a node, so that no tenant takes the places of the others.
const OF_NAMESPACE: usize = 4;

/// Why there is no image.
pub enum NoImage {
    /// The image is being imported, or cannot be imported for now.
    Lacks(Lack),
    /// vmmd does not import it.
    Refused(Box<Status>),
}

/// Imports that this agent has begun and that are not known to have succeeded, by the name of the image.
pub type Imports = HashMap<String, Import>;

/// One of them.
#[derive(Clone, Debug, Default)]
pub struct Import {
    /// The operation under way; empty when there is none.
    operation: String,
    /// For whose pod it was begun.
    namespace: String,
    /// In a row.
    failures: u32,
    /// Error of the last import, and earliest time of the next one.
    failed: Option<(String, Instant)>,
}

impl Import {
    fn fail(&mut self, message: &str, now: Instant) {
        let factor = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        let wait = FIRST_WAIT.saturating_mul(factor).min(LONGEST_WAIT);
        self.operation.clear();
        self.failures = self.failures.saturating_add(1).min(16);
        self.failed = Some((message.to_owned(), now + wait));
    }
}

impl Provisioner {
    /// The name of the image of this reference, when the node has it.
    pub async fn image(
        &self,
        pod: &RunPod,
        reference: &str,
        secrets: &[SecretName],
        objects: &impl Objects,
    ) -> Result<Result<String, NoImage>, Error> {
        let namespace = &pod.namespace;
        let name = names::image_name(reference, (!secrets.is_empty()).then_some(namespace));
        let lacks = |reason, message: String| Ok(Err(NoImage::Lacks(Lack::new(reason, message))));
        let importing = format!("the image {reference} is being imported");
        if let Some(image) = self.daemon.image(&name).await? {
            let phase = image.status.map(|status| status.phase()).unwrap_or_default();
            if phase == ImagePhase::Ready {
                self.imports().remove(&name);
                return Ok(Ok(name));
            }
            return lacks(IMPORTING_IMAGE, importing);
        }
        let mut import = self.imports().get(&name).cloned().unwrap_or_default();
        if !import.operation.is_empty() {
            match self.daemon.operation(&import.operation).await? {
                Some(operation) => match operation.phase() {
                    OperationPhase::Failed | OperationPhase::Cancelled => {
                        let error = operation.error.map(|error| error.message);
                        import.fail(&error.unwrap_or(operation.message), Instant::now());
                    }
                    OperationPhase::Completed => import = Import::default(),
                    _ => return lacks(IMPORTING_IMAGE, importing),
                },
                None => import.operation.clear(),
            }
            self.imports().insert(name.clone(), import.clone());
        }
        if let Some((message, next)) = &import.failed
            && Instant::now() < *next
        {
            return lacks("ImportFailed", format!("the image {reference}: {message}"));
        }
        if self.under_way(namespace).await? >= OF_NAMESPACE {
            let message = format!(
                "the image {reference} waits until one of the {OF_NAMESPACE} imports of this namespace has ended"
            );
            return lacks(IMPORTING_IMAGE, message);
        }
        let registry = registry(reference);
        let mut credentials = None;
        for SecretName { name } in secrets {
            match objects.data(Kind::Secret, name).await? {
                Ok(data) => credentials = credentials.or_else(|| self::credentials(&data, registry)),
                Err(lack) => return Ok(Err(NoImage::Lacks(lack))),
            }
        }
        let request = self.import(&name, reference, credentials);
        match within(CALL, self.daemon.images.clone().import_image(request)).await {
            Ok(answer) => {
                import.operation = answer.operation.map(|operation| operation.id).unwrap_or_default();
                import.namespace.clone_from(namespace);
                import.failed = None;
                self.imports().insert(name, import);
                lacks(IMPORTING_IMAGE, importing)
            }
            // For another pod.
            Err(status) if status.code() == Code::AlreadyExists => lacks(IMPORTING_IMAGE, importing),
            // All namespaces together have too many imports.
            Err(status) if status.code() == Code::ResourceExhausted => lacks(
                IMPORTING_IMAGE,
                format!("the image {reference} waits: {}", status.message()),
            ),
            Err(status) if daemon::refused(&status) => Ok(Err(NoImage::Refused(Box::new(status)))),
            Err(status) => Err(status.into()),
        }
    }
}

impl Provisioner {
    /// The imports that this agent has begun.
    fn imports(&self) -> MutexGuard<'_, Imports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn import(
        &self,
        name: &str,
        reference: &str,
        credentials: Option<v1::OciCredentials>,
    ) -> v1::ImportImageRequest {
        v1::ImportImageRequest {
            image: Some(v1::Image {
                metadata: Some(v1::ObjectMetadata {
                    name: name.to_owned(),
                    labels: [(names::AGENT.to_owned(), self.node.clone())].into(),
                    owner: names::MANAGER.to_owned(),
                    ..v1::ObjectMetadata::default()
                }),
                spec: Some(v1::ImageSpec {
                    source: Some(v1::image_spec::Source::Oci(v1::OciSource {
                        reference: reference.to_owned(),
                        credentials,
                        ..v1::OciSource::default()
                    })),
                    ..v1::ImageSpec::default()
                }),
                status: None,
            }),
            no_wait: true,
            ..v1::ImportImageRequest::default()
        }
    }

    /// How many imports of a namespace are under way. A pod that is gone does not ask for the end of its import, so vmmd is asked here.
    async fn under_way(&self, namespace: &str) -> Result<usize, Error> {
        let begun = self.imports().clone().into_iter();
        let of_it =
            |(_, import): &(String, Import)| import.namespace == namespace && !import.operation.is_empty();
        let mut count = 0;
        for (name, import) in begun.filter(of_it) {
            let operation = self.daemon.operation(&import.operation).await?;
            match operation.as_ref().map(v1::Operation::phase) {
                None | Some(OperationPhase::Completed) => drop(self.imports().remove(&name)),
                Some(OperationPhase::Failed | OperationPhase::Cancelled) => {
                    let error = operation
                        .and_then(|operation| operation.error)
                        .unwrap_or_default();
                    if let Some(import) = self.imports().get_mut(&name) {
                        import.fail(&error.message, Instant::now());
                    }
                }
                Some(_) => count += 1,
            }
        }
        Ok(count)
    }
}

/// The host of a reference, with its port.
fn registry(reference: &str) -> &str {
    reference.split('/').next().unwrap_or_default()
}

/// Returns a Secret's credentials for a registry:
/// `{"auths": {HOST: {"username": …, "password": …}}}`, or `"auth"` with both in base64 and a colon
/// between.
fn credentials(data: &Data, registry: &str) -> Option<v1::OciCredentials> {
    let config: Value = serde_json::from_slice(data.get(DOCKER_CONFIG)?).ok()?;
    let auths = config["auths"].as_object()?;
    let (_, entry) = auths.iter().find(|(key, _)| host(key) == host(registry))?;
    let text = |name: &str| entry[name].as_str().filter(|text| !text.is_empty());
    if let (Some(username), Some(password)) = (text("username"), text("password")) {
        return Some(v1::OciCredentials {
            username: username.to_owned(),
            password: password.to_owned(),
        });
    }
    let ByteString(both) = serde_json::from_value(entry["auth"].clone()).ok()?;
    let both = String::from_utf8(both).ok()?;
    let (username, password) = both.split_once(':')?;
    Some(v1::OciCredentials {
        username: username.to_owned(),
        password: password.to_owned(),
    })
}

/// Host of a key in such a Secret; the key may be an address with a path. Docker Hub has several
/// names.
fn host(key: &str) -> &str {
    let bare = key.trim_start_matches("https://").trim_start_matches("http://");
    match bare.split('/').next().unwrap_or_default() {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        host => host,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn passwords_are_those_of_the_registry() {
        let config = json!({"auths": {
            "registry.example:5000": {"username": "ci", "password": "one"},
            "https://index.docker.io/v1/": {"auth": "Y2k6dHdvOnRocmVl"},
            "broken.example": {"auth": "?"},
        }});
        let data = Data::from([(DOCKER_CONFIG.to_owned(), config.to_string().into_bytes())]);
        let table = [
            ("registry.example:5000/debian:13", Some(("ci", "one"))),
            ("registry.example/debian:13", None),
            ("docker.io/library/debian", Some(("ci", "two:three"))),
            ("broken.example/debian", None),
        ];
        for (reference, wanted) in table {
            let found = credentials(&data, registry(reference));
            let found = found.as_ref().map(|found| (&*found.username, &*found.password));
            assert_eq!(found, wanted, "{reference}");
        }
        assert!(credentials(&Data::new(), "registry.example").is_none());
    }

    #[test]
    fn imports_that_fail_wait_twice_as_long_each_time() {
        let now = Instant::now();
        let mut import = Import::default();
        for wanted in [10, 20, 40, 80, 160, 300, 300] {
            import.fail("no such image", now);
            let (_, next) = import.failed.clone().unwrap();
            assert_eq!(next.duration_since(now).as_secs(), wanted);
        }
    }
}
