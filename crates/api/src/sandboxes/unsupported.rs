//! Wishes of a create that this version cannot fulfil. They are refused by name, never ignored; a value that means the
//! default is no wish.

use crate::error::Failure;
use aenv_protocol::rest::NewSandbox;
use serde_json::{Map, Value};

/// Refuses a request that wishes for what is not there yet.
///
/// # Errors
/// 400 that names the field.
pub(crate) fn refuse(request: &NewSandbox) -> Result<(), Failure> {
    let wished = if request.mcp.is_some() {
        Some("mcp".to_owned())
    } else if request.iam.as_ref().is_some_and(|iam| !iam.values().all(means_nothing)) {
        Some("iam".to_owned())
    } else if request.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) {
        Some("volumeMounts".to_owned())
    } else {
        request.network.as_ref().and_then(network_wish)
    };
    match wished {
        Some(field) => Err(Failure::field(&field, "not supported yet; docs/not-yet.md says what is planned")),
        None => Ok(()),
    }
}

fn network_wish(network: &Map<String, Value>) -> Option<String> {
    let wish = network.iter().find(|(name, value)| match name.as_str() {
        "allowPublicTraffic" => !matches!(value, Value::Null | Value::Bool(true)),
        _ => !means_nothing(value),
    });
    wish.map(|(name, _)| format!("network.{name}"))
}

fn means_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::response::IntoResponse as _;

    fn check(fields: &str) -> Result<(), Failure> {
        refuse(&serde_json::from_str(&format!(r#"{{"templateID":"base",{fields}}}"#)).unwrap())
    }

    #[test]
    fn defaults_are_no_wishes() {
        check(
            r#""mcp":null,"iam":{"tokens":{}},
               "volumeMounts":[],"network":{"allowPublicTraffic":true,"allowOut":[],"egressProxy":null,"rules":{}}"#,
        )
        .unwrap();
    }

    #[test]
    fn every_wish_is_refused() {
        for wish in [
            r#""mcp":{}"#,
            r#""iam":{"tokens":{"a":{}}}"#,
            r#""volumeMounts":[{"name":"v","path":"/v"}]"#,
            r#""network":{"allowPublicTraffic":false}"#,
            r#""network":{"denyOut":["0.0.0.0/0"]}"#,
            r#""network":{"somethingNew":true}"#,
        ] {
            let failure = check(wish).expect_err(wish);
            assert_eq!(failure.into_response().status(), 400, "{wish}");
        }
    }
}
