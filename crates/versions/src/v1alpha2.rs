//! `kubeproxy.config.k8s.io/v1alpha2` (KEP-784), in the form of v1alpha1.

use std::net::IpAddr;

use serde_json::{Map, Value, json};

use crate::tree::get;

pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha2";

/// The fields that are elsewhere in v1alpha1: a field of v1alpha2, and its places.
const MOVED: &[(&str, &[&str])] = &[
    ("linux.conntrack", &["conntrack"]),
    ("linux.oomScoreAdj", &["oomScoreAdj"]),
    (
        "linux.masqueradeAll",
        &["iptables.masqueradeAll", "nftables.masqueradeAll"],
    ),
    (
        "syncPeriod",
        &[
            "iptables.syncPeriod",
            "nftables.syncPeriod",
            "ipvs.syncPeriod",
        ],
    ),
    (
        "minSyncPeriod",
        &[
            "iptables.minSyncPeriod",
            "nftables.minSyncPeriod",
            "ipvs.minSyncPeriod",
        ],
    ),
    ("windows.runAsService", &["windowsRunAsService"]),
];

/// The fields that v1alpha2 does not have, and what stands for them.
const DROPPED: &[(&str, &str)] = &[
    ("portRange", ""),
    ("bindAddress", "nodeIPOverride"),
    ("clusterCIDR", "detectLocal.clusterCIDRs"),
];

const CLUSTER_CIDRS: &str = "detectLocal.clusterCIDRs";
const NODE_IPS: &str = "nodeIPOverride";
const IPVS_BIT: &str = "ipvs.masqueradeBit";
const FAMILIES: [&str; 3] = ["SingleStack", "PreferDualStack", "RequireDualStack"];

/// A document in the form of v1alpha1.
#[derive(Debug, PartialEq)]
pub struct Converted {
    pub value: Value,
    /// The fields that v1alpha2 does not have, each with what stands for it or an empty text.
    pub unknown: Vec<(String, &'static str)>,
    /// False: unknown and doubled fields are named only.
    pub hard_fail: bool,
    /// The node's own addresses.
    pub node_ips: Vec<String>,
}

/// A field whose value is of the wrong type or unknown.
pub type Wrong = (String, String);

/// Converts a document without null values.
pub fn convert(mut value: Value) -> Result<Converted, Wrong> {
    let mut unknown = Vec::new();
    for place in MOVED
        .iter()
        .flat_map(|(name, places)| places.iter().map(move |place| (*name, *place)))
    {
        take_unknown(&mut value, place.1, place.0, &mut unknown);
    }
    for (field, instead) in DROPPED {
        take_unknown(&mut value, field, instead, &mut unknown);
    }
    let hard_fail = match take(&mut value, "configHardFail") {
        None => true,
        Some(Value::Bool(hard_fail)) => hard_fail,
        Some(_) => return Err(wrong("configHardFail", "must be true or false")),
    };
    let node_ips = texts(take(&mut value, NODE_IPS), NODE_IPS)?;
    if let Some((index, wrongs)) = node_ips
        .iter()
        .enumerate()
        .find(|(_, text)| text.trim().parse::<IpAddr>().is_err())
    {
        return Err(wrong(
            &format!("{NODE_IPS}[{index}]"),
            &format!("Invalid value: {wrongs:?}: must be an IP address"),
        ));
    }
    let cidrs = texts(take(&mut value, CLUSTER_CIDRS), CLUSTER_CIDRS)?;
    if let Some(policy) = take(&mut value, "ipFamilyPolicy")
        && !policy
            .as_str()
            .is_some_and(|policy| FAMILIES.contains(&policy))
    {
        return Err(wrong(
            "ipFamilyPolicy",
            &format!("must be one of {}", FAMILIES.join(", ")),
        ));
    }
    if !cidrs.is_empty() {
        set(&mut value, "clusterCIDR", json!(cidrs.join(",")));
    }
    if let Some(first) = node_ips.first() {
        set(&mut value, "bindAddress", json!(first));
    }
    // Only its range is checked: kpx sets no mark.
    if let Some(bit) = take(&mut value, IPVS_BIT) {
        let bit = bit
            .as_i64()
            .ok_or_else(|| wrong(IPVS_BIT, "must be a whole number"))?;
        if value["mode"] == "ipvs" && !(0..32).contains(&bit) {
            return Err(wrong(
                IPVS_BIT,
                &format!("Invalid value: {bit}: must be within the range [0, 31]"),
            ));
        }
    }
    for (name, places) in MOVED {
        if let Some(moved) = take(&mut value, name) {
            places
                .iter()
                .for_each(|place| set(&mut value, place, moved.clone()));
        }
    }
    for section in ["linux", "windows"] {
        match take(&mut value, section) {
            Some(Value::Object(rest)) => {
                unknown.extend(rest.keys().map(|field| (format!("{section}.{field}"), "")))
            }
            Some(_) => return Err(wrong(section, "must be a section of fields")),
            None => {}
        }
    }
    for (field, default) in [
        ("iptables.localhostNodePorts", false),
        ("bindAddressHardFail", true),
    ] {
        if get(&value, field).is_none() {
            set(&mut value, field, json!(default));
        }
    }
    Ok(Converted {
        value,
        unknown,
        hard_fail,
        node_ips,
    })
}

/// Returns the name in v1alpha2 of a field of v1alpha1.
pub fn name(field: &str) -> String {
    let extra = [("clusterCIDR", CLUSTER_CIDRS), ("bindAddress", NODE_IPS)];
    let moved = MOVED
        .iter()
        .flat_map(|(name, places)| places.iter().map(move |place| (*place, *name)));
    let found = moved
        .chain(extra)
        .find_map(|(place, name)| Some((name, field.strip_prefix(place)?)));
    match found {
        Some((name, rest)) if rest.is_empty() || rest.starts_with(['.', '[']) => {
            format!("{name}{rest}")
        }
        _ => field.to_owned(),
    }
}

/// Returns a sentence of an error whose words of v1alpha1 are those of v1alpha2.
pub fn sentence(text: &str) -> String {
    text.split(' ').map(name).collect::<Vec<_>>().join(" ")
}

fn take_unknown(
    value: &mut Value,
    field: &str,
    instead: &'static str,
    unknown: &mut Vec<(String, &'static str)>,
) {
    if !MOVED.iter().any(|(name, _)| *name == field) && take(value, field).is_some() {
        unknown.push((field.to_owned(), instead));
    }
}

fn texts(value: Option<Value>, field: &str) -> Result<Vec<String>, Wrong> {
    let items = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(wrong(field, "must be a list of texts")),
    };
    let text = |item: Value| match item {
        Value::String(text) => Ok(text),
        _ => Err(wrong(field, "must be a list of texts")),
    };
    items.into_iter().map(text).collect()
}

fn wrong(field: &str, why: &str) -> Wrong {
    (field.to_owned(), why.to_owned())
}

fn take(value: &mut Value, path: &str) -> Option<Value> {
    let (parents, name) = path
        .rsplit_once('.')
        .map_or((None, path), |(parents, name)| (Some(parents), name));
    let steps = parents.into_iter().flat_map(|parents| parents.split('.'));
    let parent = steps
        .into_iter()
        .try_fold(value, |value, step| value.get_mut(step))?;
    parent.as_object_mut()?.remove(name)
}

/// Sets a field, and makes the objects above it. A value that is no object stays, and is wrong in
/// its own name.
fn set(value: &mut Value, path: &str, new: Value) {
    let (first, rest) = path
        .split_once('.')
        .map_or((path, None), |(first, rest)| (first, Some(rest)));
    let Value::Object(fields) = value else { return };
    match rest {
        None => drop(fields.insert(first.to_owned(), new)),
        Some(rest) => set(
            fields
                .entry(first)
                .or_insert_with(|| Value::Object(Map::new())),
            rest,
            new,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(value: Value) -> Converted {
        convert(value).unwrap()
    }

    #[test]
    fn fields_move_to_their_places() {
        let got = converted(json!({
            "mode": "nftables",
            "syncPeriod": "40s",
            "linux": {"conntrack": {"min": 7}, "masqueradeAll": true, "oomScoreAdj": 3},
            "windows": {"runAsService": true},
            "detectLocal": {"clusterCIDRs": ["10.0.0.0/8", "fd00::/8"], "bridgeInterface": "br0"},
            "nodeIPOverride": ["192.0.2.1", "2001:db8::1"],
            "ipFamilyPolicy": "RequireDualStack",
            "ipvs": {"masqueradeBit": 3},
        }));
        let want = json!({
            "mode": "nftables",
            "iptables": {"syncPeriod": "40s", "masqueradeAll": true, "localhostNodePorts": false},
            "nftables": {"syncPeriod": "40s", "masqueradeAll": true},
            "ipvs": {"syncPeriod": "40s"},
            "conntrack": {"min": 7},
            "oomScoreAdj": 3,
            "windowsRunAsService": true,
            "detectLocal": {"bridgeInterface": "br0"},
            "clusterCIDR": "10.0.0.0/8,fd00::/8",
            "bindAddress": "192.0.2.1",
            "bindAddressHardFail": true,
        });
        assert_eq!(got.value, want);
        assert_eq!((got.unknown, got.hard_fail), (vec![], true));
        assert_eq!(got.node_ips, ["192.0.2.1", "2001:db8::1"]);
    }

    #[test]
    fn given_values_go_before_defaults() {
        let given = json!({"iptables": {"localhostNodePorts": true}, "bindAddressHardFail": false});
        assert_eq!(converted(given.clone()).value, given);
        converted(json!({"mode": "ipvs", "ipvs": {"masqueradeBit": 31}}));
    }

    #[test]
    fn fields_of_v1alpha1_are_unknown_with_their_new_places() {
        for (value, field, instead) in [
            (
                json!({"conntrack": {"min": 1}}),
                "conntrack",
                "linux.conntrack",
            ),
            (
                json!({"oomScoreAdj": 1}),
                "oomScoreAdj",
                "linux.oomScoreAdj",
            ),
            (
                json!({"iptables": {"syncPeriod": "1s"}}),
                "iptables.syncPeriod",
                "syncPeriod",
            ),
            (
                json!({"ipvs": {"minSyncPeriod": "1s"}}),
                "ipvs.minSyncPeriod",
                "minSyncPeriod",
            ),
            (
                json!({"nftables": {"masqueradeAll": true}}),
                "nftables.masqueradeAll",
                "linux.masqueradeAll",
            ),
            (
                json!({"bindAddress": "::"}),
                "bindAddress",
                "nodeIPOverride",
            ),
            (
                json!({"clusterCIDR": ""}),
                "clusterCIDR",
                "detectLocal.clusterCIDRs",
            ),
            (json!({"portRange": ""}), "portRange", ""),
            (json!({"linux": {"future": 1}}), "linux.future", ""),
        ] {
            assert_eq!(converted(value).unknown, [(field.to_owned(), instead)]);
        }
    }

    #[test]
    fn wrong_types_are_named() {
        for (value, field) in [
            (json!({"configHardFail": "yes"}), "configHardFail"),
            (json!({"nodeIPOverride": "192.0.2.1"}), "nodeIPOverride"),
            (
                json!({"detectLocal": {"clusterCIDRs": [1]}}),
                "detectLocal.clusterCIDRs",
            ),
            (json!({"ipFamilyPolicy": "Both"}), "ipFamilyPolicy"),
            (
                json!({"nodeIPOverride": ["192.0.2.1", "zz"]}),
                "nodeIPOverride[1]",
            ),
            (json!({"linux": 5}), "linux"),
            (json!({"windows": ["runAsService"]}), "windows"),
            (
                json!({"ipvs": {"masqueradeBit": "abc"}}),
                "ipvs.masqueradeBit",
            ),
            (
                json!({"mode": "ipvs", "ipvs": {"masqueradeBit": 32}}),
                "ipvs.masqueradeBit",
            ),
        ] {
            assert_eq!(convert(value).unwrap_err().0, field);
        }
        assert!(!converted(json!({"configHardFail": false})).hard_fail);
    }

    #[test]
    fn errors_name_fields_as_the_file_has_them() {
        for (field, want) in [
            ("conntrack.min", "linux.conntrack.min"),
            ("iptables.syncPeriod", "syncPeriod"),
            ("clusterCIDR", "detectLocal.clusterCIDRs"),
            ("nodePortAddresses[1]", "nodePortAddresses[1]"),
            ("iptables.masqueradeBit", "iptables.masqueradeBit"),
            ("bindAddressHardFail", "bindAddressHardFail"),
        ] {
            assert_eq!(name(field), want);
        }
        let said = "must be greater than or equal to ipvs.minSyncPeriod";
        assert_eq!(
            sentence(said),
            "must be greater than or equal to minSyncPeriod"
        );
    }
}
