//! Check that every part of the public API has a comment.

use std::collections::HashSet;

use protox::prost_reflect::{
    DescriptorPool, EnumDescriptor, FileDescriptor, MessageDescriptor, ServiceDescriptor,
};

/// The package of which everything must have a comment.
const PACKAGE: &str = "vmmd.v1";

/// Field numbers in descriptor.proto, the elements of a location's path.
mod tag {
    pub const FILE_MESSAGE: i32 = 4;
    pub const FILE_ENUM: i32 = 5;
    pub const FILE_SERVICE: i32 = 6;
    pub const MESSAGE_FIELD: i32 = 2;
    pub const ENUM_VALUE: i32 = 2;
    pub const SERVICE_METHOD: i32 = 2;
}

/// Checks that each message, field, enum, enum value, service and method has a comment.
///
/// # Errors
///
/// All that have none.
pub fn check(pool: &DescriptorPool) -> Result<(), String> {
    let mut missing = Vec::new();
    for file in pool.files().filter(|file| file.package_name() == PACKAGE) {
        missing.extend(without(&file));
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("these have no comment: {}", missing.join(", ")))
}

fn without(file: &FileDescriptor) -> Vec<String> {
    let proto = file.file_descriptor_proto();
    let locations = proto.source_code_info.iter().flat_map(|info| &info.location);
    let said: HashSet<Vec<i32>> = locations
        .filter(|location| location.leading_comments.is_some() || location.trailing_comments.is_some())
        .map(|location| location.path.clone())
        .collect();
    let parts = file
        .messages()
        .enumerate()
        .flat_map(of_message)
        .chain(file.enums().enumerate().flat_map(of_enum))
        .chain(file.services().enumerate().flat_map(of_service));
    parts
        .filter(|(path, _)| !said.contains(path))
        .map(|(_, name)| name)
        .collect()
}

type Part = (Vec<i32>, String);

fn of_message((index, message): (usize, MessageDescriptor)) -> Vec<Part> {
    let path = vec![tag::FILE_MESSAGE, number(index)];
    let fields = message.descriptor_proto().field.iter().enumerate();
    let fields = fields.map(|(index, field)| {
        let path = [path.as_slice(), &[tag::MESSAGE_FIELD, number(index)]].concat();
        (path, format!("{}.{}", message.name(), field.name()))
    });
    let fields: Vec<_> = fields.collect();
    [vec![(path, message.name().to_owned())], fields].concat()
}

fn of_enum((index, item): (usize, EnumDescriptor)) -> Vec<Part> {
    let path = vec![tag::FILE_ENUM, number(index)];
    let values = item.enum_descriptor_proto().value.iter().enumerate();
    let values = values.map(|(index, value)| {
        let path = [path.as_slice(), &[tag::ENUM_VALUE, number(index)]].concat();
        (path, value.name().to_owned())
    });
    let values: Vec<_> = values.collect();
    [vec![(path, item.name().to_owned())], values].concat()
}

fn of_service((index, service): (usize, ServiceDescriptor)) -> Vec<Part> {
    let path = vec![tag::FILE_SERVICE, number(index)];
    let methods = service.methods().enumerate().map(|(index, method)| {
        let path = [path.as_slice(), &[tag::SERVICE_METHOD, number(index)]].concat();
        (path, format!("{}.{}", service.name(), method.name()))
    });
    let methods: Vec<_> = methods.collect();
    [vec![(path, service.name().to_owned())], methods].concat()
}

fn number(index: usize) -> i32 {
    i32::try_from(index).unwrap_or(i32::MAX)
}
