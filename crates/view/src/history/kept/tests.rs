//! Tests of the points at made-up times.

use std::collections::BTreeSet;

use proxy_common::addr::Proto;

use super::*;

fn name(name: &str) -> ObjectName {
    ObjectName {
        namespace: "shop".into(),
        name: name.into(),
    }
}

/// Connections of 0.2 ms each.
fn connects(number: u64) -> Connects {
    let mut connects = Connects::NOTHING;
    connects.buckets[2] = number;
    connects
}

/// The counters of Services: name, opened flows, packets, rejected packets.
fn ports(services: &[(&str, u64, u64, u64)]) -> Vec<PortSums> {
    let port = |&(service, flows_opened, packets, rejected): &(&str, u64, u64, u64)| PortSums {
        service: name(service),
        port: 80,
        proto: Proto::TCP,
        counts: PortCounts {
            flows_opened,
            packets,
            rejected,
            ..PortCounts::default()
        },
        connects: connects(flows_opened),
        udp: UdpOutcomes::default(),
    };
    services.iter().map(port).collect()
}

fn traffic(services: &[(&str, u64, u64, u64)]) -> Traffic {
    Traffic::of(&ports(services))
}

struct Clock(Instant, Kept);

impl Clock {
    fn new() -> Self {
        Self(Instant::now(), Kept::default())
    }

    fn take(&mut self, secs: u64, services: &[(&str, u64, u64, u64)]) {
        let time = Timestamp::UNIX_EPOCH + Duration::from_secs(secs);
        self.1
            .take(self.0 + Duration::from_secs(secs), time, traffic(services));
    }
}

#[test]
fn point_has_rates_of_its_own_step() {
    let mut clock = Clock::new();
    clock.take(0, &[("web", 100, 1_000, 0)]);
    assert_eq!(clock.1.view(None).end, None);
    clock.take(10, &[("web", 200, 1_500, 5), ("api", 10, 10, 0)]);
    clock.take(20, &[("web", 200, 1_500, 5), ("api", 20, 30, 0)]);
    let view = clock.1.view(None);
    assert_eq!(
        (view.points, view.end),
        (2, Some(Timestamp::UNIX_EPOCH + Duration::from_secs(20)))
    );
    assert_eq!(view.total.opened, [Some(11.0), Some(1.0)]);
    assert_eq!(view.total.rejected, [Some(0.5), Some(0.0)]);
    assert_eq!(
        (&view.total.connects, view.total.connect_p50[0]),
        (&view.total.opened, Some(0.000_197))
    );
    let [api, web] = view.services.try_into().unwrap();
    assert_eq!(
        (&*api.name, api.series.packets),
        ("api", vec![Some(1.0), Some(2.0)])
    );
    assert_eq!(
        (&*web.name, web.series.packets),
        ("web", vec![Some(50.0), Some(0.0)])
    );
    assert_eq!(
        web.series.connect_p99,
        [Some(0.000_261), None],
        "the second step has no connection"
    );
}

#[test]
fn missed_step_is_gap_and_new_service_starts_behind_gap() {
    let mut clock = Clock::new();
    clock.take(0, &[("web", 0, 1, 0)]);
    clock.take(31, &[("web", 0, 32, 0)]);
    clock.take(41, &[("web", 0, 42, 0), ("api", 1, 0, 0)]);
    let view = clock.1.view(Some("shop/api"));
    assert_eq!(view.total.packets, [None, None, Some(1.0), Some(1.0)]);
    let [api] = view.services.try_into().unwrap();
    assert_eq!(api.series.opened, [None, None, None, Some(0.1)]);
    assert_eq!(clock.1.view(Some("shop/none")).services, []);
}

#[test]
fn history_is_bounded_and_keeps_busiest() {
    let mut clock = Clock::new();
    clock.take(0, &[]);
    let names: Vec<_> = (0..=SERVICES).map(|nth| format!("s{nth:03}")).collect();
    let all = |packets: &dyn Fn(usize) -> u64| -> Vec<_> {
        names
            .iter()
            .enumerate()
            .map(|(nth, name)| (name.as_str(), 0, packets(nth), 0))
            .collect()
    };
    clock.take(10, &all(&|nth| 10 + nth as u64));
    let view = clock.1.view(None);
    assert_eq!((view.services.len(), view.left_out), (SERVICES, 1));
    assert!(
        view.services.iter().all(|service| service.name != "s000"),
        "the quietest one has gone"
    );
    for step in 2..200 {
        clock.take(
            step * 10,
            &all(&|nth| {
                if nth == 0 {
                    1_000 * step
                } else {
                    10 + nth as u64
                }
            }),
        );
    }
    assert!(
        clock
            .1
            .services
            .values()
            .map(|track| &track.all)
            .chain([&clock.1.total])
            .all(|track| track.0.capacity() == POINTS)
    );
    let view = clock.1.view(None);
    assert_eq!(
        (view.points, view.services.len(), view.left_out),
        (POINTS, 1, 0),
        "silent Services are forgotten"
    );
    assert_eq!(
        (
            &*view.services[0].name,
            view.services[0].series.packets.len()
        ),
        ("s000", POINTS)
    );
}

#[test]
fn busier_newcomers_take_places_of_quieter_services() {
    let mut clock = Clock::new();
    let names: Vec<_> = (0..4 * SERVICES).map(|nth| format!("s{nth:04}")).collect();
    // Each Service has its own number of packets, in an order other than that of the names.
    let packets = |nth: usize| 1 + (nth * 7_919 % names.len()) as u64;
    let first = |nth: usize| {
        if nth.is_multiple_of(4) {
            packets(nth)
        } else {
            0
        }
    };
    let all = |packets: &dyn Fn(usize) -> u64| -> Vec<_> {
        names
            .iter()
            .enumerate()
            .map(|(nth, name)| (name.as_str(), 0, packets(nth), 0))
            .collect()
    };
    clock.take(0, &all(&|_| 0));
    clock.take(10, &all(&first));
    clock.take(
        20,
        &all(&|nth| {
            if nth.is_multiple_of(4) {
                first(nth)
            } else {
                packets(nth)
            }
        }),
    );
    let mut busiest: Vec<_> = (0..names.len()).collect();
    busiest.sort_by_key(|nth| std::cmp::Reverse(packets(*nth)));
    let expected: BTreeSet<_> = busiest[..SERVICES]
        .iter()
        .map(|nth| names[*nth].clone())
        .collect();
    let view = clock.1.view(None);
    assert_eq!(
        view.services
            .into_iter()
            .map(|service| service.name)
            .collect::<BTreeSet<_>>(),
        expected
    );
    assert_eq!(view.left_out, 3 * SERVICES);
}

#[test]
fn failing_services_are_listed_without_points() {
    let mut clock = Clock::new();
    let names: Vec<_> = (0..SERVICES).map(|nth| format!("s{nth:03}")).collect();
    let all = |step: u64, rejected: u64| -> Vec<_> {
        let busy = names.iter().map(|name| (name.as_str(), 0, step * 1_000, 0));
        busy.chain([("zero", 0, 0, rejected)]).collect()
    };
    clock.take(0, &all(0, 0));
    clock.take(10, &all(1, 0));
    clock.take(20, &all(2, 5));
    assert_eq!(clock.1.view(Some("shop/zero")).services, []);
    let failures = Failures {
        unserved: 0.5,
        failed: 0.0,
    };
    assert_eq!(clock.1.failing(), &[(name("zero"), failures)].into());
    clock.take(30, &all(3, 5));
    assert_eq!(clock.1.failing(), &BTreeMap::new());
}

#[test]
fn namespace_with_many_failing_services_leaves_places_to_others() {
    let point = |dropped| Step {
        all: Point {
            dropped,
            ..Point::default()
        },
        ..Step::default()
    };
    let noisy = (0..2 * SERVICES).map(|nth| (name(&format!("s{nth:03}")), point(1_000.0)));
    let quiet = ObjectName {
        namespace: "quiet".into(),
        name: "web".into(),
    };
    let points = noisy.chain([(quiet.clone(), point(1.0))]).collect();
    let failing = failing(&points);
    assert_eq!(failing.len(), SERVICES);
    assert!(failing.contains_key(&quiet));
}

/// The counters of a UDP port: answered and unanswered flows.
fn udp(port: u16, answered: u64, unanswered: u64) -> PortSums {
    PortSums {
        service: name("udp"),
        port,
        proto: Proto::UDP,
        counts: PortCounts {
            flows_opened: answered + unanswered,
            ..PortCounts::default()
        },
        connects: Connects::NOTHING,
        udp: UdpOutcomes {
            answered,
            unanswered,
            refused: 0,
        },
    }
}

#[test]
fn unanswered_udp_fails_where_clients_expect_answers() {
    for (port, answered, failed) in [(514, 0, None), (53, 0, Some(0.5)), (8125, 10, Some(0.5))] {
        let (mut kept, at) = (Kept::default(), Instant::now());
        let time = Timestamp::UNIX_EPOCH;
        kept.take(at, time, Traffic::of(&[udp(port, 0, 1)]));
        let later = at + Duration::from_secs(10);
        kept.take(later, time, Traffic::of(&[udp(port, answered, 6)]));
        let found = kept.failing().get(&name("udp")).map(|fails| fails.failed);
        assert_eq!(found, failed, "port {port}");
        let total = kept.view(None).total;
        assert_eq!(total.udp_unanswered, [Some(0.5)], "port {port}");
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let rate = answered as f64 / 10.0;
        assert_eq!(total.udp_answered, [Some(rate)], "port {port}");
    }
}

#[test]
fn each_udp_port_is_judged_and_shown_by_itself() {
    let (mut kept, at) = (Kept::default(), Instant::now());
    let time = Timestamp::UNIX_EPOCH;
    let of = |dns, syslog| Traffic::of(&[udp(53, dns, dns), udp(514, 0, syslog)]);
    kept.take(at, time, of(0, 1));
    kept.take(at + STEP, time, of(10, 101));
    kept.take(at + 2 * STEP, time, of(30, 201));
    let view = kept.view(None);
    assert_eq!(view.total.failed, [Some(1.0), Some(2.0)], "of DNS alone");
    assert_eq!(view.total.udp_unanswered, [Some(11.0), Some(12.0)]);
    let [service] = view.services.try_into().unwrap();
    assert_eq!(service.series.failed, view.total.failed);
    let ports = [(53, 1.5, 1.5), (514, 0.0, 10.0)];
    let ports = ports.map(|(port, answered, unanswered)| UdpPortView {
        port,
        answered,
        unanswered,
    });
    assert_eq!(service.udp_ports, ports);
    // An idle step, and a step without the second port.
    kept.take(at + 3 * STEP, time, of(30, 201));
    kept.take(at + 4 * STEP, time, Traffic::of(&[udp(53, 31, 30)]));
    let [service] = kept.view(None).services.try_into().unwrap();
    assert_eq!(service.udp_ports.len(), 2);
}

#[test]
fn a_udp_port_has_points_of_its_own_if_it_is_the_only_one() {
    let (mut kept, at) = (Kept::default(), Instant::now());
    let time = Timestamp::UNIX_EPOCH;
    kept.take(at, time, Traffic::of(&[udp(53, 1, 0)]));
    kept.take(at + STEP, time, Traffic::of(&[udp(53, 2, 0)]));
    let [service] = kept.view(None).services.try_into().unwrap();
    let [port] = &service.udp_ports[..] else {
        panic!("{:?}", service.udp_ports);
    };
    assert_eq!(port.port, 53);
}
