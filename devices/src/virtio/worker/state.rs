//! Save and restore of the backs, each on its own parked thread.

use std::sync::mpsc::{self, Receiver};

use vmm_base::GuestMemory;

use super::{Command, Handle, Visit, Workers};
use crate::{
    state::{Section, StateError, check},
    virtio::device::QueueHandler,
};

impl Workers {
    /// The state of each back; `name` is the device's. All workers are parked.
    pub fn save(&self, name: &str) -> Result<Vec<Section>, StateError> {
        let results: Vec<_> = self
            .handles
            .iter()
            .map(|handle| handle.visit(|handler| handler.save()))
            .collect();
        results
            .into_iter()
            .map(|result| result.recv().unwrap_or_else(|_| Err(gone(name))))
            .collect()
    }

    /// Each back takes over its section. All workers are parked and were never started.
    pub fn restore(&self, name: &str, sections: &[Section], memory: &GuestMemory) -> Result<(), StateError> {
        check(
            sections.len() == self.handles.len(),
            "workers",
            "not as many as the device has",
        )?;
        for (handle, section) in self.handles.iter().zip(sections) {
            let (section, memory) = (section.clone(), memory.clone());
            let result = handle.visit(move |handler| handler.restore(&section, &memory));
            result.recv().unwrap_or_else(|_| Err(gone(name)))?;
        }
        Ok(())
    }
}

impl Handle {
    /// Makes the worker call `call`. The receiver gets no value if the worker is not parked, is
    /// dead, or panics in `call`.
    fn visit<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut dyn QueueHandler) -> T + Send + 'static,
    ) -> Receiver<T> {
        let (reply, result) = mpsc::sync_channel(1);
        let visit: Visit = Box::new(move |handler| {
            let _nobody_waits = reply.send(call(handler));
        });
        self.send(Command::Visit(visit));
        result
    }
}

fn gone(name: &str) -> StateError {
    StateError::not_migratable(name, "a worker thread is not parked, or is gone")
}
