//! Object of a request, read from the bytes of any message type. The result serves the audit log.

use vmmd_api::rule::REQUEST_ID;

/// Where the name of a request's object is.
#[derive(Clone, Copy, Debug)]
pub struct Object {
    /// `vm`, `disk`, `node`, `operation`.
    pub kind: &'static str,
    /// Field numbers from the request to the name. The path is empty for objects without a name.
    pub path: &'static [u32],
}

/// Longest name or id that is repeated, in bytes.
const MAX: usize = 100;

impl Object {
    /// `vm/web`; only the kind when the message has no such field.
    pub fn read(&self, message: &[u8]) -> String {
        match text(message, self.path) {
            Some(name) if !name.is_empty() => format!("{}/{name}", self.kind),
            _ => self.kind.to_owned(),
        }
    }
}

/// The client's id of the request, or nothing.
pub fn request_id(message: &[u8]) -> String {
    text(message, &[REQUEST_ID]).unwrap_or_default()
}

/// The text in the field that `path` leads to, at most 100 bytes of it, without control characters.
fn text(message: &[u8], path: &[u32]) -> Option<String> {
    let mut bytes = message;
    for number in path {
        bytes = field(bytes, *number)?;
    }
    if path.is_empty() {
        return None;
    }
    let bytes = bytes.get(..bytes.len().min(MAX))?;
    let text = String::from_utf8_lossy(bytes);
    Some(text.chars().filter(|letter| !letter.is_control()).collect())
}

/// The last length-delimited field with this number (protobuf.dev, "Encoding").
fn field(mut message: &[u8], wanted: u32) -> Option<&[u8]> {
    let mut found = None;
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let length = match key & 7 {
            0 => {
                varint(&mut message)?;
                0
            }
            1 => 8,
            2 => usize::try_from(varint(&mut message)?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (value, rest) = message.split_at_checked(length)?;
        if key == u64::from(wanted) << 3 | 2 {
            found = Some(value);
        }
        message = rest;
    }
    found
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use vmmd_api::v1;

    use super::*;

    #[test]
    fn the_name_and_the_id_are_found_among_other_fields() {
        let vm = v1::Vm {
            metadata: Some(v1::ObjectMetadata {
                name: "web\n".into(),
                generation: 7,
                ..Default::default()
            }),
            ..Default::default()
        };
        let request = v1::CreateVmRequest {
            vm: Some(vm),
            start: true,
            request_id: "r1".into(),
            ..Default::default()
        };
        let bytes = request.encode_to_vec();
        let object = Object {
            kind: "vm",
            path: &[1, 3, 1],
        };
        assert_eq!(
            (object.read(&bytes), request_id(&bytes)),
            ("vm/web".into(), "r1".into())
        );
    }

    proptest::proptest! {
        #[test]
        fn anything_can_be_read(bytes: Vec<u8>) {
            let object = Object { kind: "vm", path: &[1, 3, 1] };
            proptest::prop_assert!(object.read(&bytes).starts_with("vm"));
            proptest::prop_assert!(request_id(&bytes).len() <= 3 * MAX);
        }
    }
}
