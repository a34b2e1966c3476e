//! Values of fields for people.

use serde_json::Value as Json;
use vmmd_api::well_known;

/// A value of the API as people write it.
pub fn value(value: Option<&well_known::Value>) -> String {
    shown(&json(value))
}

/// A value of the API as JSON.
pub fn json(value: Option<&well_known::Value>) -> Json {
    match serde_json::to_value(value) {
        Ok(Json::Number(number)) => whole(&number),
        json => json.unwrap_or(Json::Null),
    }
}

/// A number as people write it: the API's values have floating point only.
fn whole(number: &serde_json::Number) -> Json {
    let text = number.to_string();
    match text
        .strip_suffix(".0")
        .and_then(|whole| whole.parse::<i64>().ok())
    {
        Some(whole) => whole.into(),
        None => Json::Number(number.clone()),
    }
}

/// A value as people write it.
pub fn shown(json: &Json) -> String {
    match json {
        Json::Null => "not set".into(),
        Json::String(text) => text.clone(),
        json => json.to_string(),
    }
}
