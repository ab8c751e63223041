//! The content of `/flagz`: the flags in force, as Go's programs write them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

#[derive(Clone, Debug, Serialize)]
pub(super) struct Flagz {
    flags: BTreeMap<&'static str, String>,
}

impl Flagz {
    pub(super) fn new(flags: &BTreeMap<&'static str, Value>) -> Self {
        Self {
            flags: flags
                .iter()
                .map(|(name, value)| (*name, text(value)))
                .collect(),
        }
    }

    pub(super) fn text(&self) -> String {
        self.flags
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect()
    }
}

/// Formats a value: `[a,b]` for a list, `A=true,B=false` for a map, no fraction that is zero.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(text).collect::<Vec<_>>().join(","))
        }
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| format!("{name}={}", text(value)))
            .collect::<Vec<_>>()
            .join(","),
        // The only flag with a fraction has 32 bits.
        Value::Number(number) if number.is_f64() => {
            (number.as_f64().unwrap_or_default() as f32).to_string()
        }
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_written_as_by_go() {
        for (value, want) in [
            (json!(null), ""),
            (json!("30s"), "30s"),
            (json!(true), "true"),
            (json!(-999), "-999"),
            (json!(5.0), "5"),
            (json!(0.1_f32), "0.1"),
            (json!([]), "[]"),
            (
                json!(["10.96.0.0/12", "fd00::/108"]),
                "[10.96.0.0/12,fd00::/108]",
            ),
            (json!({}), ""),
            (json!({"A": true, "B": false}), "A=true,B=false"),
        ] {
            assert_eq!(text(&value), want, "{value}");
        }
    }
}
