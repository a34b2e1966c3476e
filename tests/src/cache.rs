//! Artefacts that are built once per set of inputs.
//!
//! An artefact is a folder `<name>-<hash>` below [`paths::test_node_dir`]. The build uses a
//! temporary name and renames the complete artefact, so that a folder with the final name is always
//! complete. A file lock makes parallel callers build once. When a new artefact is complete, the
//! artefacts from earlier inputs are removed. A process with open files of a removed artefact keeps
//! them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::paths;

/// The inputs of an artefact, in the order in which they were added.
pub struct Inputs(Sha256);

impl Inputs {
    /// `version` is that of the code that builds it: raise it when the same inputs are to give another result.
    pub fn new(version: u32) -> Self {
        let mut inputs = Inputs(Sha256::new());
        inputs.add("version", &version.to_le_bytes());
        inputs
    }

    /// Adds bytes under a label.
    pub fn add(&mut self, label: &str, bytes: &[u8]) -> &mut Self {
        for part in [label.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
        self
    }

    /// Adds a file: its mode and content.
    pub fn add_file(&mut self, path: &Path) -> Result<&mut Self> {
        use std::os::unix::fs::PermissionsExt;
        let content = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let executable = fs::metadata(path)?.permissions().mode() & 0o100 != 0;
        Ok(self.add(if executable { "executable" } else { "file" }, &content))
    }

    /// Adds a whole folder: the paths in it, their modes and contents.
    pub fn add_tree(&mut self, root: &Path) -> Result<&mut Self> {
        for path in files_below(root)? {
            let name = path
                .strip_prefix(root)
                .unwrap_or(&path)
                .to_string_lossy()
                .into_owned();
            self.add("path", name.as_bytes()).add_file(&path)?;
        }
        Ok(self)
    }

    /// Adds another artefact, or a folder in it: its name is made of its own inputs, and the same in each build tree.
    pub fn add_artefact(&mut self, path: &Path) -> &mut Self {
        let name = path.strip_prefix(paths::test_node_dir()).unwrap_or(path);
        self.add("artefact", name.to_string_lossy().as_bytes())
    }

    fn hash(&self) -> String {
        self.0
            .clone()
            .finalize()
            .iter()
            .take(6)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// All regular files below `root`, sorted.
pub fn files_below(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("read folder {}", folder.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The folder of the artefact `name` made from `inputs`, which `build` fills when there is none yet.
pub fn get_or_build(name: &str, inputs: &Inputs, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    get_or_build_in(&paths::test_node_dir(), name, inputs, build)
}

fn get_or_build_in(
    dir: &Path,
    name: &str,
    inputs: &Inputs,
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let wanted = dir.join(format!("{name}-{}", inputs.hash()));
    if wanted.is_dir() {
        return Ok(wanted);
    }
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let lock = File::create(dir.join(format!(".{name}.lock")))?;
    lock.lock()
        .with_context(|| format!("wait for another build of {name}"))?;
    if wanted.is_dir() {
        return Ok(wanted);
    }
    let began = Instant::now();
    eprintln!("building {name} …");
    let partial = dir.join(format!(".{name}.partial"));
    remove_tree(&partial)?;
    fs::create_dir(&partial)?;
    build(&partial).with_context(|| format!("build {name}"))?;
    for old in fs::read_dir(dir)? {
        let old = old?.path();
        if is_version_of(&old, name) {
            remove_tree(&old)?;
        }
    }
    fs::rename(&partial, &wanted)?;
    eprintln!("built {name} in {:.1} s", began.elapsed().as_secs_f32());
    Ok(wanted)
}

/// Whether `path` is `<name>-<12 hex digits>`.
fn is_version_of(path: &Path, name: &str) -> bool {
    path.file_name()
        .and_then(|file| file.to_str())
        .and_then(|file| file.strip_prefix(name))
        .and_then(|rest| rest.strip_prefix('-'))
        .is_some_and(|hash| hash.len() == 12 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn inputs(text: &str) -> Inputs {
        let mut inputs = Inputs::new(1);
        inputs.add("text", text.as_bytes());
        inputs
    }

    #[test]
    fn parallel_callers_build_once_and_all_get_it() {
        let dir = tempfile::tempdir().expect("folder");
        let builds = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let path = get_or_build_in(dir.path(), "thing", &inputs("a"), |out| {
                        builds.fetch_add(1, Ordering::SeqCst);
                        fs::write(out.join("file"), "content")?;
                        Ok(())
                    })
                    .expect("build");
                    assert_eq!(fs::read_to_string(path.join("file")).expect("file"), "content");
                });
            }
        });
        assert_eq!(builds.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn other_inputs_replace_the_old_artefact_but_not_its_neighbours() {
        let dir = tempfile::tempdir().expect("folder");
        let build = |name: &str, text: &str| get_or_build_in(dir.path(), name, &inputs(text), |_| Ok(()));
        let old = build("thing", "a").expect("build");
        let neighbour = build("thing-b", "a").expect("build");
        let new = build("thing", "b").expect("build");
        assert!(!old.exists() && new.exists() && neighbour.exists());
    }

    #[test]
    fn failed_build_keeps_the_old_entry() {
        let dir = tempfile::tempdir().expect("folder");
        let old = get_or_build_in(dir.path(), "thing", &inputs("a"), |_| Ok(())).expect("build");
        let failed = get_or_build_in(dir.path(), "thing", &inputs("b"), |out| {
            fs::write(out.join("half"), "")?;
            anyhow::bail!("no space")
        });
        assert!(format!("{:#}", failed.expect_err("failure")).contains("build thing: no space"));
        assert!(old.exists());
        let good = get_or_build_in(dir.path(), "thing", &inputs("b"), |_| Ok(())).expect("build");
        assert!(!good.join("half").exists());
    }
}
