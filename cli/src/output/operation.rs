//! Operations as rows of a table.

use vmmd_api::v1;

use super::{age, table::Table, vm::camel};
use crate::manifest::quantity;

/// The table of operations.
pub fn table() -> Table {
    Table::new(vec![
        "ID", "TYPE", "TARGET", "PHASE", "PROGRESS", "AGE", "BY", "MESSAGE",
    ])
}

/// A row of [`table`].
pub fn row(operation: &v1::Operation, now: jiff::Timestamp) -> Vec<String> {
    let target = operation.target.clone().unwrap_or_default();
    let kind = target.kind.to_lowercase();
    vec![
        operation.id.clone(),
        operation.r#type.clone(),
        match target.name.as_str() {
            "" => kind,
            name => format!("{kind}/{name}"),
        },
        camel(operation.phase().as_str_name(), "OPERATION_PHASE_"),
        progress(&operation.progress.unwrap_or_default()),
        age::since(operation.create_time.as_ref(), now),
        operation.initiator.clone(),
        operation.message.clone(),
    ]
}

/// `50%`, of bytes with their rate.
pub fn progress(progress: &v1::OperationProgress) -> String {
    let rate = match progress.per_second {
        0 => String::new(),
        rate => format!(" {}/s", quantity::show(rate)),
    };
    format!("{}%{rate}", progress.percent)
}
