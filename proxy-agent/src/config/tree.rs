//! Accesses the fields of a document by paths such as `iptables.syncPeriod`.

use serde_json::{Map, Value};

use super::duration::GoDuration;

pub(super) fn get<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.')
        .try_fold(value, |value, step| value.get(step))
}

/// Sets a field, and creates the missing objects above it.
pub(super) fn set(value: &mut Value, path: &str, new: Value) {
    let place = path.split('.').fold(value, |value, step| {
        if !value.is_object() {
            *value = Value::Object(Map::new());
        }
        &mut value[step]
    });
    *place = new;
}

/// Merges two documents; the fields of `over` win.
pub(super) fn merge(under: Value, over: Value) -> Value {
    match (under, over) {
        (Value::Object(mut under), Value::Object(over)) => {
            for (key, over) in over {
                let under_it = under.remove(&key).unwrap_or_default();
                under.insert(key, merge(under_it, over));
            }
            Value::Object(under)
        }
        (under, Value::Null) => under,
        (_, over) => over,
    }
}

/// Removes null fields, because Go treats them as absent.
pub(super) fn prune_nulls(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|_, field| !field.is_null());
        fields.values_mut().for_each(prune_nulls);
    }
}

pub(super) fn remove_if_zero(value: &mut Value, path: &str) {
    let (parent, name) = match path.rsplit_once('.') {
        Some((parent, name)) => (
            parent
                .split('.')
                .try_fold(value, |value, step| value.get_mut(step)),
            name,
        ),
        None => (Some(value), path),
    };
    let Some(Value::Object(fields)) = parent else {
        return;
    };
    let is_zero = |field: &Value| match field {
        Value::String(text) => text.is_empty() || text.parse() == Ok(GoDuration::ZERO),
        number => number.as_f64() == Some(0.0),
    };
    if fields.get(name).is_some_and(is_zero) {
        fields.remove(name);
    }
}

/// Writes a path in the usual form: `list[0].field` for `list.0.field`.
pub(super) fn path(dotted: &str) -> String {
    let mut path = String::new();
    for step in dotted.split('.') {
        match step.parse::<usize>() {
            Ok(index) => path.push_str(&format!("[{index}]")),
            Err(_) if path.is_empty() => path.push_str(step),
            Err(_) => path.push_str(&format!(".{step}")),
        }
    }
    path
}

/// Joins the values of a repeated flag. Lists and maps are merged; other values are replaced.
pub(super) fn join(first: Value, more: Value) -> Value {
    match (first, more) {
        (Value::Array(first), Value::Array(more)) => first.into_iter().chain(more).collect(),
        (first @ Value::Object(_), more @ Value::Object(_)) => merge(first, more),
        (_, more) => more,
    }
}
