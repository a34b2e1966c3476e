//! What happens on the node, for those who want to know: the log, and clients of the EventService.

use proto::v1::EventSeverity;
use uuid::Uuid;

use crate::context::Context;

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A VM, by name and uid.
    Vm(String, Uuid),
    /// A disk of the DiskService.
    Disk(String, Uuid),
    /// The node.
    Node,
}

/// An event that is to be told.
#[derive(Clone, Debug)]
pub struct Draft {
    /// What it is about.
    pub object: Object,
    /// How bad it is.
    pub severity: EventSeverity,
    /// One CamelCase word.
    pub reason: String,
    /// One sentence, without paths of the host.
    pub message: String,
    /// What led to it.
    pub context: Context,
    /// Id of the operation that it belongs to; empty when to none.
    pub operation: String,
}

/// All events of the node.
#[derive(Debug, Default)]
pub struct Events {}

impl Draft {
    /// Something that is to be expected.
    pub fn normal(object: Object, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            object,
            severity: EventSeverity::Normal,
            reason: reason.into(),
            message: message.into(),
            context: Context::daemon(),
            operation: String::new(),
        }
    }

    /// Something that somebody should look at.
    pub fn warning(object: Object, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            severity: EventSeverity::Warning,
            ..Self::normal(object, reason, message)
        }
    }

    /// The same, led to by a request.
    pub fn of(self, context: Context) -> Self {
        Self { context, ..self }
    }
}

impl Events {
    /// Tells an event. Never waits.
    pub fn emit(&self, draft: Draft) {
        let Draft {
            object,
            severity,
            reason,
            message,
            context,
            operation,
        } = draft;
        let (kind, name) = match &object {
            Object::Vm(name, _) => ("vm", name.as_str()),
            Object::Disk(name, _) => ("disk", name.as_str()),
            Object::Node => ("node", ""),
        };
        tracing::info!(
            kind,
            name,
            reason,
            severity = severity.as_str_name(),
            request = context.request_id,
            operation,
            "{message}"
        );
    }
}
