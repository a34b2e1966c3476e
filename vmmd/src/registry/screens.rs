//! Secrets that open one connection to a VM's screen, soon after they were made.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use uuid::Uuid;
use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::context::Initiator;

use crate::{auth::Places, config::Limits};

/// How long a ticket is good.
pub const LIFE: Duration = Duration::from_secs(60);
/// Maximum number of unused valid tickets.
const MAX_TICKETS: usize = 1024;
/// Alphabet of passwords: 64 characters, 6 bits each.
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// The ways that there are, and the secrets that open them.
#[derive(Debug)]
pub struct Screens {
    /// Where viewers are served.
    pub vnc: OnceLock<SocketAddr>,
    /// Where browsers are served.
    pub web: OnceLock<SocketAddr>,
    /// See [`Ticket`].
    pub tickets: Tickets,
    /// Slots of connections that have presented a ticket, by the requester of the ticket.
    pub places: Arc<Places>,
    /// Why the certificate could not be used when it was read last; `None` when it could.
    pub certificate_problem: Arc<tokio::sync::Mutex<Option<String>>>,
}

impl Screens {
    /// No way yet, and no ticket.
    pub fn new(limits: &Limits) -> Self {
        Self {
            vnc: OnceLock::new(),
            web: OnceLock::new(),
            tickets: Tickets::default(),
            places: Places::new(limits.connections, limits.connections_per_client),
            certificate_problem: Arc::default(),
        }
    }
}

/// Access that a ticket grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The VM.
    pub vm: Uuid,
    /// Its name.
    pub name: String,
    /// Keys and the pointer are ignored.
    pub view_only: bool,
    /// Requester of the ticket.
    pub who: Initiator,
}

/// How a ticket is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A VNC password: eight characters (the most that VNC authentication takes), 48 random bits.
    Password,
    /// A token in an address: 244 random bits.
    Token,
}

/// All tickets that are good.
#[derive(Debug, Default)]
pub struct Tickets(Mutex<Vec<Issued>>);

#[derive(Debug)]
struct Issued {
    form: Form,
    secret: String,
    end: Instant,
    ticket: Ticket,
}

impl Tickets {
    /// Makes a secret that opens what `ticket` says, once, for [`LIFE`]. Refused as TOO_MANY_TICKETS.
    pub fn issue(&self, form: Form, ticket: Ticket) -> Result<String, Failure> {
        let secret = match form {
            Form::Password => password(),
            Form::Token => format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple()),
        };
        let now = Instant::now();
        let mut all = self.lock();
        all.retain(|issued| issued.end > now);
        if all.len() >= MAX_TICKETS {
            let message = format!(
                "{MAX_TICKETS} tickets for screens have not been used: try again in {} s",
                LIFE.as_secs()
            );
            return Err(Failure::new(Kind::Exhausted, "TOO_MANY_TICKETS", message));
        }
        all.push(Issued {
            form,
            secret: secret.clone(),
            end: now + LIFE,
            ticket,
        });
        Ok(secret)
    }

    /// Takes the ticket whose secret `is_shown`, if there is one that is good: it opens nothing a second time.
    pub fn take(&self, form: Form, is_shown: impl Fn(&str) -> bool) -> Option<Ticket> {
        let now = Instant::now();
        let mut all = self.lock();
        all.retain(|issued| issued.end > now);
        let place = all
            .iter()
            .position(|issued| issued.form == form && is_shown(&issued.secret))?;
        Some(all.swap_remove(place).ticket)
    }

    /// Whether [`Self::take`] would find a ticket. The ticket stays.
    pub fn is_good(&self, form: Form, is_shown: impl Fn(&str) -> bool) -> bool {
        let now = Instant::now();
        self.lock()
            .iter()
            .any(|issued| issued.end > now && issued.form == form && is_shown(&issued.secret))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Issued>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn password() -> String {
    let random = Uuid::new_v4().into_bytes();
    // Only bytes without the bits of the UUID's version and variant.
    let bytes = random.iter().take(6).chain(random.iter().skip(9).take(2));
    bytes
        .filter_map(|byte| ALPHABET.get(usize::from(byte % 64)))
        .map(|letter| char::from(*letter))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(name: &str) -> Ticket {
        Ticket {
            vm: Uuid::new_v4(),
            name: name.into(),
            view_only: false,
            who: Initiator::Certificate("ann".into()),
        }
    }

    #[test]
    fn a_secret_opens_what_it_is_for_once_and_only_in_its_form() {
        let tickets = Tickets::default();
        let (web, old) = (ticket("web"), ticket("old"));
        let password = tickets.issue(Form::Password, web.clone()).unwrap();
        let token = tickets.issue(Form::Token, old.clone()).unwrap();
        assert_eq!((password.len(), token.len()), (8, 64));
        let take = |form, shown: &str| tickets.take(form, |secret| secret == shown);
        let is_good = |form, shown: &str| tickets.is_good(form, |secret| secret == shown);
        assert!(is_good(Form::Token, &token) && !is_good(Form::Token, &password));
        assert_eq!(take(Form::Token, &password), None);
        assert_eq!(take(Form::Password, &password), Some(web));
        assert_eq!(take(Form::Password, &password), None);
        assert_eq!(take(Form::Token, &token), Some(old));
        assert!(!is_good(Form::Token, &token));
    }

    #[test]
    fn a_secret_is_good_for_a_time_only() {
        let tickets = Tickets::default();
        let secret = tickets.issue(Form::Token, ticket("web")).unwrap();
        for issued in tickets.lock().iter_mut() {
            issued.end = Instant::now();
        }
        assert!(!tickets.is_good(Form::Token, |shown| shown == secret));
        assert_eq!(tickets.take(Form::Token, |shown| shown == secret), None);
    }

    #[test]
    fn there_are_only_so_many_tickets_at_once() {
        let tickets = Tickets::default();
        for _ in 0..MAX_TICKETS {
            tickets.issue(Form::Token, ticket("web")).unwrap();
        }
        assert!(tickets.issue(Form::Token, ticket("web")).is_err());
        for issued in tickets.lock().iter_mut() {
            issued.end = Instant::now();
        }
        assert!(tickets.issue(Form::Token, ticket("web")).is_ok());
    }
}
