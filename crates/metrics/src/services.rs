//! The opt-in series of Services. The agent bounds the number of ports, because each series costs
//! memory here and in Prometheus.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use proxy_common::connect::{BUCKETS, Connects, UNIT_NANOS, bound_units};
use proxy_core::udp::UdpOutcomes;

use super::readings::counters;

/// The counters of one port of a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceReading {
    pub namespace: String,
    pub service: String,
    /// The port's number and protocol, such as `80/TCP`. Empty for a sum of several ports.
    pub port: String,
    pub connections: u64,
    /// The packets of both directions.
    pub packets: u64,
    pub bytes: u64,
    /// The opening packets that were dropped or rejected.
    pub refused: u64,
    pub connects: Connects,
    /// The outcomes of UDP flows; `None` for a port of another protocol.
    pub udp: Option<UdpOutcomes>,
}

#[derive(Clone, Copy, Debug)]
struct ByOutcome<'a>(ByPort<'a>, &'static str);

impl EncodeLabelSet for ByOutcome<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.encode(encoder)?;
        [("outcome", self.1)].encode(encoder)
    }
}

#[derive(Clone, Copy, Debug)]
struct ByPort<'a>(&'a ServiceReading);

impl EncodeLabelSet for ByPort<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        let Self(ServiceReading {
            namespace,
            service,
            port,
            ..
        }) = self;
        [
            ("namespace", &**namespace),
            ("service", service),
            ("port", port),
        ]
        .encode(encoder)
    }
}

/// Encodes the series. Writes nothing if there are no readings.
pub(super) fn encode(
    services: &[ServiceReading],
    encoder: &mut DescriptorEncoder,
) -> Result<(), fmt::Error> {
    if services.is_empty() {
        return Ok(());
    }
    let mut count = |name: &str, help: &str, count: fn(&ServiceReading) -> u64| {
        counters(
            encoder,
            name,
            help,
            services
                .iter()
                .map(|service| (ByPort(service), count(service))),
        )
    };
    count(
        "kpx_service_connections",
        "Flows that clients opened to a Service.",
        |service| service.connections,
    )?;
    count(
        "kpx_service_packets",
        "Packets of a Service's flows, of both directions.",
        |service| service.packets,
    )?;
    count(
        "kpx_service_bytes",
        "Bytes of a Service's flows, of both directions.",
        |service| service.bytes,
    )?;
    let help = "Packets that would have opened a flow to a Service, and were dropped or rejected.";
    count("kpx_service_refused", help, |service| service.refused)?;
    let help = "TCP connections to a Service that the backend refused or did not answer, and UDP datagrams that it refused.";
    count("kpx_service_connect_failures", help, |service| {
        service.connects.failed()
    })?;
    let help = "SYNs to a Service that came again before the backend had answered.";
    count("kpx_service_connect_retransmits", help, |service| {
        service.connects.retransmitted
    })?;
    let help = "UDP flows to a Service that the backend answered, that ended unanswered, and datagrams that it refused.";
    let outcomes = services.iter().filter_map(|service| {
        let udp = service.udp?;
        let outcomes = [
            ("answered", udp.answered),
            ("unanswered", udp.unanswered),
            ("refused", udp.refused),
        ];
        Some(outcomes.map(|(outcome, count)| (ByOutcome(ByPort(service), outcome), count)))
    });
    counters(encoder, "kpx_service_udp_flows", help, outcomes.flatten())?;
    let help =
        "Time from the first SYN of a TCP connection to a Service until its backend answered.";
    let name = "kpx_service_connect_duration_seconds";
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for service in services {
        let buckets = buckets(&service.connects);
        let sum = secs(service.connects.units);
        let count = service.connects.answered();
        encoder
            .encode_family(&ByPort(service))?
            .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
    }
    Ok(())
}

/// Merges pairs of buckets, which halves the number of series. The last pair is unbounded.
fn buckets(connects: &Connects) -> Vec<(f64, u64)> {
    let pairs = connects.buckets.chunks(2).enumerate();
    let bound =
        |pair: usize| bound_units((2 * pair + 1).min(BUCKETS - 1)).map_or(f64::INFINITY, secs);
    pairs
        .map(|(pair, counts)| (bound(pair), counts.iter().sum()))
        .collect()
}

#[expect(clippy::cast_precision_loss, reason = "no more precise than a clock")]
fn secs(units: u64) -> f64 {
    units as f64 * UNIT_NANOS as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Metrics, Readings};

    #[test]
    fn series_are_told_only_where_asked_for() {
        let text = |services| {
            Metrics::new()
                .text(Some(Readings {
                    services,
                    ..Readings::default()
                }))
                .unwrap()
        };
        assert!(!text(vec![]).contains("kpx_service_"));
        let mut connects = Connects::NOTHING;
        (
            connects.buckets[1],
            connects.buckets[2],
            connects.buckets[17],
        ) = (3, 1, 1);
        (connects.units, connects.refused, connects.retransmitted) = (5_000_000, 2, 4);
        let namespace = "shop".to_owned();
        let service = "web".to_owned();
        let reading = ServiceReading {
            namespace,
            service,
            port: "80/TCP".to_owned(),
            connections: 7,
            packets: 60,
            bytes: 6_000,
            refused: 1,
            connects,
            udp: None,
        };
        let dns = ServiceReading {
            service: "dns".to_owned(),
            port: "53/UDP".to_owned(),
            udp: Some(UdpOutcomes {
                answered: 30,
                unanswered: 4,
                refused: 2,
            }),
            ..reading.clone()
        };
        let text = text(vec![reading, dns]);
        let labels = r#"namespace="shop",service="web",port="80/TCP""#;
        let udp = r#"namespace="shop",service="dns",port="53/UDP""#;
        assert_eq!(text.matches("kpx_service_udp_flows_total{").count(), 3);
        for line in [
            format!("kpx_service_connections_total{{{labels}}} 7"),
            format!("kpx_service_packets_total{{{labels}}} 60"),
            format!("kpx_service_bytes_total{{{labels}}} 6000"),
            format!("kpx_service_refused_total{{{labels}}} 1"),
            format!("kpx_service_connect_failures_total{{{labels}}} 2"),
            format!("kpx_service_connect_retransmits_total{{{labels}}} 4"),
            format!("kpx_service_udp_flows_total{{{udp},outcome=\"answered\"}} 30"),
            format!("kpx_service_udp_flows_total{{{udp},outcome=\"unanswered\"}} 4"),
            format!("kpx_service_udp_flows_total{{{udp},outcome=\"refused\"}} 2"),
            format!("kpx_service_connect_duration_seconds_sum{{{labels}}} 5.12"),
            format!("kpx_service_connect_duration_seconds_count{{{labels}}} 5"),
            format!("kpx_service_connect_duration_seconds_bucket{{le=\"0.000131072\",{labels}}} 3"),
            format!("kpx_service_connect_duration_seconds_bucket{{le=\"0.000524288\",{labels}}} 4"),
            format!("kpx_service_connect_duration_seconds_bucket{{le=\"2.147483648\",{labels}}} 4"),
            format!("kpx_service_connect_duration_seconds_bucket{{le=\"+Inf\",{labels}}} 5"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
