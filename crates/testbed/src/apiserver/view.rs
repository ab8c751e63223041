//! The representations of objects: complete, metadata only, or a table.

use std::fmt::Write;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::admit::text;
use super::failure::{Failure, Outcome};
use super::kinds::Kind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Whole,
    Metadata,
    /// A table; each row includes this part of its object.
    Table(Include),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Include {
    None,
    Metadata,
    Object,
}

impl View {
    /// Returns the first supported media type of `accept`.
    pub(crate) fn accepted(accept: &str, include: Option<&str>) -> Outcome<Self> {
        let include = match include {
            Some("None") => Include::None,
            Some("Object") => Include::Object,
            _ => Include::Metadata,
        };
        let view = |media_type: &str| {
            let mut parts = media_type.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let kind = parts.find_map(|p| p.strip_prefix("as="));
            match (name, kind.unwrap_or_default()) {
                ("application/json" | "application/*" | "*/*" | "", "") => Some(Self::Whole),
                ("application/json", "Table") => Some(Self::Table(include)),
                ("application/json", "PartialObjectMetadata" | "PartialObjectMetadataList") => {
                    Some(Self::Metadata)
                }
                _ => None,
            }
        };
        let refusal = || {
            Failure::new(
                406,
                "only the following media types are accepted: application/json",
            )
        };
        accept.split(',').find_map(view).ok_or_else(refusal)
    }

    /// Returns an object as the answer to a request or as an event's content. Only the first event
    /// of a watch has the columns.
    pub(crate) fn of(self, kind: &Kind, object: &Value, with_columns: bool) -> Value {
        match self {
            Self::Whole => object.clone(),
            Self::Metadata => metadata_only(object),
            Self::Table(include) => {
                let metadata = json!({"resourceVersion": object["metadata"]["resourceVersion"]});
                let mut table = table(kind, include, [object], metadata);
                if !with_columns {
                    table["columnDefinitions"] = Value::Null;
                }
                table
            }
        }
    }

    pub(crate) fn list<'a>(
        self,
        kind: &Kind,
        objects: impl Iterator<Item = &'a Value>,
        metadata: Value,
    ) -> Value {
        let (version, name, items): (_, _, Vec<_>) = match self {
            Self::Table(include) => return table(kind, include, objects, metadata),
            Self::Metadata => {
                let items = objects.map(metadata_only).collect();
                (
                    "meta.k8s.io/v1".to_owned(),
                    "PartialObjectMetadataList".to_owned(),
                    items,
                )
            }
            Self::Whole => (
                kind.api_version(),
                format!("{}List", kind.kind),
                objects.map(without_type).collect(),
            ),
        };
        json!({"kind": name, "apiVersion": version, "metadata": metadata, "items": items})
    }
}

/// Removes the type from an item: the list has it.
fn without_type(object: &Value) -> Value {
    let fields = object.as_object().into_iter().flatten();
    fields
        .filter(|(name, _)| *name != "kind" && *name != "apiVersion")
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect()
}

fn metadata_only(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

fn table<'a>(
    kind: &Kind,
    include: Include,
    objects: impl IntoIterator<Item = &'a Value>,
    metadata: Value,
) -> Value {
    let columns = columns(kind);
    let names = ["Name"]
        .into_iter()
        .chain(columns.iter().map(|(name, _)| *name))
        .chain(["Age"]);
    let definitions: Vec<_> = names
        .map(|name| {
            let format = if name == "Name" { "name" } else { "" };
            let of_type = if name == "Age" { "date" } else { "string" };
            json!({"name": name, "type": of_type, "format": format, "description": "", "priority": 0})
        })
        .collect();
    let row = |object: &Value| {
        let mut cells = vec![text(object, "/metadata/name").to_owned()];
        cells.extend(columns.iter().map(|(_, cell)| cell(object)).map(or_none));
        cells.push(age(text(object, "/metadata/creationTimestamp")));
        match include {
            Include::None => json!({"cells": cells, "object": null}),
            Include::Metadata => json!({"cells": cells, "object": metadata_only(object)}),
            Include::Object => json!({"cells": cells, "object": object}),
        }
    };
    let rows: Vec<_> = objects.into_iter().map(row).collect();
    json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "columnDefinitions": definitions,
        "rows": rows})
}

type Column = (&'static str, fn(&Value) -> String);

fn columns(kind: &Kind) -> &'static [Column] {
    match kind.kind {
        "Service" => &[
            ("Type", |o| text(o, "/spec/type").to_owned()),
            ("Cluster-IP", |o| text(o, "/spec/clusterIP").to_owned()),
            ("External-IP", |o| {
                let ingress = texts(&o["status"]["loadBalancer"]["ingress"], "/ip");
                [texts(&o["spec"]["externalIPs"], ""), ingress]
                    .concat()
                    .join(",")
            }),
            ("Port(s)", |o| {
                let node_port = |p: &Value| {
                    p["nodePort"]
                        .as_u64()
                        .map_or_else(String::new, |n| format!(":{n}"))
                };
                let port =
                    |p: &Value| format!("{}{}/{}", p["port"], node_port(p), text(p, "/protocol"));
                o["spec"]["ports"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(port)
                    .collect::<Vec<_>>()
                    .join(",")
            }),
        ],
        "EndpointSlice" => &[
            ("AddressType", |o| text(o, "/addressType").to_owned()),
            ("Ports", |o| {
                let ports = o["ports"].as_array().into_iter().flatten();
                ports
                    .map(|p| p["port"].to_string())
                    .collect::<Vec<_>>()
                    .join(",")
            }),
            ("Endpoints", |o| {
                let addresses: Vec<_> = o["endpoints"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .flat_map(|e| texts(&e["addresses"], ""))
                    .collect();
                let mut shown = addresses[..addresses.len().min(3)].join(",");
                if addresses.len() > 3 {
                    let _ = write!(shown, " + {} more...", addresses.len() - 3);
                }
                shown
            }),
        ],
        "Node" => &[
            ("Internal-IP", |o| {
                let addresses = o["status"]["addresses"].as_array().into_iter().flatten();
                addresses
                    .filter(|a| a["type"] == "InternalIP")
                    .flat_map(|a| a["address"].as_str())
                    .collect()
            }),
            ("Pod-CIDR", |o| texts(&o["spec"]["podCIDRs"], "").join(",")),
        ],
        "Namespace" => &[("Status", |o| text(o, "/status/phase").to_owned())],
        "ServiceCIDR" => &[("CIDRs", |o| texts(&o["spec"]["cidrs"], "").join(","))],
        _ => &[],
    }
}

/// Returns the texts at a JSON pointer in each item of a list.
fn texts(list: &Value, pointer: &str) -> Vec<String> {
    let items = list.as_array().into_iter().flatten();
    items
        .map(|i| text(i, pointer).to_owned())
        .filter(|t| !t.is_empty())
        .collect()
}

fn or_none(cell: String) -> String {
    if cell.is_empty() {
        "<none>".to_owned()
    } else {
        cell
    }
}

fn age(created: &str) -> String {
    let Ok(created) = created.parse::<Timestamp>() else {
        return "<unknown>".to_owned();
    };
    match Timestamp::now().duration_since(created).as_secs().max(0) {
        seconds @ ..120 => format!("{seconds}s"),
        seconds @ ..7_200 => format!("{}m", seconds / 60),
        seconds @ ..172_800 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}
