//! The PIT.

use kvm_bindings::{
    KVM_PIT_FLAGS_HPET_LEGACY, KVM_PIT_FLAGS_SPEAKER_DATA_ON, kvm_pit_channel_state, kvm_pit_state2,
};
use vmm_protocol::state::{Pit, PitChannel, StateError};

use super::{
    super::{host::KvmError, vm::Vm},
    exactly, narrow,
};

const FLAGS: u32 = KVM_PIT_FLAGS_HPET_LEGACY | KVM_PIT_FLAGS_SPEAKER_DATA_ON;
/// A counter of 16 bits; 0 counts as this (8254 data sheet, "Mode Definitions").
const COUNT_MAX: u32 = 0x1_0000;

macro_rules! channel {
    ($($register:ident),*) => {
        fn save_channel(channel: &kvm_pit_channel_state) -> PitChannel {
            PitChannel {
                $($register: channel.$register.into(),)*
                count: channel.count,
            }
        }

        fn channel(saved: &PitChannel) -> Result<kvm_pit_channel_state, StateError> {
            if saved.count > COUNT_MAX {
                let why = format!("{:#x} is more than a counter holds", saved.count);
                return Err(StateError::invalid("channels.count", why));
            }
            Ok(kvm_pit_channel_state {
                $($register: narrow(concat!("channels.", stringify!($register)), saved.$register)?,)*
                count: saved.count,
                count_load_time: 0,
            })
        }
    };
}

channel!(
    latched_count,
    count_latched,
    status_latched,
    status,
    read_state,
    write_state,
    write_latch,
    rw_mode,
    mode,
    bcd,
    gate
);

impl Vm {
    /// The PIT, if the VM has one; with all vCPUs stopped.
    pub fn save_pit(&self) -> Result<Option<Pit>, KvmError> {
        if !self.has_pit() {
            return Ok(None);
        }
        let pit = self.fd().get_pit2().map_err(KvmError::ioctl("KVM_GET_PIT2"))?;
        Ok(Some(Pit {
            channels: pit.channels.iter().map(save_channel).collect(),
            flags: pit.flags,
        }))
    }

    /// Restores the PIT; called after the interrupt controllers. All channels restart their count:
    /// KVM loads the given counts.
    pub fn restore_pit(&self, saved: &Pit) -> Result<(), StateError> {
        if saved.flags & !FLAGS != 0 {
            let why = format!("{:#x} is not known", saved.flags & !FLAGS);
            return Err(StateError::invalid("flags", why));
        }
        let channels: [PitChannel; 3] = exactly("channels", &saved.channels)?;
        let [first, second, third] = channels.map(|saved| channel(&saved));
        let pit = kvm_pit_state2 {
            channels: [first?, second?, third?],
            flags: saved.flags,
            ..Default::default()
        };
        Ok(self
            .fd()
            .set_pit2(&pit)
            .map_err(KvmError::ioctl("KVM_SET_PIT2"))?)
    }
}
