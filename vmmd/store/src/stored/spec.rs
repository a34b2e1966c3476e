//! The stored spec of a VM.

use vmmd_api::v1;

use super::{Mirror, probe::ProbesSpec, stored};

stored! {
    /// Desired state of a VM.
    VmSpec of v1::VmSpec {
        #[prost(message, optional, tag = "1")]
        cpu: Option<CpuSpec>,
        #[prost(message, optional, tag = "2")]
        memory: Option<MemorySpec>,
        #[prost(message, optional, tag = "3")]
        boot: Option<BootSpec>,
        #[prost(message, repeated, tag = "4")]
        disks: Vec<DiskSpec>,
        #[prost(message, repeated, tag = "5")]
        nics: Vec<NicSpec>,
        #[prost(message, repeated, tag = "6")]
        rate_groups: Vec<RateGroup>,
        #[prost(int32, tag = "7")]
        run_policy: i32,
        #[prost(message, optional, tag = "8")]
        balloon: Option<BalloonSpec>,
        #[prost(int32, tag = "9")]
        on_crash: i32,
        #[prost(message, optional, tag = "12")]
        clock: Option<ClockSpec>,
        #[prost(message, optional, tag = "13")]
        display: Option<DisplaySpec>,
        #[prost(message, optional, tag = "14")]
        virtio_console: Option<VirtioConsoleSpec>,
        #[prost(message, repeated, tag = "16")]
        shares: Vec<ShareSpec>,
        #[prost(string, tag = "17")]
        state_dir: String,
        #[prost(message, optional, tag = "20")]
        cloud_init: Option<CloudInit>,
        #[prost(int32, tag = "21")]
        on_panic: i32,
        #[prost(message, optional, tag = "22")]
        guest_agent: Option<GuestAgentSpec>,
        #[prost(message, optional, tag = "30")]
        smbios: Option<SmbiosSpec>,
        #[prost(message, optional, tag = "31")]
        pod: Option<PodSpec>,
        #[prost(message, optional, tag = "32")]
        tpm: Option<TpmSpec>,
        #[prost(message, optional, tag = "33")]
        vsock: Option<VsockSpec>,
        #[prost(message, optional, tag = "37")]
        watchdog: Option<WatchdogSpec>,
        #[prost(message, repeated, tag = "34")]
        credentials: Vec<Credential>,
        #[prost(message, repeated, tag = "35")]
        access_credentials: Vec<AccessCredential>,
        #[prost(message, repeated, tag = "36")]
        channels: Vec<ChannelSpec>,
        #[prost(message, optional, tag = "40")]
        probes: Option<ProbesSpec>,
    }
}

stored! {
    /// The watchdog.
    WatchdogSpec of v1::WatchdogSpec {
        #[prost(int32, tag = "1")]
        action: i32,
    }
}

stored! {
    /// Pod of a cluster that has a VM.
    PodSpec of v1::PodSpec {
        #[prost(string, tag = "1")]
        uid: String,
    }
}

/// A credential for the guest. The written record has its content in `sealed`
/// ([`seal`](crate::seal)).
#[derive(Clone, PartialEq, prost::Message)]
pub struct Credential {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub value: String,
    #[prost(string, tag = "3")]
    pub value_base64: String,
    #[prost(bytes = "vec", tag = "100")]
    pub sealed: Vec<u8>,
}

impl Mirror<Credential> for v1::Credential {
    fn mirror(self) -> Credential {
        let v1::Credential {
            name,
            value,
            value_base64,
            // A record has the content itself.
            value_digest: _,
        } = self;
        Credential {
            name,
            value,
            value_base64,
            sealed: Vec::new(),
        }
    }
}

impl Mirror<v1::Credential> for Credential {
    fn mirror(self) -> v1::Credential {
        let Credential {
            name,
            value,
            value_base64,
            sealed: _,
        } = self;
        v1::Credential {
            name,
            value,
            value_base64,
            value_digest: String::new(),
        }
    }
}

/// A user of the guest. The written record has the hash of its password in `sealed`
/// ([`seal`](crate::seal)).
#[derive(Clone, PartialEq, prost::Message)]
pub struct AccessCredential {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, repeated, tag = "2")]
    pub ssh_authorized_keys: Vec<String>,
    #[prost(string, tag = "3")]
    pub password_hash: String,
    #[prost(bytes = "vec", tag = "100")]
    pub sealed: Vec<u8>,
}

impl Mirror<AccessCredential> for v1::AccessCredential {
    fn mirror(self) -> AccessCredential {
        let v1::AccessCredential {
            name,
            ssh_authorized_keys,
            password_hash,
            // A record has the hash itself.
            password_hash_digest: _,
        } = self;
        AccessCredential {
            name,
            ssh_authorized_keys,
            password_hash,
            sealed: Vec::new(),
        }
    }
}

impl Mirror<v1::AccessCredential> for AccessCredential {
    fn mirror(self) -> v1::AccessCredential {
        let AccessCredential {
            name,
            ssh_authorized_keys,
            password_hash,
            sealed: _,
        } = self;
        v1::AccessCredential {
            name,
            ssh_authorized_keys,
            password_hash,
            password_hash_digest: String::new(),
        }
    }
}

stored! {
    /// A directory of the node that the guest can mount.
    ShareSpec of v1::ShareSpec {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "2")]
        path: String,
        #[prost(string, tag = "3")]
        tag: String,
        #[prost(bool, tag = "4")]
        read_only: bool,
        #[prost(int32, tag = "5")]
        cache: i32,
        #[prost(bool, tag = "6")]
        writeback: bool,
        #[prost(bool, tag = "7")]
        xattr: bool,
        #[prost(bool, tag = "8")]
        posix_acl: bool,
        #[prost(message, repeated, tag = "9")]
        uid_map: Vec<IdRange>,
        #[prost(message, repeated, tag = "10")]
        gid_map: Vec<IdRange>,
        #[prost(uint32, tag = "11")]
        max_open_files: u32,
        #[prost(string, tag = "12")]
        mount: String,
        #[prost(string, tag = "13")]
        pod_volume: String,
    }
}

stored! {
    /// Ids of a guest that are ids of the node.
    IdRange of v1::IdRange {
        #[prost(uint32, tag = "1")]
        guest: u32,
        #[prost(uint32, tag = "2")]
        node: u32,
        #[prost(uint32, tag = "3")]
        count: u32,
    }
}

/// cloud-init settings. The secrets are in `sealed` when the record is written, and in their own
/// fields otherwise ([`seal`](crate::seal)).
#[derive(Clone, PartialEq, prost::Message)]
pub struct CloudInit {
    #[prost(string, tag = "1")]
    pub user_data: String,
    #[prost(string, tag = "2")]
    pub user_data_digest: String,
    #[prost(string, tag = "3")]
    pub network_config: String,
    #[prost(string, tag = "4")]
    pub hostname: String,
    #[prost(string, repeated, tag = "5")]
    pub ssh_authorized_keys: Vec<String>,
    #[prost(string, tag = "6")]
    pub password_hash: String,
    #[prost(string, tag = "7")]
    pub password_hash_digest: String,
    #[prost(string, tag = "8")]
    pub instance_id: String,
    #[prost(string, tag = "9")]
    pub vendor_data: String,
    #[prost(string, tag = "10")]
    pub user_data_base64: String,
    #[prost(string, tag = "11")]
    pub network_config_digest: String,
    #[prost(string, tag = "12")]
    pub vendor_data_digest: String,
    #[prost(int32, tag = "13")]
    pub r#type: i32,
    #[prost(bytes = "vec", tag = "20")]
    pub sealed: Vec<u8>,
}

impl Mirror<CloudInit> for v1::CloudInit {
    fn mirror(self) -> CloudInit {
        let v1::CloudInit {
            user_data,
            user_data_digest,
            network_config,
            hostname,
            ssh_authorized_keys,
            password_hash,
            password_hash_digest,
            instance_id,
            vendor_data,
            user_data_base64,
            network_config_digest,
            vendor_data_digest,
            r#type,
        } = self;
        CloudInit {
            user_data,
            user_data_digest,
            network_config,
            hostname,
            ssh_authorized_keys,
            password_hash,
            password_hash_digest,
            instance_id,
            vendor_data,
            user_data_base64,
            network_config_digest,
            vendor_data_digest,
            r#type,
            sealed: Vec::new(),
        }
    }
}

impl Mirror<v1::CloudInit> for CloudInit {
    fn mirror(self) -> v1::CloudInit {
        let CloudInit {
            user_data,
            user_data_digest,
            network_config,
            hostname,
            ssh_authorized_keys,
            password_hash,
            password_hash_digest,
            instance_id,
            vendor_data,
            user_data_base64,
            network_config_digest,
            vendor_data_digest,
            r#type,
            sealed: _,
        } = self;
        v1::CloudInit {
            user_data,
            user_data_digest,
            network_config,
            hostname,
            ssh_authorized_keys,
            password_hash,
            password_hash_digest,
            instance_id,
            vendor_data,
            user_data_base64,
            network_config_digest,
            vendor_data_digest,
            r#type,
        }
    }
}

stored! {
    /// Virtual CPUs.
    CpuSpec of v1::CpuSpec {
        #[prost(uint32, tag = "1")]
        cores: u32,
        #[prost(uint32, tag = "2")]
        core_fraction_percent: u32,
        #[prost(uint32, tag = "3")]
        core_limit_percent: u32,
        #[prost(string, tag = "4")]
        host_cpus: String,
        #[prost(string, tag = "5")]
        model: String,
        #[prost(message, optional, tag = "6")]
        features: Option<CpuFeatures>,
        #[prost(bool, tag = "7")]
        hyperv: bool,
    }
}

stored! {
    /// Differences to a processor model.
    CpuFeatures of v1::CpuFeatures {
        #[prost(string, repeated, tag = "1")]
        add: Vec<String>,
        #[prost(string, repeated, tag = "2")]
        remove: Vec<String>,
    }
}

stored! {
    /// Guest RAM.
    MemorySpec of v1::MemorySpec {
        #[prost(uint64, tag = "1")]
        size_bytes: u64,
        #[prost(int32, tag = "2")]
        backing: i32,
        #[prost(int32, tag = "3")]
        huge_pages: i32,
        #[prost(bool, tag = "4")]
        prefault: bool,
        #[prost(bool, tag = "5")]
        mergeable: bool,
        #[prost(uint32, optional, tag = "6")]
        numa_node: Option<u32>,
    }
}

stored! {
    /// Boot source of a VM.
    BootSpec of v1::BootSpec {
        #[prost(oneof = "BootSource", tags = "1, 2, 3")]
        source: Option<BootSource>,
    }
}

/// Of [`BootSpec`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum BootSource {
    #[prost(message, tag = "1")]
    Linux(LinuxBoot),
    #[prost(message, tag = "2")]
    FromDisk(DiskBoot),
    #[prost(message, tag = "3")]
    Firmware(FirmwareBoot),
}

stored! {
    /// Firmware.
    FirmwareBoot of v1::FirmwareBoot {
        #[prost(int32, tag = "1")]
        r#type: i32,
        #[prost(uint32, tag = "2")]
        menu_seconds: u32,
    }
}

stored! {
    /// The kernel that is installed on a disk.
    DiskBoot of v1::DiskBoot {
        #[prost(string, tag = "1")]
        disk: String,
        #[prost(string, tag = "2")]
        cmdline_append: String,
    }
}

stored! {
    /// A Linux kernel, directly.
    LinuxBoot of v1::LinuxBoot {
        #[prost(string, tag = "1")]
        kernel: String,
        #[prost(string, tag = "2")]
        initrd: String,
        #[prost(string, tag = "3")]
        cmdline: String,
    }
}

stored! {
    /// A disk of a VM.
    DiskSpec of v1::DiskSpec {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(oneof = "DiskSource", tags = "2, 6, 19")]
        source: Option<DiskSource>,
        #[prost(int32, tag = "3")]
        format: i32,
        #[prost(bool, tag = "4")]
        read_only: bool,
        #[prost(string, tag = "5")]
        serial: String,
        #[prost(int32, tag = "7")]
        cache: i32,
        #[prost(uint32, tag = "8")]
        queues: u32,
        #[prost(uint32, tag = "9")]
        logical_block_bytes: u32,
        #[prost(int32, tag = "10")]
        on_error: i32,
        #[prost(message, optional, tag = "11")]
        rate_limit: Option<RateLimit>,
        #[prost(string, tag = "12")]
        rate_group: String,
        #[prost(bool, tag = "14")]
        any_content: bool,
        #[prost(string, tag = "15")]
        beneath: String,
        #[prost(int32, tag = "16")]
        bus: i32,
        #[prost(bool, tag = "17")]
        cdrom: bool,
        #[prost(uint32, tag = "18")]
        boot_order: u32,
    }
}

/// Of [`DiskSpec`].
#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub enum DiskSource {
    #[prost(string, tag = "2")]
    Path(String),
    #[prost(string, tag = "6")]
    Disk(String),
    #[prost(string, tag = "19")]
    PodVolume(String),
}

stored! {
    /// A network interface of a VM.
    NicSpec of v1::NicSpec {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(oneof = "Attachment", tags = "2, 3, 11, 21")]
        attachment: Option<Attachment>,
        #[prost(string, tag = "4")]
        mac: String,
        #[prost(uint32, tag = "5")]
        queues: u32,
        #[prost(uint32, tag = "6")]
        mtu: u32,
        #[prost(int32, repeated, tag = "7")]
        disabled_offloads: Vec<i32>,
        #[prost(bool, tag = "8")]
        link_down: bool,
        #[prost(message, optional, tag = "9")]
        receive_limit: Option<RateLimit>,
        #[prost(message, optional, tag = "10")]
        transmit_limit: Option<RateLimit>,
        #[prost(string, tag = "12")]
        address: String,
        #[prost(message, repeated, tag = "13")]
        published_ports: Vec<PublishedPort>,
        #[prost(int32, tag = "14")]
        backend: i32,
        #[prost(message, optional, tag = "15")]
        firewall: Option<NicFirewall>,
        #[prost(uint32, tag = "20")]
        boot_order: u32,
        #[prost(uint32, tag = "22")]
        vlan: u32,
        #[prost(bool, tag = "23")]
        mac_filter: bool,
        #[prost(string, repeated, tag = "24")]
        routed_subnets: Vec<String>,
        #[prost(string, repeated, tag = "25")]
        security_groups: Vec<String>,
        #[prost(string, repeated, tag = "26")]
        floating_addresses: Vec<String>,
        #[prost(bool, tag = "27")]
        metadata: bool,
    }
}

stored! {
    /// Which connections a guest may have over a NIC.
    NicFirewall of v1::NicFirewall {
        #[prost(message, optional, tag = "1")]
        ingress: Option<NicRules>,
        #[prost(message, optional, tag = "2")]
        egress: Option<NicRules>,
    }
}

stored! {
    /// Permitted connections.
    NicRules of v1::NicRules {
        #[prost(message, repeated, tag = "1")]
        allow: Vec<NicRule>,
    }
}

stored! {
    /// A kind of connections.
    NicRule of v1::NicRule {
        #[prost(string, repeated, tag = "1")]
        addresses: Vec<String>,
        #[prost(int32, tag = "2")]
        protocol: i32,
        #[prost(message, repeated, tag = "3")]
        ports: Vec<PortRange>,
    }
}

stored! {
    /// Ports in a row.
    #[derive(Copy)]
    PortRange of v1::PortRange {
        #[prost(uint32, tag = "1")]
        first: u32,
        #[prost(uint32, tag = "2")]
        last: u32,
    }
}

/// Of [`NicSpec`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Attachment {
    #[prost(string, tag = "2")]
    Bridge(String),
    #[prost(string, tag = "3")]
    Tap(String),
    #[prost(string, tag = "11")]
    Network(String),
    #[prost(message, tag = "21")]
    PodNetwork(PodNetwork),
}

stored! {
    /// The network of a pod.
    PodNetwork of v1::PodNetwork {
        #[prost(string, tag = "1")]
        interface: String,
    }
}

stored! {
    /// A port of the node that leads to a guest.
    PublishedPort of v1::PublishedPort {
        #[prost(int32, tag = "1")]
        protocol: i32,
        #[prost(uint32, tag = "2")]
        node_port: u32,
        #[prost(uint32, tag = "3")]
        guest_port: u32,
        #[prost(string, tag = "4")]
        address: String,
        #[prost(uint32, tag = "5")]
        last_node_port: u32,
    }
}

stored! {
    /// A limit with a name.
    RateGroup of v1::RateGroup {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(message, optional, tag = "2")]
        limit: Option<RateLimit>,
    }
}

stored! {
    /// How much may flow.
    #[derive(Copy)]
    RateLimit of v1::RateLimit {
        #[prost(uint64, tag = "1")]
        bytes_per_second: u64,
        #[prost(uint64, tag = "2")]
        operations_per_second: u64,
        #[prost(uint64, tag = "3")]
        burst_bytes: u64,
        #[prost(uint64, tag = "4")]
        burst_operations: u64,
    }
}

stored! {
    /// The balloon.
    BalloonSpec of v1::BalloonSpec {
        #[prost(bool, tag = "1")]
        disabled: bool,
        #[prost(bool, tag = "2")]
        free_page_reporting: bool,
        #[prost(uint64, tag = "3")]
        target_bytes: u64,
    }
}

stored! {
    /// The guest's clock.
    ClockSpec of v1::ClockSpec {
        #[prost(int32, tag = "1")]
        on_resume: i32,
        #[prost(string, tag = "2")]
        timezone: String,
    }
}

stored! {
    /// Identity of the guest's system.
    SmbiosSpec of v1::SmbiosSpec {
        #[prost(string, tag = "1")]
        uuid: String,
        #[prost(string, tag = "2")]
        serial: String,
        #[prost(string, tag = "3")]
        manufacturer: String,
        #[prost(string, tag = "4")]
        product: String,
        #[prost(string, tag = "5")]
        version: String,
        #[prost(string, tag = "6")]
        sku: String,
        #[prost(string, tag = "7")]
        family: String,
        #[prost(string, tag = "8")]
        asset_tag: String,
    }
}

stored! {
    /// The virtio-console.
    VirtioConsoleSpec of v1::VirtioConsoleSpec {}
}

stored! {
    /// The channel to the guest's agent.
    GuestAgentSpec of v1::GuestAgentSpec {}
}

stored! {
    /// A channel.
    ChannelSpec of v1::ChannelSpec {
        #[prost(string, tag = "1")]
        name: String,
    }
}

stored! {
    /// The TPM.
    TpmSpec of v1::TpmSpec {}
}

stored! {
    /// The socket device.
    VsockSpec of v1::VsockSpec {
        #[prost(uint32, tag = "1")]
        cid: u32,
    }
}

stored! {
    /// The screen.
    DisplaySpec of v1::DisplaySpec {
        #[prost(uint32, tag = "1")]
        width: u32,
        #[prost(uint32, tag = "2")]
        height: u32,
        #[prost(int32, tag = "3")]
        keyboard_layout: i32,
    }
}

impl Mirror<BootSource> for v1::boot_spec::Source {
    fn mirror(self) -> BootSource {
        match self {
            Self::Linux(linux) => BootSource::Linux(linux.mirror()),
            Self::FromDisk(disk) => BootSource::FromDisk(disk.mirror()),
            Self::Firmware(firmware) => BootSource::Firmware(firmware.mirror()),
        }
    }
}

impl Mirror<v1::boot_spec::Source> for BootSource {
    fn mirror(self) -> v1::boot_spec::Source {
        match self {
            Self::Linux(linux) => v1::boot_spec::Source::Linux(linux.mirror()),
            Self::FromDisk(disk) => v1::boot_spec::Source::FromDisk(disk.mirror()),
            Self::Firmware(firmware) => v1::boot_spec::Source::Firmware(firmware.mirror()),
        }
    }
}

impl Mirror<DiskSource> for v1::disk_spec::Source {
    fn mirror(self) -> DiskSource {
        match self {
            Self::Path(path) => DiskSource::Path(path),
            Self::Disk(disk) => DiskSource::Disk(disk),
            Self::PodVolume(volume) => DiskSource::PodVolume(volume),
        }
    }
}

impl Mirror<v1::disk_spec::Source> for DiskSource {
    fn mirror(self) -> v1::disk_spec::Source {
        match self {
            Self::Path(path) => v1::disk_spec::Source::Path(path),
            Self::Disk(disk) => v1::disk_spec::Source::Disk(disk),
            Self::PodVolume(volume) => v1::disk_spec::Source::PodVolume(volume),
        }
    }
}

impl Mirror<Attachment> for v1::nic_spec::Attachment {
    fn mirror(self) -> Attachment {
        match self {
            Self::Bridge(bridge) => Attachment::Bridge(bridge),
            Self::Tap(tap) => Attachment::Tap(tap),
            Self::Network(network) => Attachment::Network(network),
            Self::PodNetwork(pod) => Attachment::PodNetwork(pod.mirror()),
        }
    }
}

impl Mirror<v1::nic_spec::Attachment> for Attachment {
    fn mirror(self) -> v1::nic_spec::Attachment {
        match self {
            Self::Bridge(bridge) => v1::nic_spec::Attachment::Bridge(bridge),
            Self::Tap(tap) => v1::nic_spec::Attachment::Tap(tap),
            Self::Network(network) => v1::nic_spec::Attachment::Network(network),
            Self::PodNetwork(pod) => v1::nic_spec::Attachment::PodNetwork(pod.mirror()),
        }
    }
}
