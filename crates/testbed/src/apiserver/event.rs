//! The checks of kube-apiserver for an Event of events.k8s.io/v1
//! (`pkg/apis/core/validation/events.go`).

use serde_json::Value;

use super::admit::text;
use super::failure::{Cause, Failure, Outcome};
use super::kinds::Kind;

/// Text fields that must not be empty, and their limits in bytes.
const TEXTS: [(&str, usize); 4] = [
    ("reportingController", 253),
    ("reportingInstance", 128),
    ("action", 128),
    ("reason", 128),
];
const NOTE: usize = 1024;
/// The fields that an update must not change.
const IMMUTABLE: [&str; 7] = [
    "note",
    "reason",
    "action",
    "type",
    "regarding",
    "reportingController",
    "reportingInstance",
];

pub(crate) fn validate(kind: &Kind, new: &Value, old: Option<&Value>) -> Outcome<()> {
    let refuse = |path: &str, cause: Cause, message: &str| {
        Err(Failure::invalid(
            kind.kind,
            kind.group,
            text(new, "/metadata/name"),
            path,
            cause,
            message,
        ))
    };
    // Events about cluster-scoped objects belong to the default namespace.
    let regarding = text(new, "/regarding/namespace");
    let home = if regarding.is_empty() {
        "default"
    } else {
        regarding
    };
    if text(new, "/metadata/namespace") != home {
        return refuse(
            "regarding.namespace",
            Cause::Invalid,
            "does not match event.namespace",
        );
    }
    if text(new, "/eventTime").is_empty() {
        return refuse("eventTime", Cause::Required, "");
    }
    if !["Normal", "Warning"].contains(&text(new, "/type")) {
        return refuse("type", Cause::Invalid, "has invalid value");
    }
    for (field, limit) in TEXTS {
        match new[field].as_str().unwrap_or_default().len() {
            0 => return refuse(field, Cause::Required, ""),
            length if length > limit => {
                return refuse(
                    field,
                    Cause::Invalid,
                    &format!("can have at most {limit} bytes"),
                );
            }
            _ => {}
        }
    }
    if new["note"].as_str().unwrap_or_default().len() > NOTE {
        return refuse(
            "note",
            Cause::Invalid,
            &format!("can have at most {NOTE} bytes"),
        );
    }
    if !new["series"].is_null() && new["series"]["count"].as_i64().unwrap_or_default() < 2 {
        return refuse("series.count", Cause::Invalid, "should be at least 2");
    }
    match IMMUTABLE
        .iter()
        .find(|field| old.is_some_and(|old| old[**field] != new[**field]))
    {
        Some(field) => refuse(field, Cause::Invalid, "field is immutable"),
        None => Ok(()),
    }
}
