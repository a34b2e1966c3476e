//! Requests that change something.

use prost::Message;
use proto::v1;

/// A request that changes something.
pub trait Mutation: Message + Clone + Default + Send + 'static {
    /// Name of its method.
    const METHOD: &'static str;

    /// Given by the client; empty when it gave none.
    fn request_id(&self) -> &str;

    /// The same without its id.
    fn without_id(self) -> Self;

    /// The generation that the VM must have; any when 0.
    fn generation(&self) -> u64;
}

macro_rules! mutations {
    ($($request:ident = $method:literal { $($generation:ident)? }),* $(,)?) => {
        $(impl Mutation for v1::$request {
            const METHOD: &'static str = $method;

            fn request_id(&self) -> &str {
                &self.request_id
            }

            fn without_id(mut self) -> Self {
                self.request_id.clear();
                self
            }

            fn generation(&self) -> u64 {
                0 $(+ self.$generation)?
            }
        })*

        /// Names of all methods that have one, with whether it has a generation.
        #[cfg(test)]
        pub const METHODS: &[(&str, bool)] = &[$(($method, !stringify!($($generation)?).is_empty())),*];
    };
}

mutations! {
    CreateVmRequest = "CreateVm" {},
    UpdateVmRequest = "UpdateVm" { generation },
    DeleteVmRequest = "DeleteVm" { generation },
    StartVmRequest = "StartVm" { generation },
    StopVmRequest = "StopVm" { generation },
    RestartVmRequest = "RestartVm" { generation },
    ResetVmRequest = "ResetVm" { generation },
    PauseVmRequest = "PauseVm" { generation },
    ResumeVmRequest = "ResumeVm" { generation },
    AttachDiskRequest = "AttachDisk" { generation },
    DetachDiskRequest = "DetachDisk" { generation },
    ResizeVmDiskRequest = "ResizeVmDisk" { generation },
    SetRateLimitRequest = "SetRateLimit" { generation },
    SetMemoryTargetRequest = "SetMemoryTarget" { generation },
    CreateDiskRequest = "CreateDisk" {},
    ResizeDiskRequest = "ResizeDisk" {},
    DeleteDiskRequest = "DeleteDisk" {},
    UpdateNodeLabelsRequest = "UpdateNodeLabels" {},
    CordonNodeRequest = "CordonNode" {},
    UncordonNodeRequest = "UncordonNode" {},
    DrainNodeRequest = "DrainNode" {},
}
