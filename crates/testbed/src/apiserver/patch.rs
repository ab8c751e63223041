//! The three patch types that clients send.

use serde_json::{Map, Value};

use super::failure::{Failure, Outcome};
use super::kinds::Kind;

/// Applies a patch of the request's media type to `object`.
pub(crate) fn patched(
    kind: &Kind,
    object: &Value,
    media_type: &str,
    patch: &Value,
) -> Outcome<Value> {
    let mut object = object.clone();
    let is_merge = media_type != "application/json-patch+json";
    if is_merge && !patch.is_object() {
        return Err(Failure::bad_request(
            "error decoding patch: it is not an object",
        ));
    }
    match media_type {
        "application/merge-patch+json" => json_patch::merge(&mut object, patch),
        "application/strategic-merge-patch+json" => merge(kind, &mut object, patch, ""),
        "application/json-patch+json" => {
            let patch: json_patch::Patch = serde_json::from_value(patch.clone())
                .map_err(|e| Failure::bad_request(format!("error decoding patch: {e}")))?;
            json_patch::patch(&mut object, &patch).map_err(|e| Failure::new(422, e.to_string()))?;
        }
        _ => return Err(Failure::new(415, "415: Unsupported Media Type")),
    }
    Ok(object)
}

/// Applies a strategic merge patch: a merge patch that merges some lists by a key of their items,
/// and treats names with `$` as directives. `path` is the object's path in the form of
/// [`Kind::merge_keys`].
fn merge(kind: &Kind, object: &mut Value, patch: &Value, path: &str) {
    let Value::Object(patch) = patch else {
        *object = patch.clone();
        return;
    };
    match directive(patch) {
        "replace" => return *object = Value::Object(without_directives(patch)),
        "delete" => return *object = Value::Object(Map::new()),
        _ => {}
    }
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let Value::Object(fields) = object else {
        return;
    };
    if let Some(Value::Array(kept)) = patch.get("$retainKeys") {
        fields.retain(|name, _| kept.iter().any(|k| k == name));
    }
    for (name, value) in without_directives(patch) {
        let path = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        let key = kind
            .merge_keys
            .iter()
            .find(|(list, _)| *list == path)
            .map(|(_, key)| *key);
        match (value, key) {
            (Value::Null, _) => drop(fields.remove(&name)),
            (Value::Array(items), Some(key)) => {
                let list = fields
                    .entry(name)
                    .or_insert_with(|| Value::Array(Vec::new()));
                merge_list(kind, list, &items, key, &path);
            }
            (value, _) => merge(
                kind,
                fields.entry(name).or_insert(Value::Null),
                &value,
                &path,
            ),
        }
    }
    for (name, value) in patch {
        let Value::Array(values) = value else {
            continue;
        };
        if let Some(list) = name.strip_prefix("$deleteFromPrimitiveList/")
            && let Some(Value::Array(list)) = fields.get_mut(list)
        {
            list.retain(|item| !values.contains(item));
        }
        if let Some(list) = name.strip_prefix("$setElementOrder/")
            && let Some(Value::Array(list)) = fields.get_mut(list)
        {
            // An item of the order has only its key; other items follow.
            list.sort_by_key(|item| {
                values
                    .iter()
                    .position(|v| is_part(v, item))
                    .unwrap_or(values.len())
            });
        }
    }
}

fn merge_list(kind: &Kind, list: &mut Value, items: &[Value], key: &str, path: &str) {
    let Value::Array(list) = list else { return };
    if items.iter().any(|i| i["$patch"] == "replace") {
        *list = items
            .iter()
            .filter(|i| i["$patch"] != "replace")
            .cloned()
            .collect();
        return;
    }
    for item in items {
        let same = |other: &Value| {
            if key.is_empty() {
                other == item
            } else {
                other[key] == item[key]
            }
        };
        let at = list.iter().position(same);
        match (item["$patch"] == "delete", at) {
            (true, Some(at)) => drop(list.remove(at)),
            (true, None) => {}
            (false, Some(at)) => merge(kind, &mut list[at], item, path),
            (false, None) => list.push(item.clone()),
        }
    }
}

fn is_part(part: &Value, item: &Value) -> bool {
    match part {
        Value::Object(fields) => fields
            .iter()
            .all(|(name, value)| item.get(name) == Some(value)),
        value => value == item,
    }
}

fn directive(patch: &Map<String, Value>) -> &str {
    patch
        .get("$patch")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn without_directives(patch: &Map<String, Value>) -> Map<String, Value> {
    patch
        .iter()
        .filter(|(name, _)| !name.starts_with('$'))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::kinds::SERVICE;
    use super::*;
    use serde_json::json;

    #[test]
    fn strategic_merge_keeps_other_elements() {
        let service = json!({"metadata": {"labels": {"a": "1", "b": "2"}},
            "spec": {"ports": [{"port": 80, "name": "http"}, {"port": 443, "name": "https"}], "externalIPs": ["1.1.1.1"]}});
        let rows = [
            (
                "null removes",
                json!({"metadata": {"labels": {"a": null}}}),
                "/metadata/labels",
                json!({"b": "2"}),
            ),
            (
                "items meet by their key",
                json!({"spec": {"ports": [{"port": 443, "name": "tls"}]}}),
                "/spec/ports",
                json!([{"port": 80, "name": "http"}, {"port": 443, "name": "tls"}]),
            ),
            (
                "an item is deleted, another added, and both put in order",
                json!({"spec": {"$setElementOrder/ports": [{"port": 81}, {"port": 443}],
                    "ports": [{"port": 80, "$patch": "delete"}, {"port": 81}]}}),
                "/spec/ports",
                json!([{"port": 81}, {"port": 443, "name": "https"}]),
            ),
            (
                "a list is replaced",
                json!({"spec": {"ports": [{"port": 1}, {"$patch": "replace"}]}}),
                "/spec/ports",
                json!([{"port": 1}]),
            ),
            (
                "a list without a key is replaced anyway",
                json!({"spec": {"externalIPs": ["2.2.2.2"]}}),
                "/spec/externalIPs",
                json!(["2.2.2.2"]),
            ),
            (
                "only the kept keys stay",
                json!({"metadata": {"$retainKeys": ["name"], "name": "x"}}),
                "/metadata",
                json!({"name": "x"}),
            ),
        ];
        for (name, patch, at, want) in rows {
            let got = patched(
                SERVICE,
                &service,
                "application/strategic-merge-patch+json",
                &patch,
            )
            .unwrap();
            assert_eq!(got.pointer(at), Some(&want), "{name}");
        }
    }
}
