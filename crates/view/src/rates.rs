//! Computes rates from two readings of an agent's counters, and formats them as table cells.
//!
//! A counter that decreased, because the agent restarted, yields a rate of 0.

use crate::{ConnectView, PortCounts, ServiceView, UdpOutcomes, latency};

/// The counts of a Service, on one node or summed over several.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    pub counts: PortCounts,
    pub connect: ConnectView,
    pub udp: UdpOutcomes,
}

/// Rates per second. `flows` is the current number of flows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub opened: f64,
    /// The packets of both directions.
    pub packets: f64,
    pub bytes: f64,
    pub dropped: f64,
    pub rejected: f64,
    pub flows: u64,
    /// The TCP connections that backends answered, refused or left unanswered.
    pub connect: ConnectRates,
}

/// The TCP connections between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ConnectRates {
    /// The answered connections per second.
    pub per_sec: f64,
    /// The median connect time in seconds; `None` if no connection was answered.
    pub p50: Option<f64>,
    /// The 99th percentile of the connect times, in seconds.
    pub p99: Option<f64>,
    /// The connections per second that a backend refused.
    pub refused: f64,
    /// The connections and UDP flows per second that expired unanswered.
    pub unanswered: f64,
}

impl Reading {
    /// Sums the ports of a Service.
    pub fn of(service: &ServiceView) -> Self {
        service.ports.iter().fold(Self::default(), |sum, port| {
            sum.plus(&Self {
                counts: port.counts,
                connect: port.connect.clone(),
                udp: port.udp.unwrap_or_default(),
            })
        })
    }

    #[must_use]
    pub fn plus(mut self, other: &Self) -> Self {
        self.counts.add(&other.counts);
        self.connect = self.connect.plus(&other.connect);
        self.udp = self.udp.plus(other.udp);
        self
    }

    /// Returns the counts since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            counts: self.counts.since(&before.counts),
            connect: self.connect.since(&before.connect),
            udp: self.udp.since(before.udp),
        }
    }
}

impl Rates {
    /// Returns the rates of counts over `secs` seconds.
    pub fn of(change: &Reading, secs: f64) -> Self {
        Self {
            connect: ConnectRates::of(&change.connect, change.udp, secs),
            ..Self::of_counts(&change.counts, secs)
        }
    }

    /// Returns the rates, except those of connections.
    pub fn of_counts(change: &PortCounts, secs: f64) -> Self {
        let both = |sent: u64, returned: u64| per_second(sent.saturating_add(returned), secs);
        Self {
            opened: per_second(change.flows_opened, secs),
            packets: both(change.packets, change.packets_returned),
            bytes: both(change.bytes, change.bytes_returned),
            dropped: per_second(change.dropped, secs),
            rejected: per_second(change.rejected, secs),
            flows: change.flows,
            connect: ConnectRates::default(),
        }
    }

    /// Returns the packets per second that would have opened a flow, and were dropped or rejected.
    pub fn unserved(&self) -> f64 {
        self.dropped + self.rejected
    }
}

impl ConnectRates {
    /// Returns the rates of counts over `secs` seconds.
    pub fn of(change: &ConnectView, udp: UdpOutcomes, secs: f64) -> Self {
        Self {
            per_sec: per_second(change.connects, secs),
            p50: change.connect_p50,
            p99: change.connect_p99,
            refused: per_second(change.refused, secs),
            unanswered: per_second(change.unanswered.saturating_add(udp.unanswered), secs),
        }
    }
}

/// Returns the rate; 0 if no time has passed.
#[expect(clippy::cast_precision_loss, reason = "less than 2^53 in any interval")]
pub fn per_second(count: u64, secs: f64) -> f64 {
    if secs > 0.0 { count as f64 / secs } else { 0.0 }
}

/// The columns of a table of rates, after the columns that identify a row.
pub const COLUMNS: [&str; 9] = [
    "OPENED/S",
    "PACKETS/S",
    "BYTES/S",
    "UNSERVED/S",
    "CONN-P50",
    "CONN-P99",
    "REFUSED/S",
    "SILENT/S",
    "FLOWS",
];

/// The traffic columns only, which fit a terminal next to the names of a node and a Service.
pub const TRAFFIC_COLUMNS: [&str; 5] = ["OPENED/S", "PACKETS/S", "BYTES/S", "UNSERVED/S", "FLOWS"];

/// Formats the cells of [`TRAFFIC_COLUMNS`].
pub fn traffic_cells(rates: &Rates) -> [String; 5] {
    [
        number(rates.opened),
        number(rates.packets),
        number(rates.bytes),
        number(rates.unserved()),
        rates.flows.to_string(),
    ]
}

/// Formats the cells of [`COLUMNS`].
pub fn cells(rates: &Rates) -> [String; 9] {
    let [opened, packets, bytes, unserved, flows] = traffic_cells(rates);
    let [p50, p99, refused, silent] = connect_cells(&rates.connect);
    [
        opened, packets, bytes, unserved, p50, p99, refused, silent, flows,
    ]
}

/// Formats both connect times, and the rates of refused and unanswered connections.
pub fn connect_cells(connect: &ConnectRates) -> [String; 4] {
    [
        latency(connect.p50),
        latency(connect.p99),
        number(connect.refused),
        number(connect.unanswered),
    ]
}

/// Formats a number in at most four characters, with an SI suffix.
pub fn number(value: f64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "G", "T"];
    let mut value = value;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if value == 0.0 {
        "0".to_owned()
    } else if value < 9.95 {
        format!("{value:.1}{}", UNITS[unit])
    } else {
        format!("{value:.0}{}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let numbers = [0.0, 0.04, 1.5, 9.96, 999.4, 999.6, 12_345.0, 1.5e9].map(number);
        assert_eq!(
            numbers,
            ["0", "0.0", "1.5", "10", "999", "1.0k", "12k", "1.5G"]
        );
    }

    #[test]
    fn counts_of_a_node_that_lies_end_no_command() {
        let most = PortCounts {
            flows_opened: u64::MAX,
            flows: u64::MAX,
            open_flows: u64::MAX,
            packets: u64::MAX,
            bytes: u64::MAX,
            packets_returned: u64::MAX,
            bytes_returned: u64::MAX,
            dropped: u64::MAX,
            rejected: u64::MAX,
            refused: u64::MAX,
        };
        let reading = Reading {
            counts: most,
            ..Reading::default()
        };
        let sum = reading.clone().plus(&reading);
        assert_eq!(sum, reading);
        assert_eq!(number(Rates::of(&sum, 1.0).packets), "18446744T");
    }
}
