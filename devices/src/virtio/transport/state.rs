//! Saved state of a virtio device: function, transport, front and backs.
//!
//! A device is saved in its phases *idle* and *paused*. The backs of an idle device have no state
//! and are omitted. A restore checks the complete state before it applies the state. After a failed
//! restore, the device behaves as if paused without queues, so that a reset also clears its backs.

use super::{
    super::{queue::QueueState, signals::NO_VECTOR},
    core::{ACKNOWLEDGE, Core, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, Phase, QueueSetup, acceptable},
    function::VirtioFunction,
};
use crate::state::{Section, StateError, check, message, narrow, required};

impl VirtioFunction {
    /// The state of the paused device.
    pub(super) fn save(&self) -> Result<message::VirtioPci, StateError> {
        let (transport, device, workers) = self.core.save()?;
        Ok(message::VirtioPci {
            pci: Some(self.config.save()),
            msix: Some(self.msix.save()),
            transport: Some(transport),
            device: Some(device),
            workers,
        })
    }

    /// Takes over a saved state; the device is paused afterwards, or idle. Bus-master enable reaches the interrupts and
    /// the workers in [`resume`](Self::resume).
    pub(super) fn restore(&mut self, saved: &message::VirtioPci) -> Result<(), StateError> {
        let msix = required("msix", saved.msix.as_ref())?;
        let transport = required("transport", saved.transport.as_ref())?;
        let device = required("device", saved.device.as_ref())?;
        if self.bus_master {
            let why = "its driver has enabled it already";
            return Err(StateError::not_migratable(&self.core.shared.name, why));
        }
        self.config.restore(required("pci", saved.pci.as_ref())?)?;
        let control = self.config.read_u16(self.msix_capability.saturating_add(2));
        self.msix.restore(msix, control)?;
        self.core.restore(transport, device, &saved.workers)
    }

    /// Resumes the device. After a restore this connects the interrupts and sends pending ones.
    pub(super) fn resume(&mut self) {
        self.apply_bus_master();
        self.core.resume();
    }
}

/// Checked state for [`Core::restore`].
struct Checked {
    status: u8,
    queue_select: u16,
    config_vector: u16,
    isr: u8,
    generation: u8,
    /// Each queue with its vector.
    queues: Vec<(QueueSetup, u16)>,
    /// Progress of the served queues.
    progress: Vec<QueueState>,
}

impl Core {
    fn save(&self) -> Result<(message::VirtioTransport, Section, Vec<Section>), StateError> {
        let name = self.shared.name.as_str();
        let states: Option<&[QueueState]> = match &self.phase {
            Phase::Idle => None,
            Phase::Paused(states) => Some(states),
            Phase::Running | Phase::Resetting(_) => {
                return Err(StateError::not_migratable(name, "it is not paused"));
            }
            Phase::Dead => return Err(StateError::not_migratable(name, "it failed, or is gone")),
        };
        let signals = &self.shared.signals;
        let workers = match states {
            Some(_) => self.workers.save(name)?,
            None => Vec::new(),
        };
        let queues = (0_u16..).zip(&self.queues).map(|(index, queue)| {
            let state = states.and_then(|states| states.iter().find(|state| state.index == index));
            message::VirtioQueue {
                size: queue.size.into(),
                enabled: queue.enabled,
                desc: queue.desc,
                driver: queue.driver,
                device: queue.device,
                vector: signals.queue_vector(index).unwrap_or(NO_VECTOR).into(),
                progress: state.map(|state| message::VirtioProgress {
                    next_avail: state.next_avail.into(),
                    next_used: state.next_used.into(),
                }),
            }
        });
        let transport = message::VirtioTransport {
            device_id: self.device.kind() as u32,
            status: self.status.into(),
            needs_reset: signals.needs_reset(),
            offered: self.offered,
            accepted: self.accepted,
            accepted_beyond: self.accepted_beyond,
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            queue_select: self.queue_select.into(),
            queues: queues.collect(),
            running: states.is_some(),
            config_vector: signals.config_vector().into(),
            isr: signals.isr().into(),
            generation: signals.generation().into(),
            config: self.whole_config(),
        };
        Ok((transport, self.device.save()?, workers))
    }

    fn whole_config(&self) -> Vec<u8> {
        let mut config = vec![0; self.device.config_len()];
        self.device.read_config(0, &mut config);
        config
    }

    fn restore(
        &mut self,
        saved: &message::VirtioTransport,
        device: &Section,
        workers: &[Section],
    ) -> Result<(), StateError> {
        let name = self.shared.name.clone();
        if !matches!(self.phase, Phase::Idle) || self.status != 0 {
            return Err(StateError::not_migratable(&name, "it is in use already"));
        }
        let checked = self.check(saved)?;
        if saved.running {
            // Until all is done: a reset would reset the backs too.
            self.phase = Phase::Paused(Vec::new());
            self.device.restore(device)?;
            self.workers.restore(&name, workers, &self.shared.memory)?;
        } else {
            check(workers.is_empty(), "workers", "the device is idle")?;
            self.device.restore(device)?;
        }
        let config = self.whole_config();
        if config != saved.config {
            let differ = config
                .iter()
                .zip(&saved.config)
                .position(|(own, saved)| own != saved);
            let why = format!(
                "not what the device shows: {} and {} bytes, the first difference is at {}",
                config.len(),
                saved.config.len(),
                differ.unwrap_or(config.len().min(saved.config.len())),
            );
            return Err(StateError::invalid("config", why));
        }
        self.take_over(saved, checked);
        Ok(())
    }

    fn take_over(&mut self, saved: &message::VirtioTransport, checked: Checked) {
        let signals = &self.shared.signals;
        signals.set_config_vector(checked.config_vector);
        for (index, (_, vector)) in (0_u16..).zip(&checked.queues) {
            signals.set_queue_vector(index, *vector);
        }
        signals.restore(checked.isr, checked.generation, saved.needs_reset, saved.running);
        self.status = checked.status;
        self.offered = saved.offered;
        self.accepted = saved.accepted;
        self.accepted_beyond = saved.accepted_beyond;
        self.device_feature_select = saved.device_feature_select;
        self.driver_feature_select = saved.driver_feature_select;
        self.queue_select = checked.queue_select;
        self.queues = checked.queues.into_iter().map(|(queue, _)| queue).collect();
        if saved.running {
            self.phase = Phase::Paused(checked.progress);
        }
    }

    fn check(&mut self, saved: &message::VirtioTransport) -> Result<Checked, StateError> {
        check(
            saved.device_id == self.device.kind() as u32,
            "device_id",
            "of another kind of device",
        )?;
        let status: u8 = narrow("status", saved.status)?;
        let known = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED;
        check(status & !known == 0, "status", "unknown bits are set")?;
        check(
            status & DRIVER_OK == 0 || status & FEATURES_OK != 0,
            "status",
            "DRIVER_OK without FEATURES_OK",
        )?;
        check(
            !saved.running || status & DRIVER_OK != 0,
            "running",
            "the status lacks DRIVER_OK",
        )?;
        check(
            saved.offered & !self.offered == 0,
            "offered",
            "the device lacks a feature that its driver was offered",
        )?;
        check(
            status & FEATURES_OK == 0 || acceptable(saved.accepted, saved.accepted_beyond, saved.offered),
            "accepted",
            "features that can't be accepted together with FEATURES_OK",
        )?;
        check(
            saved.queues.len() == self.shared.max_sizes.len(),
            "queues",
            "not as many as the device has",
        )?;
        let mut checked = Checked {
            status,
            queue_select: narrow("queue_select", saved.queue_select)?,
            config_vector: narrow("config_vector", saved.config_vector)?,
            isr: narrow("isr", saved.isr)?,
            generation: narrow("generation", saved.generation)?,
            queues: Vec::new(),
            progress: Vec::new(),
        };
        check(checked.isr & !3 == 0, "isr", "unknown bits are set")?;
        for (index, (queue, max)) in (0_u16..).zip(saved.queues.iter().zip(&self.shared.max_sizes)) {
            let size: u16 = narrow("queues.size", queue.size)?;
            check(
                size.is_power_of_two() && size <= *max,
                "queues.size",
                "no power of two up to what the device offers",
            )?;
            let setup = QueueSetup {
                size,
                enabled: queue.enabled,
                desc: queue.desc,
                driver: queue.driver,
                device: queue.device,
            };
            checked
                .queues
                .push((setup, narrow("queues.vector", queue.vector)?));
            let Some(progress) = &queue.progress else {
                continue;
            };
            check(
                saved.running && queue.enabled,
                "queues.progress",
                "the queue is not served",
            )?;
            checked.progress.push(QueueState {
                index,
                size,
                desc_table: queue.desc,
                avail_ring: queue.driver,
                used_ring: queue.device,
                next_avail: narrow("queues.progress.next_avail", progress.next_avail)?,
                next_used: narrow("queues.progress.next_used", progress.next_used)?,
            });
        }
        Ok(checked)
    }
}
