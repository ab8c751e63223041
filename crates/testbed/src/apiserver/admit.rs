//! Validation and defaults of an object before it is stored.

use std::net::IpAddr;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Service;
use rand::RngExt;
use serde::Deserialize;
use serde_json::{Value, json};

use super::event;
use super::failure::{Cause, Failure, Outcome};
use super::kinds::Kind;
use super::objects::Target;
use super::service::{self, Addresses};

/// Decodes a request's body as an object of the target's kind and place.
pub(crate) fn decoded(target: &Target, sent: &Value) -> Outcome<Value> {
    let kind = target.kind;
    let unreadable = |why: String| match target.patch {
        true => Failure::invalid("", "", "", "patch", Cause::Invalid, &why),
        false => {
            let message = format!(
                "{} in version \"v1\" cannot be handled as a {}: {why}",
                kind.kind, kind.kind
            );
            Failure::bad_request(message)
        }
    };
    let mut object = (kind.decode)(sent).map_err(|e| unreadable(e.to_string()))?;
    if target.strict
        && let Some(field) = unknown_field(sent, &object, String::new())
    {
        return Err(unreadable(format!(
            "strict decoding error: unknown field \"{field}\""
        )));
    }
    let name = text(&object, "/metadata/name");
    if !target.name.is_empty() && name != target.name {
        let message = format!(
            "the name of the object ({name}) does not match the name on the URL ({})",
            target.name
        );
        return Err(Failure::bad_request(message));
    }
    let namespace = text(&object, "/metadata/namespace");
    if !namespace.is_empty() && namespace != target.namespace {
        let message =
            "the namespace of the provided object does not match the namespace sent on the request";
        return Err(Failure::bad_request(message));
    }
    if kind.namespaced {
        object["metadata"]["namespace"] = json!(target.namespace);
    }
    if kind.kind == "Service" {
        service::default_status(&mut object);
    }
    Ok(object)
}

/// Fills in server-owned fields and defaults.
pub(crate) fn complete(
    kind: &Kind,
    new: &mut Value,
    old: Option<&Value>,
    addresses: &mut Addresses,
) -> Outcome<()> {
    let mut generation = Value::Null;
    match kind.kind {
        "Service" => {
            let mut service: Service = typed(new)?;
            let old = old.map(typed).transpose()?;
            service::complete(&mut service, old.as_ref(), addresses)?;
            *new = serde_json::to_value(service).map_err(internal)?;
        }
        "EndpointSlice" => {
            complete_slice(new);
            let is_other = |old: &Value| ["endpoints", "ports"].iter().any(|f| old[*f] != new[*f]);
            let was = old.map_or(0, |old| old["metadata"]["generation"].as_u64().unwrap_or(0));
            let changed = old.is_none_or(|old| {
                is_other(old) || old["metadata"]["labels"] != new["metadata"]["labels"]
            });
            generation = json!(was + u64::from(changed));
        }
        "Namespace" => {
            new["spec"] = json!({});
            new["status"] = json!({"phase": "Active"});
            new["metadata"]["labels"]["kubernetes.io/metadata.name"] =
                new["metadata"]["name"].clone();
        }
        "ServiceCIDR" if new["status"].is_null() => new["status"] = json!({}),
        _ => {}
    }
    let metadata = &mut new["metadata"];
    remove(metadata, "managedFields");
    metadata["generation"] = generation;
    for field in ["uid", "creationTimestamp", "resourceVersion"] {
        metadata[field] = old.map_or(Value::Null, |old| old["metadata"][field].clone());
    }
    match old {
        Some(old) => {
            for field in ["deletionTimestamp", "deletionGracePeriodSeconds"] {
                metadata[field] = old["metadata"][field].clone();
            }
        }
        None => (metadata["uid"], metadata["creationTimestamp"]) = (json!(uid()), json!(now())),
    }
    if let Value::Object(fields) = metadata {
        fields.retain(|_, value| !value.is_null());
    }
    Ok(())
}

/// Refuses objects that kube-apiserver would refuse, as far as a proxy relies on it.
pub(crate) fn validate(
    kind: &Kind,
    new: &Value,
    old: Option<&Value>,
    addresses: &Addresses,
) -> Outcome<()> {
    match kind.kind {
        "Service" => service::validate(
            &typed(new)?,
            old.map(typed).transpose()?.as_ref(),
            addresses,
        ),
        "EndpointSlice" => validate_slice(kind, new, old),
        "Event" if kind.group == "events.k8s.io" => event::validate(kind, new, old),
        _ => Ok(()),
    }
}

/// Returns the first field of `sent` that was lost in decoding.
fn unknown_field(sent: &Value, known: &Value, path: String) -> Option<String> {
    match (sent, known) {
        (Value::Object(sent), known) => {
            sent.iter()
                .filter(|(_, value)| !value.is_null())
                .find_map(|(name, value)| {
                    let path = if path.is_empty() {
                        name.clone()
                    } else {
                        format!("{path}.{name}")
                    };
                    match known.get(name) {
                        Some(known) => unknown_field(value, known, path),
                        None => Some(path),
                    }
                })
        }
        (Value::Array(sent), Value::Array(known)) => {
            let mut pairs = sent.iter().zip(known).enumerate();
            pairs.find_map(|(i, (sent, known))| unknown_field(sent, known, format!("{path}[{i}]")))
        }
        _ => None,
    }
}

fn complete_slice(slice: &mut Value) {
    for endpoint in slice["endpoints"].as_array_mut().into_iter().flatten() {
        if endpoint["conditions"].is_null() {
            endpoint["conditions"] = json!({});
        }
    }
    for port in slice["ports"].as_array_mut().into_iter().flatten() {
        for (field, default) in [("name", ""), ("protocol", "TCP")] {
            if port[field].is_null() {
                port[field] = json!(default);
            }
        }
    }
    // kube-apiserver writes a slice's empty lists as null, so readers must handle null.
    for list in ["endpoints", "ports"] {
        if slice[list].as_array().is_none_or(Vec::is_empty) {
            slice[list] = Value::Null;
        }
    }
}

fn validate_slice(kind: &Kind, new: &Value, old: Option<&Value>) -> Outcome<()> {
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
    let family = text(new, "/addressType");
    if !["IPv4", "IPv6", "FQDN"].contains(&family) {
        let message = format!("\"{family}\": supported values: \"FQDN\", \"IPv4\", \"IPv6\"");
        return refuse("addressType", Cause::NotSupported, &message);
    }
    if old.is_some_and(|old| text(old, "/addressType") != family) {
        return refuse(
            "addressType",
            Cause::Invalid,
            &format!("\"{family}\": field is immutable"),
        );
    }
    for (i, endpoint) in new["endpoints"]
        .as_array()
        .into_iter()
        .flatten()
        .enumerate()
    {
        let addresses = endpoint["addresses"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        if addresses.is_empty() {
            let path = format!("endpoints[{i}].addresses");
            return refuse(&path, Cause::Required, "must contain at least 1 address");
        }
        for (j, address) in addresses.iter().enumerate() {
            let address = address.as_str().unwrap_or_default();
            let fits = match (family, address.parse()) {
                ("FQDN", _) => true,
                (_, Ok(IpAddr::V4(_))) => family == "IPv4",
                (_, Ok(IpAddr::V6(_))) => family == "IPv6",
                (_, Err(_)) => false,
            };
            if !fits {
                let message = format!("\"{address}\": must be a valid {family} address");
                return refuse(
                    &format!("endpoints[{i}].addresses[{j}]"),
                    Cause::Invalid,
                    &message,
                );
            }
        }
    }
    Ok(())
}

/// Completes a `generateName`.
pub(crate) fn give_name(new: &mut Value) {
    let start = text(new, "/metadata/generateName");
    if text(new, "/metadata/name").is_empty() && !start.is_empty() {
        new["metadata"]["name"] = json!(format!(
            "{start}{:05x}",
            rand::rng().random_range(0..0x10_0000)
        ));
    }
}

pub(crate) fn check_name(kind: &Kind, name: &str) -> Outcome<()> {
    let is_service = kind.kind == "Service";
    let is_allowed = |c: char| {
        c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.' && !is_service
    };
    let may_start = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() && !is_service;
    let may_end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let length = if is_service { 63 } else { 253 };
    if name.starts_with(may_start)
        && name.ends_with(may_end)
        && name.len() <= length
        && name.chars().all(is_allowed)
    {
        return Ok(());
    }
    let rule = match is_service {
        true => "a DNS-1035 label must consist of lower case alphanumeric characters or '-'",
        false => {
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
        }
    };
    let message = format!("\"{name}\": {rule}");
    Err(Failure::invalid(
        kind.kind,
        kind.group,
        name,
        "metadata.name",
        Cause::Invalid,
        &message,
    ))
}

pub(crate) fn typed(object: &Value) -> Outcome<Service> {
    Service::deserialize(object).map_err(internal)
}

fn internal(error: serde_json::Error) -> Failure {
    Failure::new(500, format!("Internal error occurred: {error}"))
}

/// Returns the text at a JSON pointer, or an empty string.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

pub(crate) fn remove(object: &mut Value, field: &str) {
    if let Value::Object(fields) = object {
        fields.remove(field);
    }
}

/// Returns the current time in seconds, as the API writes times.
pub(crate) fn now() -> String {
    Timestamp::from_second(Timestamp::now().as_second())
        .unwrap_or_default()
        .to_string()
}

/// Returns a random UUID, version 4 of RFC 9562.
fn uid() -> String {
    let bits = rand::rng().random::<u128>() & !(0xf << 76 | 0b11 << 62) | 4 << 76 | 0b10 << 62;
    let hex = format!("{bits:032x}");
    [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ]
    .join("-")
}
