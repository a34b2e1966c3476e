//! Places for connections and for streams: so many in all, and of these so many for each client, so that none can take them from the
//! others.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::Semaphore;
use vmmd_objects::context::Initiator;

/// The places for connections of one listener, or for streams of all.
#[derive(Debug)]
pub struct Places {
    total: usize,
    each: usize,
    taken: Mutex<HashMap<Initiator, usize>>,
}

/// A place, free again when it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    holder: Initiator,
}

/// There is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// For anybody.
    #[error("all places for connections are taken")]
    All,
    /// For this client.
    #[error("the client has all the connections that one may have")]
    Client,
}

impl Places {
    /// Most places of one client.
    pub fn each(&self) -> usize {
        self.each
    }

    /// `total` places, at most `each` for one client.
    pub fn new(total: usize, each: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            each,
            taken: Mutex::default(),
        })
    }

    /// Takes a place.
    pub fn take(self: &Arc<Self>, holder: &Initiator) -> Result<Place, Full> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let own = taken.get(holder).copied().unwrap_or(0);
        if own >= self.each {
            return Err(Full::Client);
        }
        if taken.values().sum::<usize>() >= self.total {
            return Err(Full::All);
        }
        taken.insert(holder.clone(), own + 1);
        Ok(Place {
            places: Arc::clone(self),
            holder: holder.clone(),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.holder) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.holder);
            }
        }
    }
}

/// Turns of each client. A client that has all of its turns waits.
#[derive(Debug)]
pub struct Turns {
    each: usize,
    clients: Mutex<HashMap<Initiator, Weak<Semaphore>>>,
}

impl Turns {
    /// `each` at once for one client.
    pub fn new(each: usize) -> Arc<Self> {
        Arc::new(Self {
            each,
            clients: Mutex::default(),
        })
    }

    /// A client's turns.
    pub fn of(&self, client: &Initiator) -> Arc<Semaphore> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = clients.get(client).and_then(Weak::upgrade) {
            return turns;
        }
        clients.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(self.each));
        clients.insert(client.clone(), Arc::downgrade(&turns));
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_of_a_client_are_its_own_and_forgotten_when_unused() {
        let turns = Turns::new(2);
        let (first, second) = (Initiator::User(1), Initiator::User(2));
        let held = turns.of(&first).try_acquire_many_owned(2).unwrap();
        assert!(turns.of(&first).try_acquire_owned().is_err());
        assert!(turns.of(&second).try_acquire_owned().is_ok());
        drop(held);
        assert!(turns.of(&first).try_acquire_owned().is_ok());
        drop(turns.of(&second));
        assert_eq!(turns.clients.lock().unwrap().len(), 1);
    }

    #[test]
    fn nobody_takes_the_places_of_others_and_places_come_back() {
        let places = Places::new(5, 3);
        let (greedy, other) = (Initiator::User(1), Initiator::Certificate("b".into()));
        let mut held: Vec<_> = (0..3).map(|_| places.take(&greedy).unwrap()).collect();
        assert_eq!(places.take(&greedy).unwrap_err(), Full::Client);
        let others = [places.take(&other).unwrap(), places.take(&other).unwrap()];
        assert_eq!(places.take(&other).unwrap_err(), Full::All);
        held.pop();
        drop(others);
        drop(places.take(&greedy).unwrap());
        drop(held);
        assert!(places.taken.lock().unwrap().is_empty());
    }
}
