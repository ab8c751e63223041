//! Tests of the choice on made-up counters.

use proxy_common::addr::Proto;

use super::*;

/// The readings of `other` and of Services: name, port, opened flows, rejected packets.
type Row = (String, String, u64, u64);

/// An agent's choice, and its last sample.
struct Agent(Chosen, Option<Traffic>);

impl Agent {
    fn of(limit: usize) -> Self {
        Self(Chosen::of(limit), None)
    }

    /// Takes the counters of Services: name, opened flows, rejected packets.
    fn take(&mut self, services: &[(&str, u64, u64)]) -> Vec<Row> {
        self.take_ports(
            services
                .iter()
                .map(|&(name, opened, rejected)| port(name, 80, opened, rejected))
                .collect(),
        )
    }

    fn take_ports(&mut self, ports: Vec<PortSums>) -> Vec<Row> {
        let now = Traffic::of(&ports);
        self.0.take(ports, self.1.as_ref(), &now);
        self.1 = Some(now);
        let row = |reading: ServiceReading| {
            (
                reading.service,
                reading.port,
                reading.connections,
                reading.refused,
            )
        };
        self.0.readings().into_iter().map(row).collect()
    }
}

fn port(service: &str, port: u16, flows_opened: u64, rejected: u64) -> PortSums {
    PortSums {
        service: ObjectName {
            namespace: "shop".into(),
            name: service.into(),
        },
        port,
        proto: Proto::TCP,
        counts: PortCounts {
            flows_opened,
            rejected,
            ..PortCounts::default()
        },
        connects: Connects::NOTHING,
        udp: proxy_core::udp::UdpOutcomes::default(),
    }
}

fn row(service: &str, opened: u64, refused: u64) -> Row {
    (service.to_owned(), "80/TCP".to_owned(), opened, refused)
}

fn other(opened: u64, refused: u64) -> Row {
    ("other".to_owned(), String::new(), opened, refused)
}

#[test]
fn services_beyond_limit_are_summed_and_no_counter_decreases() {
    let mut agent = Agent::of(1);
    let web = |opened| row("web", opened, 0);
    assert_eq!(
        agent.take(&[("idle", 0, 0), ("web", 5, 0)]),
        [web(5), other(0, 0)],
        "a place is for traffic"
    );
    assert_eq!(
        agent.take(&[("api", 9, 1), ("web", 7, 0)]),
        [web(7), other(9, 1)]
    );
    assert_eq!(
        agent.take(&[("api", 12, 1), ("db", 1, 0), ("web", 7, 0)]),
        [web(7), other(13, 1)]
    );
    let api = row("api", 13, 1);
    assert_eq!(
        agent.take(&[("api", 13, 1), ("db", 1, 0)]),
        [api, other(13, 1)],
        "its place is free"
    );
    assert_eq!(Chosen::of(0).readings(), []);
}

#[test]
fn new_agent_sums_from_zero() {
    let mut first = Agent::of(1);
    let mut second = Agent::of(1);
    first.take(&[("api", 10, 0)]);
    assert_eq!(
        first.take(&[("api", 10, 0), ("db", 60, 0), ("web", 50, 0)])[1],
        other(110, 0)
    );
    // The counters stay in the kernel; `db` and its counts are gone.
    let after = [("api", 10, 0), ("web", 50, 0)];
    assert_eq!(
        second.take(&after),
        [row("api", 10, 0), other(0, 0)],
        "50 would be a reset with a jump"
    );
    assert_eq!(
        second.take(&[("api", 10, 0), ("web", 53, 2)])[1],
        other(3, 2)
    );
}

#[test]
fn limit_is_one_of_ports() {
    let mut agent = Agent::of(3);
    let ports =
        |service: &'static str, number: u16| (1..=number).map(move |at| port(service, at, 1, 0));
    let names = |rows: Vec<Row>| {
        rows.into_iter()
            .map(|(service, ..)| service)
            .collect::<Vec<_>>()
    };
    let mut take = |wide: u16, web: u16| {
        let rows = names(agent.take_ports(ports("wide", wide).chain(ports("web", web)).collect()));
        assert!(
            rows.iter().filter(|service| *service != "other").count() <= 3,
            "{rows:?}"
        );
        rows
    };
    assert_eq!(
        take(2_000, 1),
        ["web", "other"],
        "so many ports find no room"
    );
    assert_eq!(
        take(2, 1),
        ["wide", "wide", "web", "other"],
        "the sum of others stays"
    );
    assert_eq!(
        take(3, 1),
        ["web", "other"],
        "who grows takes no place from another"
    );
    assert_eq!(
        take(2, 2),
        ["web", "web", "other"],
        "a port is left, and two are asked for"
    );
    assert_eq!(take(1, 2), ["wide", "web", "web", "other"]);
    assert_eq!(
        take(2, 1),
        ["wide", "wide", "web", "other"],
        "one gives the port that another takes"
    );
}
