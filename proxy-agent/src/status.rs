//! What `kpx status` shows.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::datapath::LoadedProgram;

/// The state of an agent and of the programs that it loaded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    pub version: String,
    pub node_name: String,
    pub node_addresses: Vec<IpAddr>,
    pub options: OptionsStatus,
    /// The maps hold what the objects last seen ask for, and every device carries its programs.
    pub healthy: bool,
    /// Every watch has delivered its first list.
    pub complete: bool,
    pub last_sync: Option<Timestamp>,
    /// Syncs that changed a map.
    pub syncs: u64,
    pub problems: Vec<ProblemStatus>,
    /// Objects, or parts of them, that could not be used.
    pub skipped: Vec<String>,
    /// Backends that are left out because this host, which is no node, does not reach them.
    #[serde(default)]
    pub unreachable: Vec<UnreachableStatus>,
    pub devices: Vec<DeviceStatus>,
    /// By family.
    pub tables: BTreeMap<String, TableStatus>,
    pub flows: BTreeMap<String, FlowStatus>,
    /// Packets translated, flows opened.
    pub events: BTreeMap<String, u64>,
    /// Packets not translated, by reason.
    pub reasons: BTreeMap<String, u64>,
    /// The kernel's ids of the datapath's maps, by name.
    pub maps: BTreeMap<String, u32>,
    /// The datapath's programs, by name.
    pub programs: BTreeMap<String, LoadedProgram>,
}

/// What the operator said, in the words of the flags.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OptionsStatus {
    /// `default` or `compat`.
    pub masquerade: String,
    pub masquerade_all: bool,
    /// How local pods are told from others: `none`, or a mode and what it goes by.
    pub local_pods: String,
    /// `all`, `primary`, or networks.
    pub node_port_addresses: String,
    pub cluster_ip_external: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProblemStatus {
    pub what: String,
    pub why: String,
    pub since: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnreachableStatus {
    /// `namespace/name`.
    pub service: String,
    /// Number and protocol: `80/TCP`.
    pub port: String,
    pub backend: SocketAddr,
    pub why: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    pub name: String,
    pub ifindex: u32,
    /// `tcx` or `clsact`.
    pub attached_by: String,
    /// `pod`, `device`, `loopback` or `anchor`.
    pub role: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableStatus {
    pub services: usize,
    pub service_ports: usize,
    pub frontends: usize,
    pub backends: usize,
}

/// As of the last sweep.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowStatus {
    pub flows: usize,
    pub entries: usize,
}

/// One screen for people.
pub fn render(status: &Status) -> Result<String> {
    let mut text = String::new();
    let health = match (status.healthy, status.complete) {
        (true, _) => "healthy",
        (false, true) => "unhealthy",
        (false, false) => "waiting for the first lists",
    };
    let addresses: Vec<_> = status.node_addresses.iter().map(IpAddr::to_string).collect();
    writeln!(text, "kpx {} on {}: {health}", status.version, status.node_name)?;
    writeln!(text, "addresses: {}", if addresses.is_empty() { "none".to_owned() } else { addresses.join(", ") })?;
    writeln!(text, "{}", options(&status.options))?;
    if let Some(last_sync) = status.last_sync {
        writeln!(text, "last sync: {last_sync:.3} ({} syncs)", status.syncs)?;
    }
    section(
        &mut text,
        "problems",
        status.problems.iter().map(|p| vec![p.what.clone(), p.why.clone(), format!("since {:.0}", p.since)]),
    )?;
    section(&mut text, "skipped", status.skipped.iter().map(|skipped| vec![skipped.clone()]))?;
    let unreachable = status.unreachable.iter();
    let unreachable =
        unreachable.map(|u| vec![u.service.clone(), u.port.clone(), u.backend.to_string(), u.why.clone()]);
    section(&mut text, "unreachable backends", unreachable)?;
    section(
        &mut text,
        "services",
        status.tables.iter().map(|(family, t)| {
            vec![
                family.clone(),
                format!("{} services", t.services),
                format!("{} ports", t.service_ports),
                format!("{} frontends", t.frontends),
                format!("{} backends", t.backends),
            ]
        }),
    )?;
    section(
        &mut text,
        "flows",
        status
            .flows
            .iter()
            .map(|(family, f)| vec![family.clone(), format!("{} flows", f.flows), format!("{} entries", f.entries)]),
    )?;
    section(
        &mut text,
        "devices",
        status
            .devices
            .iter()
            .map(|d| vec![d.name.clone(), d.ifindex.to_string(), d.role.clone(), d.attached_by.clone()]),
    )?;
    section(&mut text, "translated", counts(&status.events))?;
    section(&mut text, "not translated", counts(&status.reasons))?;
    Ok(text)
}

fn options(options: &OptionsStatus) -> String {
    let OptionsStatus { masquerade, local_pods, node_port_addresses, .. } = options;
    let mut text =
        format!("masquerade: {masquerade}; local pods by: {local_pods}; node ports at: {node_port_addresses}");
    for (is_set, what) in
        [(options.masquerade_all, "masquerade all"), (options.cluster_ip_external, "ClusterIPs for clients outside")]
    {
        if is_set {
            text = text + "; " + what;
        }
    }
    text
}

fn counts(counts: &BTreeMap<String, u64>) -> impl Iterator<Item = Vec<String>> {
    counts.iter().filter(|(_, count)| **count > 0).map(|(name, count)| vec![name.clone(), count.to_string()])
}

/// A heading and its rows; nothing if there are none.
fn section(text: &mut String, heading: &str, rows: impl Iterator<Item = Vec<String>>) -> Result<()> {
    let mut table = Table::new();
    table.load_preset(NOTHING).add_rows(rows);
    if !table.is_empty() {
        writeln!(text, "\n{heading}:")?;
        for line in table.lines() {
            writeln!(text, " {}", line.trim_end())?;
        }
    }
    Ok(())
}
