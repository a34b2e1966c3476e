//! Operations as rows of a table.

use proto::v1;

use super::{age, table::Table, vm::camel};

/// The table of operations.
pub fn table() -> Table {
    Table::new(vec![
        "ID", "KIND", "VM", "PHASE", "PROGRESS", "AGE", "BY", "MESSAGE",
    ])
}

/// A row of [`table`].
pub fn row(operation: &v1::Operation, now: jiff::Timestamp) -> Vec<String> {
    vec![
        operation.id.clone(),
        camel(operation.kind().as_str_name(), "OPERATION_KIND_"),
        operation.vm.clone(),
        camel(operation.phase().as_str_name(), "OPERATION_PHASE_"),
        format!("{}%", operation.progress_percent),
        age::since(operation.create_time.as_ref(), now),
        operation.initiator.clone(),
        operation.message.clone(),
    ]
}
