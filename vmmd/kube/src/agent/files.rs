//! Values of Secrets and ConfigMaps that a launcher has passed.

use std::collections::BTreeMap;

use vmmd_api::v1;

use crate::{
    names,
    provision::{Data, Error, Kind, Lack, Objects},
};

/// The files of a pod: by volume, then by key.
pub struct Files(BTreeMap<String, Data>);

impl Files {
    /// Those of a pod.
    pub fn of(files: Vec<v1::PodFile>) -> Self {
        let mut all = BTreeMap::<_, Data>::new();
        for file in files {
            if let Some((volume, key)) = file.path.split_once('/') {
                all.entry(volume.to_owned())
                    .or_default()
                    .insert(key.to_owned(), file.content);
            }
        }
        Self(all)
    }
}

impl Objects for Files {
    async fn data(&self, kind: Kind, name: &str) -> Result<Result<Data, Lack>, Error> {
        let found = self.0.get(&names::values_volume(kind == Kind::Secret, name));
        Ok(found.cloned().ok_or_else(|| {
            // The kubelet starts no pod before the object exists.
            Lack::new(
                "ValuesMissing",
                format!("the pod has passed no values of {kind:?} {name}"),
            )
        }))
    }
}
