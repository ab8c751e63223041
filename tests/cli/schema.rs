//! The fields of JSON output and their types.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// Returns a line per field, as `[].ports[].name: string`, with `|` between the types of a field.
pub(crate) fn schema(value: &Value) -> String {
    let mut fields = BTreeMap::new();
    visit("", value, &mut fields);
    let lines = fields
        .into_iter()
        .map(|(path, types)| format!("{path}: {}\n", Vec::from_iter(types).join("|")));
    lines.collect()
}

/// Objects whose keys are names of things rather than of fields.
const NAMED: [&str; 7] = [
    "[].labels",
    ".tables",
    ".flows",
    ".events",
    ".reasons",
    ".maps",
    ".mapFill",
];

fn visit(path: &str, value: &Value, fields: &mut BTreeMap<String, BTreeSet<&'static str>>) {
    let mut note = |kind| fields.entry(path.to_owned()).or_default().insert(kind);
    match value {
        Value::Null => drop(note("null")),
        Value::Bool(_) => drop(note("boolean")),
        Value::Number(_) => drop(note("number")),
        Value::String(_) => drop(note("string")),
        Value::Array(items) => {
            if items.is_empty() {
                note("[]");
            }
            items
                .iter()
                .for_each(|item| visit(&format!("{path}[]"), item, fields));
        }
        Value::Object(object) => {
            let is_named = NAMED.contains(&path) || path == ".programs";
            for (key, value) in object {
                let key = if is_named { "NAME" } else { key };
                visit(&format!("{path}.{key}"), value, fields);
            }
        }
    }
}

#[test]
fn fields_are_named_once_with_all_their_types() {
    let value =
        serde_json::json!([{ "a": 1, "b": [{ "c": null }, { "c": "x" }] }, { "a": 2, "b": [] }]);
    assert_eq!(
        schema(&value),
        "[].a: number\n[].b: []\n[].b[].c: null|string\n"
    );
}
