//! The values read for each scrape: the programs' counters, and the fill of tables.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use proxy_common::counter::{Event, Reason};

use super::services::{self, ServiceReading};
use proxy_core::ip_family::IpFamily;
use serde::{Deserialize, Serialize};

/// The agent's readings. They are cheap: none iterates over a map.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    pub events: Vec<(Event, u64)>,
    pub reasons: Vec<(Reason, u64)>,
    pub programs: BTreeMap<String, ProgramReading>,
    pub maps: BTreeMap<String, MapFill>,
    /// The flows in the tables, as of the last sweep.
    pub flows: BTreeMap<IpFamily, u64>,
    /// The number of devices by role.
    pub devices: BTreeMap<&'static str, u64>,
    pub problems: u64,
    /// Set if Services stop working while no agent runs.
    pub restart_gap: bool,
    /// Host mode: the number of Services whose backends are all unreachable, and of those with
    /// some.
    pub out_of_reach: [u64; 2],
    /// The number of service ports under a `Local` policy with endpoints on other nodes only:
    /// internal policy, external policy.
    pub no_local_endpoints: BTreeMap<IpFamily, [u64; 2]>,
    /// The number of unresponsive backends: those that still take new connections, and ejected
    /// backends.
    pub silent_backends: [u64; 2],
    /// The series that the operator requested, as of the last sample.
    pub services: Vec<ServiceReading>,
}

/// The kernel's statistics of a program, for the time in which statistics were enabled.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProgramReading {
    pub run_time: Duration,
    pub runs: u64,
}

impl Collector for Readings {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        self.encode_packets(&mut encoder)?;
        self.encode_programs(&mut encoder)?;
        self.encode_maps(&mut encoder)?;
        services::encode(&self.services, &mut encoder)?;
        let flows = self
            .flows
            .iter()
            .map(|(family, flows)| ([("ip_family", family.name())], *flows));
        gauges(
            &mut encoder,
            "kpx_flows",
            "Flows in the flow tables, as of the last sweep.",
            flows,
        )?;
        let devices = self
            .devices
            .iter()
            .map(|(role, devices)| ([("role", *role)], *devices));
        gauges(
            &mut encoder,
            "kpx_devices",
            "Network devices that carry the programs, by role.",
            devices,
        )?;
        let problems = ConstGauge::new(self.problems);
        let help = "Problems of the agent, which kpx status lists.";
        problems.encode(encoder.encode_descriptor(
            "kpx_problems",
            help,
            None,
            MetricType::Gauge,
        )?)?;
        let gap = ConstGauge::new(u64::from(self.restart_gap));
        let help = "1 if Services stop while the agent is away, 0 if pins or filters keep programs and maps.";
        gap.encode(encoder.encode_descriptor("kpx_restart_gap", help, None, MetricType::Gauge)?)?;
        let [all, some] = self.out_of_reach;
        let help = "Services with backends that this host does not reach, in host mode: all of them, or some.";
        let reach = [("all", all), ("some", some)]
            .map(|(backends, services)| ([("backends", backends)], services));
        gauges(&mut encoder, "kpx_services_out_of_reach", help, reach)?;
        let [serving, ejected] = self.silent_backends;
        // `set_aside` is the previous release's name of `ejected`.
        let states = [
            ("serving", serving),
            ("ejected", ejected),
            ("set_aside", ejected),
        ];
        let silent = states.map(|(state, number)| ([("state", state)], number));
        let help = "Backends that have given this node no answer of late: in use, or ejected.";
        gauges(&mut encoder, "kpx_silent_backends", help, silent)?;
        let counts = self
            .no_local_endpoints
            .iter()
            .flat_map(|(family, [internal, external])| {
                let labels = |policy| [("ip_family", family.name()), ("traffic_policy", policy)];
                [
                    (labels("internal"), *internal),
                    (labels("external"), *external),
                ]
            });
        let help =
            "Service ports that allow only local endpoints, have some elsewhere and none here.";
        gauges(
            &mut encoder,
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            help,
            counts,
        )
    }
}

impl Readings {
    fn encode_packets(&self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let events = self.events.iter().flat_map(|(event, packets)| {
            let names = [Some(event.name()), old_event_name(event.name())];
            names
                .into_iter()
                .flatten()
                .map(|name| ([("event", name)], *packets))
        });
        counters(
            encoder,
            "kpx_packets",
            "Packets translated, and flows opened by packets.",
            events,
        )?;
        let reasons = self.reasons.iter().map(|(reason, packets)| {
            (
                [
                    ("reason", reason.name()),
                    ("verdict", reason.verdict().name()),
                ],
                *packets,
            )
        });
        let help = "Packets not translated, by reason and verdict of devices' hooks; at the anchor no packet passes.";
        counters(encoder, "kpx_untranslated_packets", help, reasons)
    }

    fn encode_programs(&self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let times = self.programs.iter();
        let times = times
            .map(|(name, program)| ([("program", name.as_str())], program.run_time.as_secs_f64()));
        let help = "Time spent in a program while the kernel counted it (--bpf-stats).";
        counters(encoder, "kpx_program_run_seconds", help, times)?;
        let runs = self
            .programs
            .iter()
            .map(|(name, program)| ([("program", name.as_str())], program.runs));
        let help = "Runs of a program while the kernel counted them (--bpf-stats).";
        counters(encoder, "kpx_program_runs", help, runs)
    }

    fn encode_maps(&self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let maps = self.maps.iter();
        let entries = maps.filter_map(|(name, map)| Some(([("map", name.as_str())], map.entries?)));
        gauges(
            encoder,
            "kpx_map_entries",
            "Entries of a map of the programs, where they are counted.",
            entries,
        )?;
        let max_entries = self
            .maps
            .iter()
            .map(|(name, map)| ([("map", name.as_str())], map.max_entries));
        gauges(
            encoder,
            "kpx_map_max_entries",
            "Entries for which a map of the programs has room.",
            max_entries,
        )
    }
}

pub(super) fn counters<L, V>(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (L, V)>,
) -> Result<(), fmt::Error>
where
    L: EncodeLabelSet,
    ConstCounter<V>: EncodeMetric,
{
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    values.into_iter().try_for_each(|(labels, value)| {
        ConstCounter::new(value).encode(encoder.encode_family(&labels)?)
    })
}

fn gauges<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (L, u64)>,
) -> Result<(), fmt::Error> {
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    values.into_iter().try_for_each(|(labels, value)| {
        ConstGauge::new(value).encode(encoder.encode_family(&labels)?)
    })
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapFill {
    /// The number of entries. `None` for maps that must be iterated to count them.
    pub entries: Option<u64>,
    pub max_entries: u64,
}

/// Returns a map's name in the previous release. Both names are exported for one release.
pub fn old_map_name(name: &str) -> Option<&'static str> {
    match name {
        "HALF_OPEN_RING4" => Some("NURSERY4"),
        "HALF_OPEN_RING6" => Some("NURSERY6"),
        _ => None,
    }
}

/// Returns an event's name in the previous release. Both names are exported for one release.
pub fn old_event_name(name: &str) -> Option<&'static str> {
    match name {
        "socket_translated" => Some("socket_led"),
        _ => None,
    }
}
