//! Request id and preconditions of a request.

use vmmd_api::v1;
use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::Context,
    request::{self, preconditions},
};

use vmmd_store::{Tombstone, VmRecord};

use super::Actor;

impl Actor {
    /// Checks the preconditions of a request. The generation is not compared again for a request that was begun already: the
    /// request may have changed the generation itself.
    pub(super) fn expected(&self, context: &Context) -> Result<(), Failure> {
        let mut present = v1::Preconditions {
            uid: self.uid.to_string(),
            generation: Some(self.record.generation),
        };
        if self.has_begun(context) {
            present.generation = None;
        }
        preconditions::check("VM", &self.record.name, &context.preconditions, &present)
    }

    /// Notes that the request was admitted. The next write of the record stores the note.
    pub(super) fn admitted(&mut self, context: &Context) {
        self.host.requests.note(context, &mut self.record.begun);
    }

    /// Whether the request was admitted before.
    pub(super) fn has_begun(&self, context: &Context) -> bool {
        context.has_begun(&self.record.begun)
    }

    /// Removes the record for good and answers the deletion requests in the same write. A creation
    /// request to an earlier daemon receives its answer as well, so that its retry does not create
    /// another VM. Returns the tombstone in the store.
    pub(super) async fn bury(&self) -> Result<Tombstone, vmmd_store::Error> {
        let vm = self.state();
        let requests = &self.host.requests;
        let begun = self.record.begun.iter();
        let deletions = begun.filter(|mark| mark.method == "DeleteVm" && requests.is_under_way(&mark.key()));
        let mut answered: Vec<_> = deletions
            .map(|mark| request::done(mark.clone(), &v1::DeleteVmResponse::default()))
            .collect();
        if let Some(mark) = request::unanswered(&self.host, &self.record.begun, "CreateVm").await? {
            let response = v1::CreateVmResponse {
                vm: Some(vm.as_ref().clone()),
                operation: None,
            };
            answered.push(request::done(mark, &response));
        }
        let metadata = vm.metadata.clone().unwrap_or_default();
        let tombstone = self
            .host
            .vms
            .begin_delete(metadata, self.record.handover.as_ref());
        let written = tombstone.clone();
        let buried = self
            .host
            .store
            .remove::<VmRecord>(&self.record.uid, Some(written), answered)
            .await;
        if buried.is_err() {
            self.host.vms.keep(&tombstone);
        }
        buried.map(|()| tombstone)
    }

    /// Whether the present run was begun by the request.
    pub(super) fn runs_for(&self, context: &Context) -> bool {
        let run = self.record.instance.as_ref().filter(|_| self.instance.is_some());
        !context.request_id.is_empty() && run.is_some_and(|run| run.request_id == context.request_id)
    }
}
