//! A folder with OCI images (OCI Image Layout Specification 1.1): `index.json` names them, and `blobs/sha256` has all else by its digest.

use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use sha2::{Digest as _, Sha256};
use vmmd_host::failure::{Failure, file_failed};
use vmmd_objects::operation::{Control, cancelled};
use vmmd_spec::{image::checksum_text, oci::LayoutTarget};

use super::{MAX_DOCUMENT, Target, manifest::unusable};
use crate::{
    Ports, SourceFile,
    fetch::{Blob, Downloaded},
    import::has_room,
};

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;

/// The folder, and which of its images is wanted.
#[derive(Debug)]
pub struct Layout {
    path: PathBuf,
    target: LayoutTarget,
}

impl Layout {
    /// Creates the layout without access to its files.
    pub fn new(path: &str, reference: &str) -> Result<Self, Failure> {
        Ok(Self {
            path: path.into(),
            target: LayoutTarget::parse(reference).map_err(Failure::internal)?,
        })
    }

    /// Which image is wanted.
    pub fn target(&self) -> &LayoutTarget {
        &self.target
    }

    fn blob_path(&self, digest: &[u8; 32]) -> PathBuf {
        let digest = checksum_text(digest);
        let digits = digest.strip_prefix("sha256:").unwrap_or_default();
        self.path.join("blobs/sha256").join(digits)
    }

    /// A document and its digest.
    pub async fn document<H: Ports>(
        &self,
        host: &Arc<H>,
        target: &Target,
    ) -> Result<(Vec<u8>, [u8; 32]), Failure> {
        let path = match target {
            Target::Named => self.path.join("index.json"),
            Target::Manifest(digest) | Target::Blob(digest) => self.blob_path(digest),
        };
        let (of, beneath) = (Arc::clone(host), [path.clone()]);
        let reading = host.pools().bulk.run(&beneath, move || {
            let file = open(&of, &path)?;
            let mut bytes = Vec::new();
            let read = file.file.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
            read.map_err(|error| file_failed("read the folder", &error))?;
            if bytes.len() as u64 > MAX_DOCUMENT {
                return Err(unusable("a manifest or index of the folder has more than 4 MiB"));
            }
            let digest: [u8; 32] = Sha256::digest(&bytes).into();
            Ok::<_, Failure>((bytes, digest))
        });
        reading.await?
    }

    /// Copies a blob to its place in a file. The hash is that of the copy, which no other process
    /// can change.
    pub async fn blob<H: Ports>(
        &self,
        host: &Arc<H>,
        digest: &[u8; 32],
        to: &File,
        place: Blob,
        control: &Control,
    ) -> Result<Downloaded, Failure> {
        let path = self.blob_path(digest);
        let failed = |error: io::Error| file_failed("copy the layers of the image", &error);
        let (of, to, control) = (Arc::clone(host), to.try_clone().map_err(failed)?, control.clone());
        let copying = host
            .pools()
            .bulk
            .run(&[path.clone(), host.folder().root()], move || {
                let file = open(&of, &path)?;
                if file.size != place.size {
                    let problem = format!(
                        "a layer has {} bytes, and {} in the manifest",
                        file.size, place.size
                    );
                    return Err(unusable(&problem));
                }
                copy(&file.file, &to, place, &control).map_err(|error| match control.wanted() {
                    Ok(()) => failed(error),
                    Err(_) => cancelled(of.stopping()),
                })
            });
        copying.await?
    }
}

/// Opens a file of the folder, which is below the folders that the configuration allows wherever links lead.
fn open<H: Ports>(host: &Arc<H>, path: &Path) -> Result<SourceFile, Failure> {
    let label = format!("ociLayout: \"{}\"", path.display());
    let file = host.open_source(&label, path)?;
    match file.block_device {
        true => Err(unusable("its folder has a block device in the place of a file")),
        false => Ok(file),
    }
}

fn copy(from: &File, to: &File, place: Blob, control: &Control) -> io::Result<Downloaded> {
    to.set_len(place.base)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; PIECE];
    let mut done = 0;
    while done < place.size {
        control.wanted()?;
        control.progress(place.base + done, place.all);
        let wanted = usize::try_from(place.size - done)
            .unwrap_or(usize::MAX)
            .min(PIECE);
        let count = from.read_at(buffer.get_mut(..wanted).unwrap_or_default(), done)?;
        if count == 0 {
            break;
        }
        if !has_room(to)? {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let data = buffer.get(..count).unwrap_or_default();
        to.write_all_at(data, place.base + done)?;
        hash.update(data);
        done += count as u64;
    }
    Ok(Downloaded {
        checksum: hash.finalize().to_vec(),
        bytes: done,
        resumed: false,
    })
}
