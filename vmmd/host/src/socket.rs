//! Binding of UNIX sockets at paths.

use std::{fs, io, os::unix::fs::FileTypeExt, path::Path};

use tokio::net::UnixListener;

/// Binds `path`. `permit` sets the rights of the file before clients can find it. A socket that an earlier daemon has left is
/// replaced; the caller holds the daemon's lock, so there is no other daemon with this path.
pub fn bind(path: &Path, permit: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<UnixListener> {
    if let Ok(metadata) = fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            let message = format!("{} exists and is no socket", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            let message = format!("another program listens on {}", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
        }
    }
    // Under another name until the rights are right.
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&new)?;
    permit(Path::new(&new))?;
    fs::rename(&new, path)?;
    Ok(listener)
}
