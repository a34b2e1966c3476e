//! Admission of clients that type into the consoles of VMs.
//!
//! A client that types is a writer as long as its stream lives. Several writers share a console, or
//! one writer has it exclusively. A forced open takes the console from incompatible writers: these
//! continue to read, and receive the name of the new writer. This state does not survive the
//! daemon: clients reopen their consoles.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;
use uuid::Uuid;
use vmmd_api::v1::{ConsoleAccess, ConsoleWriter};
use vmmd_host::{failure::Failure, text};

/// A console of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The serial port.
    Serial,
    /// The virtio-console.
    Virtio,
}

/// Access to a console that a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To type, as others may.
    Shared,
    /// To type alone.
    Exclusive,
    /// To read.
    ReadOnly,
}

/// Decision about a client's access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    /// It goes with the writers that are there.
    Enter,
    /// The writers that are there lose the console.
    TakeOver,
    /// The writers that are there keep it.
    Refuse,
}

/// Decides about a client's access. `present` is the access of the current writers: any number of
/// [`Access::Shared`], or one [`Access::Exclusive`].
fn admit(present: impl IntoIterator<Item = Access>, wanted: Access, force: bool) -> Admission {
    let fits = match wanted {
        Access::ReadOnly => true,
        Access::Shared => present.into_iter().all(|access| access == Access::Shared),
        Access::Exclusive => present.into_iter().next().is_none(),
    };
    match (fits, force) {
        (true, _) => Admission::Enter,
        (false, true) => Admission::TakeOver,
        (false, false) => Admission::Refuse,
    }
}

type Key = (Uuid, Device);

/// The writers of all consoles.
#[derive(Debug, Default)]
pub struct Consoles(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    writers: HashMap<Key, Vec<Writer>>,
}

#[derive(Debug)]
struct Writer {
    id: u64,
    access: Access,
    about: ConsoleWriter,
    /// Receives the new writer when the console is taken over.
    lost: oneshot::Sender<ConsoleWriter>,
}

/// That a client may type, until it is dropped or taken away.
#[derive(Debug)]
pub struct Permit {
    consoles: Arc<Consoles>,
    key: Key,
    id: u64,
    /// Resolves when another client has taken the console over.
    pub lost: oneshot::Receiver<ConsoleWriter>,
}

impl Consoles {
    /// Lets a client that is called `who` use the console. Gives its permit, unless it only reads, and the other writers.
    /// Refused as CONSOLE_HELD when others have the console and there is no force.
    pub fn open(
        self: &Arc<Self>,
        key: Key,
        who: &str,
        access: Access,
        force: bool,
    ) -> Result<(Option<Permit>, Vec<ConsoleWriter>), Failure> {
        let mut inner = self.lock();
        let Inner { last, writers } = &mut *inner;
        let present = writers.entry(key).or_default();
        match admit(present.iter().map(|writer| writer.access), access, force) {
            Admission::Enter => {}
            Admission::Refuse => return Err(held(present)),
            Admission::TakeOver => {
                for writer in present.drain(..) {
                    // A send fails only if the writer has left.
                    let _gone = writer.lost.send(about(who, access));
                }
            }
        }
        let others = present.iter().map(|writer| writer.about.clone()).collect();
        if access == Access::ReadOnly {
            inner.forget_empty(key);
            return Ok((None, others));
        }
        *last += 1;
        let id = *last;
        let (lost, receiver) = oneshot::channel();
        present.push(Writer {
            id,
            access,
            about: about(who, access),
            lost,
        });
        let permit = Permit {
            consoles: Arc::clone(self),
            key,
            id,
            lost: receiver,
        };
        Ok((Some(permit), others))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn forget_empty(&mut self, key: Key) {
        if self.writers.get(&key).is_some_and(Vec::is_empty) {
            self.writers.remove(&key);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut inner = self.consoles.lock();
        if let Some(writers) = inner.writers.get_mut(&self.key) {
            writers.retain(|writer| writer.id != self.id);
        }
        inner.forget_empty(self.key);
    }
}

fn about(who: &str, access: Access) -> ConsoleWriter {
    let access = match access {
        Access::Shared => ConsoleAccess::Shared,
        Access::Exclusive => ConsoleAccess::Exclusive,
        Access::ReadOnly => ConsoleAccess::ReadOnly,
    };
    ConsoleWriter {
        name: who.to_owned(),
        since: text::timestamp(text::now_ms()),
        access: access.into(),
    }
}

fn held(writers: &[Writer]) -> Failure {
    let names: Vec<_> = writers
        .iter()
        .map(|writer| {
            let since = writer.about.since.as_ref().map_or(0, text::unix_ms);
            let seconds = text::now_ms().saturating_sub(since) / 1000;
            format!("{}, for {seconds} s", writer.about.name)
        })
        .collect();
    let message = format!(
        "another client types there ({}): read along with read-only access, or take the console over by force",
        names.join("; ")
    );
    Failure::precondition("CONSOLE_HELD", message)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{Access::*, Admission::*, *};

    #[rstest]
    #[case(&[], Shared, [Enter, Enter])]
    #[case(&[], Exclusive, [Enter, Enter])]
    #[case(&[Shared, Shared], Shared, [Enter, Enter])]
    #[case(&[Shared, Shared], Exclusive, [Refuse, TakeOver])]
    #[case(&[Exclusive], Shared, [Refuse, TakeOver])]
    #[case(&[Exclusive], Exclusive, [Refuse, TakeOver])]
    #[case(&[Exclusive], ReadOnly, [Enter, Enter])]
    #[case(&[Shared], ReadOnly, [Enter, Enter])]
    fn a_client_enters_takes_over_or_is_refused(
        #[case] present: &[Access],
        #[case] wanted: Access,
        #[case] without_and_with_force: [Admission; 2],
    ) {
        let admit = |force| super::admit(present.iter().copied(), wanted, force);
        assert_eq!([admit(false), admit(true)], without_and_with_force);
    }

    #[test]
    fn who_loses_a_console_is_told_and_who_leaves_frees_it() {
        let consoles = Arc::new(Consoles::default());
        let key = (Uuid::new_v4(), Device::Serial);
        let (first, others) = consoles.open(key, "ann", Exclusive, false).unwrap();
        assert!(others.is_empty());
        let refused = consoles.open(key, "bob", Shared, false).unwrap_err();
        assert!(refused.to_string().contains("ann, for 0 s"), "{refused}");
        // Another console of the same VM is another one.
        assert!(
            consoles
                .open((key.0, Device::Virtio), "bob", Shared, false)
                .is_ok()
        );
        let (reader, others) = consoles.open(key, "eve", ReadOnly, false).unwrap();
        assert_eq!((reader.is_none(), others.len()), (true, 1));

        let (second, others) = consoles.open(key, "bob", Shared, true).unwrap();
        assert!(others.is_empty());
        let by = first.unwrap().lost.try_recv().unwrap();
        assert_eq!((by.name.as_str(), by.access()), ("bob", ConsoleAccess::Shared));
        // That the first one goes now takes nothing from the second.
        let (third, others) = consoles.open(key, "cid", Shared, false).unwrap();
        assert_eq!(others.first().map(|writer| writer.name.as_str()), Some("bob"));
        drop((second, third));
        assert!(consoles.open(key, "ann", Exclusive, false).is_ok());
        assert!(consoles.lock().writers.is_empty());
    }
}
