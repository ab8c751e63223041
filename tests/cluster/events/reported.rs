//! Events: their kinds, their objects, their rate.

use std::net::{TcpListener, UdpSocket};

use anyhow::{Context, Result, ensure};
use proxy_view::status::Status;
use serde_json::{Value, json};
use testbed::agent::{DEADLINE, wait_until};
use testbed::http::HEALTH;
use testbed::netns::NetNs;

use crate::events::fixture::{Fixture, fails, service, slice, wait_problem};

#[test]
fn an_event_of_the_node_reports_the_start() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let kpx = fixture.start_healthy("")?;
    let event = fixture.reported("Starting", |_| true)?;
    let want = json!({
        "type": "Normal",
        "action": "StartKubeProxy",
        "note": null,
        "regarding": { "kind": "Node", "name": "n1", "uid": "n1" },
        "reportingController": "kube-proxy",
        "reportingInstance": "n1",
        "series": null,
    });
    let reported: Value = want
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, _)| (key.clone(), event[key].clone()))
        .collect();
    assert_eq!(reported, want);
    assert_eq!(event["metadata"]["namespace"], "default");
    kpx.stop()?;
    assert_eq!(
        fixture.events().len(),
        1,
        "nothing else is reported of a node on which all is well"
    );
    Ok(())
}

#[test]
fn an_event_of_the_service_reports_a_taken_health_check_port() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let _taken = fixture.ns.run(|| TcpListener::bind(("0.0.0.0", 32100)))?;
    let mut web = service("web", 10);
    web["spec"]["type"] = "LoadBalancer".into();
    web["spec"]["externalTrafficPolicy"] = "Local".into();
    web["spec"]["healthCheckNodePort"] = 32100.into();
    fixture.put(&web)?;
    let kpx = fixture.start("")?;
    let event = fixture.reported("FailedToStartServiceHealthcheck", |_| true)?;
    let regarding =
        json!({ "kind": "Service", "namespace": "default", "name": "web", "uid": "default/web" });
    assert_eq!(event["regarding"], regarding);
    assert_eq!(
        (&event["type"], &event["action"]),
        (&json!("Warning"), &json!("Listen"))
    );
    let note = event["note"].as_str().unwrap_or_default();
    for part in ["n1", "default/web", "32100", "Address already in use"] {
        ensure!(note.contains(part), "{note:?} does not say {part:?}");
    }
    kpx.stop()
}

#[test]
fn an_event_of_the_node_reports_a_required_server_that_fails() -> Result<()> {
    let cases = [
        (10256, "FailedToStartProxierHealthcheck"),
        (10249, "FailedToStartMetricServer"),
    ];
    for (port, reason) in cases {
        let fixture = Fixture::with_node()?;
        let _taken = fixture.ns.run(|| TcpListener::bind(("127.0.0.1", port)))?;
        let addresses =
            "--healthz-bind-address 127.0.0.1:10256 --metrics-bind-address 127.0.0.1:10249";
        fails(
            fixture.spawn(&format!("--bind-address-hard-fail {addresses}"))?,
            "Address already in use",
        )?;
        let event = fixture.reported(reason, |_| true)?;
        assert_eq!(
            (&event["type"], &event["action"]),
            (&json!("Warning"), &json!("StartKubeProxy"))
        );
        assert_eq!(event["regarding"]["uid"], "n1");
    }
    Ok(())
}

#[test]
fn events_name_conflicting_and_invalid_services_by_uid() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let shares = |name, nth| {
        let mut shares = service(name, nth);
        shares["spec"]["externalIPs"] = json!(["198.51.100.7"]);
        shares
    };
    let kpx = fixture.start_healthy("")?;
    fixture.put(&shares("a", 10))?;
    kpx.wait(DEADLINE, "the first is served", |status| {
        status.tables["IPv4"].service_ports == 1
    })?;
    let loser = fixture.put(&shares("b", 11))?;
    let event = fixture.reported("FrontendConflict", |_| true)?;
    assert_eq!(event["type"], "Warning");
    assert_eq!(
        event["regarding"]["uid"], loser["metadata"]["uid"],
        "{event:#}"
    );
    assert_eq!(event["regarding"]["name"], "b");
    assert_eq!(
        event["note"],
        "spec.externalIPs[0]: 198.51.100.7:53/udp is held by Service default/a"
    );

    let mut broken = slice("a", "192.0.2.2");
    broken["ports"][0]["port"] = 0.into();
    let broken = fixture.put(&broken)?;
    let event = fixture.reported("InvalidField", |_| true)?;
    assert_eq!(
        event["regarding"]["uid"], broken["metadata"]["uid"],
        "{event:#}"
    );
    assert_eq!(event["regarding"]["kind"], "EndpointSlice");
    kpx.stop()
}

/// A Service with more ports than the tables have room for, and a Service of another namespace.
#[test]
fn greedy_namespace_leaves_room_and_node_healthy() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let kpx = fixture.start_healthy("--service-table-size 1000")?;
    let mut greedy = service("greedy", 10);
    greedy["metadata"]["namespace"] = "tenant".into();
    let port = |port| json!({ "name": format!("p{port}"), "port": port, "protocol": "UDP" });
    greedy["spec"]["ports"] = (1..=1_200).map(port).collect();
    let greedy = fixture.put(&greedy)?;
    let is_full =
        |ports: usize| move |status: &Status| status.tables["IPv4"].service_ports == ports;
    // The frontend of the address itself also takes an entry, and one of 16 stays free.
    kpx.wait(DEADLINE, "the table is full", is_full(937))?;
    let event = fixture.reported("ShareExceeded", |_| true)?;
    assert_eq!(
        event["regarding"]["uid"], greedy["metadata"]["uid"],
        "{event:#}"
    );
    let note = event["note"].as_str().context("a note")?;
    ensure!(
        note.starts_with(
            "spec.ports: 263 of 1200 ports are not served: the Services of namespace tenant"
        ),
        "{note}"
    );

    fixture.put(&service("web", 11))?;
    // The first Service gets two entries of the second.
    kpx.wait(DEADLINE, "both are served", |status| {
        status.tables["IPv4"].services == 2 && is_full(936)(status)
    })?;
    let status = kpx.typed_status()?;
    ensure!(
        status.problems.is_empty() && status.skipped.len() == 2,
        "{status:?}"
    );
    assert_eq!(fixture.get(HEALTH, "/healthz")?.code, 200);
    kpx.stop()
}

#[test]
fn a_repeated_event_is_counted() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let kpx = fixture.start_healthy("")?;
    let broken = |ip: &str| {
        let mut broken = service("web", 10);
        broken["spec"]["externalIPs"] = json!([ip]);
        broken
    };
    for count in 1..=3 {
        fixture.put(&broken("nonsense"))?;
        let is_count = |event: &Value| event["series"]["count"].as_i64().unwrap_or(1) == count;
        fixture
            .reported("InvalidField", is_count)
            .with_context(|| format!("for the {count}. time"))?;
        fixture.put(&broken("198.51.100.7"))?;
        kpx.wait(DEADLINE, "it is well again", |status| {
            status.skipped.is_empty()
        })?;
    }
    let reported = fixture
        .events()
        .into_iter()
        .filter(|event| event["reason"] == "InvalidField")
        .count();
    assert_eq!(reported, 1);
    kpx.stop()
}

#[test]
fn a_server_that_takes_no_events_costs_a_line_of_the_log() -> Result<()> {
    for code in [403, 404] {
        let fixture = Fixture::with_node()?;
        fixture.api.fail("create", "events", code);
        let kpx = fixture.start_healthy("")?;
        wait_until(DEADLINE, "one is refused", || {
            Ok(fixture.api.traffic().requests("create", "events") == 1)
        })?;
        let mut web = service("web", 10);
        web["spec"]["externalIPs"] = json!(["nonsense", "more of it"]);
        fixture.put(&web)?;
        wait_until(DEADLINE, "three are refused", || {
            Ok(fixture.api.traffic().requests("create", "events") == 3)
        })?;
        kpx.wait(DEADLINE, "kpx serves all the same", |status| {
            status.healthy && status.tables["IPv4"].service_ports == 1
        })?;

        fixture.api.heal();
        fixture.put(&service("other", 11))?;
        web["metadata"]["name"] = "third".into();
        web["spec"]["clusterIP"] = "10.96.0.12".into();
        web["spec"]["clusterIPs"] = json!(["10.96.0.12", "fd00:96::c"]);
        fixture.put(&web)?;
        fixture.reported("InvalidField", |event| {
            event["regarding"]["name"] == "third"
        })?;
        kpx.stop()?;
        let lines = fixture
            .log()
            .lines()
            .filter(|line| line.contains("refuses Events"))
            .count();
        assert_eq!(lines, 1, "{}", fixture.log());
    }
    Ok(())
}

/// Detection cannot classify a device with its own network: kpx serves its clients and reports the
/// device.
#[test]
fn an_undetected_pod_is_served_and_reported_once() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let mut object = testbed::watched_node::node(&["192.0.2.1", "fd00::1"]);
    object["spec"] = json!({ "podCIDR": "10.244.7.0/24", "podCIDRs": ["10.244.7.0/24"] });
    fixture.put(&object)?;
    fixture.put(&service("dns", 10))?;
    fixture.put(&slice("dns", "192.0.2.9"))?;
    let pod = NetNs::create(format!("{}-pod", fixture.ns.name()))?;
    fixture.ns.sysctl("ipv4/conf/all/forwarding", "1")?;
    fixture.ns.ip(&format!(
        "link add p0 type veth peer name eth0 netns {}
         link set p0 up
         addr add 10.9.0.1/24 dev p0
         route add 10.244.7.2/32 dev p0",
        pod.name()
    ))?;
    pod.ip("link set eth0 up
            addr add 10.244.7.2/32 dev eth0
            route add 10.9.0.1/32 dev eth0
            route add default via 10.9.0.1")?;
    let kpx = fixture.start_healthy("")?;
    kpx.wait(DEADLINE, "the Service is served", |status| {
        status.tables["IPv4"].backends == 1
    })?;
    let before = kpx.typed_status()?.events["flow_opened"];
    let ask = || {
        anyhow::Ok(
            UdpSocket::bind("0.0.0.0:0")?
                .send_to(b"?", "10.96.0.10:53")
                .map(drop)?,
        )
    };
    pod.run(ask)?;
    let event = fixture.reported("PodsTakenForOutside", |_| true)?;
    assert_eq!(
        (&event["type"], &event["regarding"]["name"]),
        (&json!("Warning"), &json!("n1"))
    );
    wait_problem(&kpx, "pods taken for outside clients", "--cluster-cidr")?;
    ensure!(
        kpx.typed_status()?.events["flow_opened"] > before,
        "the pod is not served"
    );
    ensure!(
        fixture.metrics()?.contains("event=\"pod_outside\"} 1\n"),
        "{}",
        fixture.metrics()?
    );
    pod.run(ask)?;
    kpx.wait(DEADLINE, "both have passed", |status| {
        status.events["pod_outside"] == 2
    })?;
    ensure!(
        fixture
            .events()
            .iter()
            .filter(|event| event["reason"] == "PodsTakenForOutside")
            .count()
            == 1
    );
    kpx.stop()
}
