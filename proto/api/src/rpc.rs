//! `google.rpc.Status` and the details that vmmd gives with it, with their canonical JSON form.

use std::collections::BTreeMap;

use prost::{Message, Name};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The outcome of a call or an operation.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// A value of `google.rpc.Code`.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// For people.
    #[prost(string, tag = "2")]
    pub message: String,
    /// For programs.
    #[prost(message, repeated, tag = "3")]
    pub details: Vec<Detail>,
}

/// A detail of a [`Status`]: any message, with the URL of its type (`google.protobuf.Any`).
#[derive(Clone, PartialEq, Message)]
pub struct Detail {
    /// `type.googleapis.com/` and the full name of the message.
    #[prost(string, tag = "1")]
    pub type_url: String,
    /// The message's encoded form.
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// Why something failed, for programs (`google.rpc.ErrorInfo`).
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ErrorInfo {
    /// `UPPER_SNAKE_CASE`.
    #[prost(string, tag = "1")]
    pub reason: String,
    /// Domain of the reason: `vmmd`.
    #[prost(string, tag = "2")]
    pub domain: String,
    /// More about it.
    #[prost(btree_map = "string, string", tag = "3")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// Which fields of a request are wrong (`google.rpc.BadRequest`).
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BadRequest {
    /// All of them.
    #[prost(message, repeated, tag = "1")]
    pub field_violations: Vec<FieldViolation>,
}

/// A wrong field.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct FieldViolation {
    /// Its path.
    #[prost(string, tag = "1")]
    pub field: String,
    /// Problem with the field.
    #[prost(string, tag = "2")]
    pub description: String,
}

impl Name for ErrorInfo {
    const NAME: &'static str = "ErrorInfo";
    const PACKAGE: &'static str = "google.rpc";
}

impl Name for BadRequest {
    const NAME: &'static str = "BadRequest";
    const PACKAGE: &'static str = "google.rpc";
}

impl Status {
    /// The detail of this type, if there is one that can be decoded.
    pub fn detail<D: Message + Name + Default>(&self) -> Option<D> {
        self.details.iter().find_map(Detail::decode)
    }

    /// The reason of its [`ErrorInfo`]; empty when there is none.
    pub fn reason(&self) -> String {
        self.detail::<ErrorInfo>()
            .map_or_else(String::new, |info| info.reason)
    }
}

impl Detail {
    /// Of a message.
    pub fn of<D: Message + Name>(detail: &D) -> Self {
        Self {
            type_url: url::<D>(),
            value: detail.encode_to_vec(),
        }
    }

    fn decode<D: Message + Name + Default>(&self) -> Option<D> {
        (self.type_url == url::<D>())
            .then(|| D::decode(self.value.as_slice()).ok())
            .flatten()
    }
}

fn url<D: Name>() -> String {
    format!("type.googleapis.com/{}", D::full_name())
}

/// JSON of a detail: the fields of the message beside `@type`.
#[derive(Serialize)]
struct Typed<'a, T> {
    #[serde(rename = "@type")]
    url: &'a str,
    #[serde(flatten)]
    content: T,
}

impl Serialize for Detail {
    /// Writes only the URL of an unknown type.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let url = self.type_url.as_str();
        if let Some(content) = self.decode::<ErrorInfo>() {
            return Typed { url, content }.serialize(serializer);
        }
        let content = self.decode::<BadRequest>();
        Typed { url, content }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Detail {
    /// Always fails: no manifest has a status in it.
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(de::Error::custom("details of errors are not read from JSON"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_json_as_their_type_says() {
        let violation = FieldViolation {
            field: "a.b".into(),
            description: "is wrong".into(),
        };
        let info = ErrorInfo {
            reason: "INVALID_FIELDS".into(),
            domain: "vmmd".into(),
            metadata: BTreeMap::new(),
        };
        let other = Detail {
            type_url: "type.googleapis.com/x.Y".into(),
            value: vec![1],
        };
        let request = BadRequest {
            field_violations: vec![violation],
        };
        let status = Status {
            code: 3,
            message: "m".into(),
            details: vec![Detail::of(&info), Detail::of(&request), other],
        };
        assert_eq!(status.reason(), "INVALID_FIELDS");
        let expected = serde_json::json!({"code": 3, "message": "m", "details": [
            {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "INVALID_FIELDS", "domain": "vmmd"},
            {"@type": "type.googleapis.com/google.rpc.BadRequest",
             "fieldViolations": [{"field": "a.b", "description": "is wrong"}]},
            {"@type": "type.googleapis.com/x.Y"},
        ]});
        assert_eq!(serde_json::to_value(&status).unwrap(), expected);
    }
}
