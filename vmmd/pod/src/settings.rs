//! The environment of the launcher.

use std::{env, path::PathBuf, time::Duration};

/// Time before the end of the pod's grace period at which the daemon kills the VM.
const RESERVE: Duration = Duration::from_secs(5);
/// Kubernetes' default of `terminationGracePeriodSeconds`.
const DEFAULT_GRACE: u64 = 30;

/// See the program's description.
#[derive(Debug)]
pub struct Settings {
    /// The pod.
    pub namespace: String,
    /// See [`Self::namespace`].
    pub name: String,
    /// See [`Self::namespace`].
    pub uid: String,
    /// Name of the VirtualMachine.
    pub vm: String,
    /// Number of its run.
    pub run: i64,
    /// Time that the guest gets to power off.
    pub grace: Duration,
    /// The socket of vmmd.
    pub socket: PathBuf,
    /// The folder of `volumes`, `devices` and `secrets`.
    pub folder: PathBuf,
}

impl Settings {
    /// Reads the environment. The error names the missing or wrong variable.
    pub fn read() -> Result<Self, String> {
        let grace = match env::var("VMMD_POD_GRACE_SECONDS") {
            Ok(text) => number("VMMD_POD_GRACE_SECONDS", &text)?,
            Err(_) => DEFAULT_GRACE,
        };
        Ok(Self {
            namespace: required("VMMD_POD_NAMESPACE")?,
            name: required("VMMD_POD_NAME")?,
            uid: Self::uid()?,
            vm: required("VMMD_POD_VM")?,
            run: number("VMMD_POD_RUN", &required("VMMD_POD_RUN")?)?,
            grace: Duration::from_secs(grace).saturating_sub(RESERVE),
            socket: path("VMMD_POD_SOCKET", "/run/vmmd-pod/vmmd.sock"),
            folder: path("VMMD_POD_FOLDER", "/vmmd"),
        })
    }

    /// Uid of the pod.
    pub fn uid() -> Result<String, String> {
        required("VMMD_POD_UID")
    }

    /// The file for the reason of the end.
    pub fn termination_log() -> PathBuf {
        path("VMMD_POD_TERMINATION_LOG", "/dev/termination-log")
    }
}

fn path(variable: &str, default: &str) -> PathBuf {
    env::var_os(variable).map_or_else(|| default.into(), PathBuf::from)
}

fn required(variable: &str) -> Result<String, String> {
    match env::var(variable) {
        Ok(value) if !value.is_empty() => Ok(value),
        _ => Err(format!(
            "the environment has no {variable}: the pod must be made by the controller of vmmd-kube"
        )),
    }
}

fn number<T: std::str::FromStr>(variable: &str, text: &str) -> Result<T, String> {
    let wrong = |_| format!("{variable} must be a decimal number, is \"{text}\"");
    text.parse().map_err(wrong)
}
