//! The sections of a state that is read back: each is taken once, by the component that it belongs to.

use vmm_protocol::state::{Saved, Section, StateError};

/// See the module.
pub(super) struct Sections(Vec<Section>);

impl Sections {
    /// All sections of a state. No two have the same kind and id.
    pub fn new(mut sections: Vec<Section>) -> Result<Self, StateError> {
        let name = |section: &Section| (section.id.clone(), section.kind.clone());
        sections.sort_by_cached_key(name);
        match sections.windows(2).find_map(|pair| match pair {
            [one, other] if name(one) == name(other) => Some(name(one)),
            _ => None,
        }) {
            Some((id, kind)) => Err(StateError::Twice { id, kind }),
            None => Ok(Self(sections)),
        }
    }

    /// The section of the component `id`, whose kind is for the component to check.
    pub fn take(&mut self, id: &str) -> Result<Section, StateError> {
        let found = self.0.iter().position(|section| section.id == id);
        let index = found.ok_or_else(|| StateError::Missing { id: id.to_owned() })?;
        Ok(self.0.remove(index))
    }

    /// The state in the section `id`.
    pub fn open<M: Saved>(&mut self, id: &str) -> Result<M, StateError> {
        self.take(id)?.open()
    }

    /// Nothing is left.
    pub fn finish(self) -> Result<(), StateError> {
        match self.0.into_iter().next() {
            Some(Section { id, kind, .. }) => Err(StateError::Unused { id, kind }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_protocol::state::{Clock, Pit};

    use super::*;

    fn sections(list: &[(&str, &str)]) -> Result<Sections, StateError> {
        let section = |(kind, id): &(&str, &str)| Section {
            kind: (*kind).to_owned(),
            version: 1,
            id: (*id).to_owned(),
            payload: Vec::new(),
        };
        Sections::new(list.iter().map(section).collect())
    }

    #[test]
    fn each_section_is_taken_once() {
        let mut all = sections(&[("pit", "pit"), ("kvmclock", "kvmclock")]).unwrap();
        all.open::<Clock>("kvmclock").unwrap();
        let again = all.open::<Clock>("kvmclock").unwrap_err();
        assert!(matches!(again, StateError::Missing { id } if id == "kvmclock"));
        all.open::<Pit>("pit").unwrap();
        all.finish().unwrap();
    }

    #[test]
    fn a_section_that_nobody_takes_is_an_error() {
        let all = sections(&[("virtio-pci", "disk root")]).unwrap();
        assert!(matches!(all.finish(), Err(StateError::Unused { id, .. }) if id == "disk root"));
    }

    #[test]
    fn two_sections_of_one_kind_have_different_ids() {
        assert!(sections(&[("vcpu", "vcpu 0"), ("vcpu", "vcpu 1")]).is_ok());
        let twice = sections(&[("vcpu", "vcpu 0"), ("pit", "pit"), ("vcpu", "vcpu 0")]);
        assert!(matches!(twice.err(), Some(StateError::Twice { id, .. }) if id == "vcpu 0"));
    }

    #[test]
    fn a_second_section_of_another_kind_is_left_over() {
        let mut all = sections(&[("pit", "pit"), ("kvmclock", "pit")]).unwrap();
        let _taken = all.take("pit").unwrap();
        assert!(matches!(all.finish(), Err(StateError::Unused { .. })));
    }
}
