//! Guests as their agents describe them, for people.

use vmmd_api::v1;

use super::describe::{Lines, when};
use crate::manifest::quantity;

/// Everything about a guest.
pub fn guest(guest: &v1::GuestInfo, now: jiff::Timestamp) -> String {
    let mut text = Lines::default();
    put(&mut text, guest, "", now);
    let rows: Vec<_> = guest.file_systems.iter().map(file_system).collect();
    let headers = vec!["MOUNTED ON", "DEVICE", "TYPE", "SIZE", "USED"];
    text.list("File systems", headers, &rows);
    let users: Vec<_> = guest.users.iter().map(|user| user.name.as_str()).collect();
    text.put("Users", &users.join(", "));
    if guest.incomplete {
        let more = "the guest has more interfaces, addresses, file systems or users";
        text.put("Incomplete", more);
    }
    text.0
}

/// A short description of a guest in the description of its VM.
pub fn of_vm(text: &mut Lines, guest: &v1::GuestInfo, now: jiff::Timestamp) {
    text.title("Guest");
    put(text, guest, "  ", now);
}

fn put(text: &mut Lines, guest: &v1::GuestInfo, indent: &str, now: jiff::Timestamp) {
    let mut line = |key: &str, value: &str| text.put(&format!("{indent}{key}"), value);
    let os = guest.os.clone().unwrap_or_default();
    let name = match os.pretty_name.is_empty() {
        true => format!("{} {}", os.name, os.version).trim().to_owned(),
        false => os.pretty_name,
    };
    line("OS", &name);
    let kernel = match os.machine.as_str() {
        "" => os.kernel_release,
        machine => format!("{} ({machine})", os.kernel_release),
    };
    line("Kernel", &kernel);
    line("Host name", &guest.host_name);
    if !guest.time_zone.is_empty() {
        let zone = format!("{} ({})", guest.time_zone, offset(guest.utc_offset_seconds));
        line("Time zone", &zone);
    }
    line("Agent", &guest.agent_version);
    line("Asked", &when(guest.query_time.as_ref(), now));
    let interfaces: Vec<_> = guest.interfaces.iter().map(interface).collect();
    text.list(
        &format!("{indent}Interfaces"),
        vec!["NAME", "MAC", "ADDRESSES"],
        &interfaces,
    );
}

fn interface(interface: &v1::GuestInterface) -> Vec<String> {
    vec![
        interface.name.clone(),
        interface.mac.clone(),
        interface.addresses.join(", "),
    ]
}

fn file_system(file_system: &v1::GuestFileSystem) -> Vec<String> {
    let used = match (file_system.used_bytes, file_system.total_bytes) {
        (Some(used), Some(total @ 1..)) => {
            let percent = u128::from(used).saturating_mul(100) / u128::from(total);
            format!("{} ({percent} %)", quantity::show(used))
        }
        (used, _) => used.map(quantity::show).unwrap_or_default(),
    };
    vec![
        file_system.mount_point.clone(),
        file_system.name.clone(),
        file_system.r#type.clone(),
        file_system.total_bytes.map(quantity::show).unwrap_or_default(),
        used,
    ]
}

/// `UTC+01:00`.
fn offset(seconds: i32) -> String {
    let sign = if seconds < 0 { '-' } else { '+' };
    let minutes = seconds.unsigned_abs() / 60;
    format!("UTC{sign}{:02}:{:02}", minutes / 60, minutes % 60)
}
