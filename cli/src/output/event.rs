//! Events as a table.

use vmmd_api::v1;

use super::{age, vm::camel};

/// Columns of [`row`].
pub const COLUMNS: [&str; 5] = ["TIME", "SEVERITY", "OBJECT", "REASON", "MESSAGE"];

/// An event as a row.
pub fn row(event: &v1::Event) -> Vec<String> {
    let object = event.object.clone().unwrap_or_default();
    let kind = object.kind.to_lowercase();
    let object = match object.name.as_str() {
        "" => kind,
        name => format!("{kind}/{name}"),
    };
    let message = match event.count {
        0 | 1 => event.message.clone(),
        count => format!("{} ({count} times)", event.message),
    };
    vec![
        age::exact(event.time.as_ref()),
        camel(event.severity().as_str_name(), "EVENT_SEVERITY_"),
        object,
        event.reason.clone(),
        message,
    ]
}
