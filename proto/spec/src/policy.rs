//! When a VM is started, and its machine reset, without anybody having asked.

use vmmd_api::v1;

use super::Violations;

/// Action of the node after the end of a VM's run, and after a restart of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunPolicy {
    /// It runs from its first start until it is stopped by request.
    #[default]
    UnlessStopped,
    /// It runs from its creation on.
    Always,
    /// It is started again after a failure.
    OnFailure,
    /// It is only started by request.
    Manual,
    /// It never runs.
    Off,
}

impl RunPolicy {
    /// Reads `spec.runPolicy` and records violations.
    pub fn new(found: &mut Violations, value: i32) -> Self {
        match v1::RunPolicy::try_from(value) {
            Ok(v1::RunPolicy::Unspecified | v1::RunPolicy::AlwaysOnUnlessStopped) => Self::UnlessStopped,
            Ok(v1::RunPolicy::AlwaysOn) => Self::Always,
            Ok(v1::RunPolicy::RerunOnFailure) => Self::OnFailure,
            Ok(v1::RunPolicy::Manual) => Self::Manual,
            Ok(v1::RunPolicy::AlwaysOff) => Self::Off,
            Err(_) => {
                found.add("spec.runPolicy", format_args!("unknown value {value}"));
                Self::default()
            }
        }
    }

    /// As manifests write it, without `RUN_POLICY_`.
    pub fn name(self) -> &'static str {
        match self {
            Self::UnlessStopped => "ALWAYS_ON_UNLESS_STOPPED",
            Self::Always => "ALWAYS_ON",
            Self::OnFailure => "RERUN_ON_FAILURE",
            Self::Manual => "MANUAL",
            Self::Off => "ALWAYS_OFF",
        }
    }
}

/// Action after a shutdown of a vCPU (triple fault).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCrash {
    /// The machine is reset, as PCs are.
    #[default]
    Restart,
    /// The run ends.
    Stop,
}

impl OnCrash {
    /// Notes a value of the API that does not exist.
    pub(super) fn new(found: &mut Violations, value: i32) -> Self {
        match v1::CrashPolicy::try_from(value) {
            Ok(v1::CrashPolicy::Unspecified | v1::CrashPolicy::Restart) => Self::Restart,
            Ok(v1::CrashPolicy::Stop) => Self::Stop,
            Err(_) => {
                found.add("spec.onCrash", format_args!("unknown value {value}"));
                Self::default()
            }
        }
    }
}

/// The action after a panic of the guest's kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnPanic {
    /// The run ends as a failure, and the run policy decides.
    #[default]
    RunPolicy,
    /// The VM is restarted.
    Restart,
    /// The VM is stopped.
    Stop,
    /// The VM is paused.
    Pause,
    /// Nothing.
    Ignore,
}

impl OnPanic {
    /// Notes a value of the API that does not exist, or that contradicts the run policy.
    pub(super) fn new(found: &mut Violations, value: i32, policy: RunPolicy) -> Self {
        let field = "spec.onPanic";
        match v1::PanicPolicy::try_from(value) {
            Ok(v1::PanicPolicy::Unspecified) => Self::RunPolicy,
            Ok(v1::PanicPolicy::Restart) => Self::Restart,
            Ok(v1::PanicPolicy::Stop) => {
                if policy == RunPolicy::Always {
                    found.add(
                        field,
                        "must not be STOP with spec.runPolicy ALWAYS_ON, which starts the VM again",
                    );
                }
                Self::Stop
            }
            Ok(v1::PanicPolicy::Pause) => Self::Pause,
            Ok(v1::PanicPolicy::Ignore) => Self::Ignore,
            Err(_) => {
                found.add(field, format_args!("unknown value {value}"));
                Self::default()
            }
        }
    }
}

/// Action when a guest does not restart its watchdog in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WatchdogAction {
    /// The machine is reset.
    #[default]
    Reset,
    /// The run ends as a failure.
    PowerOff,
    /// The VM is paused.
    Pause,
    /// No action: there is only the event.
    None,
}

impl WatchdogAction {
    /// Reads `spec.watchdog` and records violations.
    pub(super) fn new(found: &mut Violations, wire: v1::WatchdogSpec) -> Self {
        match v1::WatchdogAction::try_from(wire.action) {
            Ok(v1::WatchdogAction::Unspecified | v1::WatchdogAction::Reset) => Self::Reset,
            Ok(v1::WatchdogAction::Poweroff) => Self::PowerOff,
            Ok(v1::WatchdogAction::Pause) => Self::Pause,
            Ok(v1::WatchdogAction::None) => Self::None,
            Err(_) => {
                let problem = format_args!("unknown value {}", wire.action);
                found.add("spec.watchdog.action", problem);
                Self::default()
            }
        }
    }
}

/// Time of the guest's clock after a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockOnResume {
    /// The time at the pause.
    #[default]
    Keep,
    /// The true time.
    Sync,
}

impl ClockOnResume {
    /// Notes a value of the API that does not exist.
    pub(super) fn new(found: &mut Violations, spec: Option<&v1::ClockSpec>) -> Self {
        let value = spec.map_or(0, |spec| spec.on_resume);
        match v1::ClockOnResume::try_from(value) {
            Ok(v1::ClockOnResume::Unspecified | v1::ClockOnResume::Keep) => Self::Keep,
            Ok(v1::ClockOnResume::Sync) => Self::Sync,
            Err(_) => {
                found.add("spec.clock.onResume", format_args!("unknown value {value}"));
                Self::default()
            }
        }
    }
}
