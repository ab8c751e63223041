use std::time::Duration;

use anyhow::{Context, Result};
use expect_test::expect;
use proxy_view::{BackendView, ConnectView};
use serde_json::{Value, json};

use super::super::{backends, data, screen};
use super::*;

const PLAIN: Form = Form {
    wide: false,
    headers: true,
    colours: false,
    width: None,
    one_line: false,
};

fn service(name: &str, counts: &Value) -> Value {
    let backend = json!({
        "address": "10.244.1.11:8080", "pod": null, "node": "n1", "zone": null, "ready": true, "serving": true,
        "terminating": false, "local": true, "inClusterSet": true, "inLocalSet": true, "flows": 1,
    });
    json!({
        "namespace": "shop", "name": name, "type": "ClusterIP", "created": null, "clusterIps": ["10.96.0.10"],
        "externalIps": [], "loadBalancerIps": [], "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Cluster",
        "affinitySecs": null, "healthCheckNodePort": null, "algorithm": "random",
        "ports": [{
            "name": "", "protocol": "TCP", "port": 80, "nodePort": null, "frontends": [], "backends": [backend],
            "counts": counts,
        }],
    })
}

fn counts(opened: u64, flows: u64, sent: (u64, u64), returned: (u64, u64), refused: u64) -> Value {
    json!({
        "flowsOpened": opened, "flows": flows, "packets": sent.0, "bytes": sent.1, "packetsReturned": returned.0,
        "bytesReturned": returned.1, "dropped": refused / 2, "rejected": refused - refused / 2,
        "refused": refused,
    })
}

fn sample(at: Instant, services: Vec<Value>, reasons: &Value) -> Result<Sample> {
    let status = json!({
        "version": "1.2.3", "started": "2026-01-02T03:04:05Z", "mode": "node", "nodeName": "n1", "nodeAddresses": [],
        "options": {
            "masquerade": "default", "masqueradeAll": false, "localPods": "none", "nodePortAddresses": "all",
            "clusterIpExternal": false,
        },
        "healthy": true, "complete": true, "lastSync": null, "syncs": 3, "problems": [], "skipped": [], "devices": [],
        "tables": {}, "flows": {}, "events": {}, "reasons": reasons, "maps": {}, "mapFill": {}, "programs": {},
    });
    let services = serde_json::from_value(Value::Array(services))?;
    Ok(Sample {
        at,
        status: serde_json::from_value(status)?,
        services,
        problem: None,
    })
}

/// Returns two samples, two seconds apart.
fn samples() -> Result<(Sample, Sample)> {
    let at = Instant::now();
    let before = vec![
        service("cart", &counts(10, 3, (100, 10_000), (90, 90_000), 0)),
        service(
            "web",
            &counts(1_000, 40, (50_000, 5_000_000), (60_000, 80_000_000), 4),
        ),
    ];
    let now = vec![
        service("cart", &counts(12, 5, (120, 12_000), (108, 108_000), 0)),
        service("new", &counts(4, 4, (8, 600), (8, 600), 0)),
        service(
            "web",
            &counts(4_000, 60, (62_000, 6_400_000), (78_000, 103_000_000), 14),
        ),
    ];
    let before = sample(
        at,
        before,
        &json!({"not_ours": 5, "no_endpoints": 4, "flows_full": 7}),
    )?;
    let now = sample(
        at + Duration::from_secs(2),
        now,
        &json!({"not_ours": 900, "no_endpoints": 14, "flows_full": 7}),
    )?;
    Ok((before, now))
}

#[test]
fn rates_count_traffic_between_two_samples() -> Result<()> {
    let (before, now) = samples()?;
    expect![[r#"
        SERVICE     OPENED/S   PACKETS/S   BYTES/S   UNSERVED/S   CONN-P50   CONN-P99   REFUSED/S   SILENT/S   FLOWS   BACKENDS
        shop/web    1.5k       15k         12M       5.0          <none>     <none>     0           0          60      1/1
        shop/new    2.0        8.0         600       0            <none>     <none>     0           0          4       1/1
        shop/cart   1.0        19          10k       0            <none>     <none>     0           0          5       1/1
        total       1.5k       15k         12M       5.0          <none>     <none>     0           0          69

        not served: no_endpoints 5.0/s
    "#]]
    .assert_eq(&text(&rows(&before, &now, &View::default()), PLAIN));
    Ok(())
}

#[test]
fn screen_shows_health_reasons_and_services() -> Result<()> {
    let (before, now) = samples()?;
    let mut view = View {
        sort: Sort::Bytes,
        ..View::default()
    };
    let rows = rows(&before, &now, &view);
    let text: String = screen::text(&rows, &mut view, 110, 10)
        .iter()
        .map(|line| format!("{:?}\n", line.trim_end()))
        .collect();
    expect![[r#"
        "kpx 1.2.3 on n1: healthy; 3 services, 69 flows"
        "not served: no_endpoints 5.0/s"
        ""
        "SERVICE                                          OPENED/S  PACKETS/S   BYTES/S  UNSERVED/S     FLOWS  BACKENDS"
        "shop/web                                             1.5k        15k       12M         5.0        60       1/1"
        "shop/cart                                             1.0         19       10k           0         5       1/1"
        "shop/new                                              2.0        8.0       600           0         4       1/1"
        "total                                                1.5k        15k       12M         5.0        69"
        ""
        "q quit  / filter  Enter backends  sort: Opened Packets Bytes Unserved Flows Name"
    "#]]
    .assert_eq(&text);
    Ok(())
}

#[test]
fn screen_fits_a_terminal_of_any_size() -> Result<()> {
    let (before, mut now) = samples()?;
    now.problem = Some("the API server\u{1b}[2J is away".to_owned());
    let rows = rows(&before, &now, &View::default());
    for (width, height) in [(0, 0), (1, 1), (10, 3), (79, 5), (300, 100)] {
        let lines = screen::text(&rows, &mut View::default(), width, height);
        assert!(
            lines.len() <= height && lines.iter().all(|line| line.chars().count() <= width),
            "{lines:?}"
        );
        assert!(
            !lines.concat().contains('\u{1b}'),
            "a control character reaches the terminal"
        );
    }
    Ok(())
}

#[test]
fn scroll_position_stops_at_the_last_rows() -> Result<()> {
    let (before, now) = samples()?;
    let mut view = View {
        cursor: 1_000,
        ..View::default()
    };
    let rows = rows(&before, &now, &view);
    let lines = screen::text(&rows, &mut view, 110, 8);
    assert_eq!(
        (view.scroll, view.cursor, view.selected.as_deref()),
        (1, 2, Some("shop/cart"))
    );
    assert!(
        lines[4].starts_with("shop/new") && lines[6].starts_with("total"),
        "{lines:?}"
    );
    Ok(())
}

#[test]
fn rows_are_sorted_filtered_and_never_negative() -> Result<()> {
    let (before, now) = samples()?;
    let names = |rows: &Rows| {
        rows.services
            .iter()
            .map(|row| row.name.clone())
            .collect::<Vec<_>>()
    };
    let view = View {
        sort: Sort::Name,
        filter: "e".to_owned(),
        ..View::default()
    };
    assert_eq!(names(&rows(&before, &now, &view)), ["shop/new", "shop/web"]);
    let mut labelled = now.clone();
    labelled.services[0]
        .labels
        .insert("app".to_owned(), "cart".to_owned());
    let view = View {
        selector: "app=cart".parse().unwrap(),
        ..View::default()
    };
    assert_eq!(names(&rows(&before, &labelled, &view)), ["shop/cart"]);
    let view = View {
        sort: Sort::Flows,
        ..View::default()
    };
    assert_eq!(
        names(&rows(&before, &now, &view)),
        ["shop/web", "shop/cart", "shop/new"]
    );
    // The agent has restarted.
    let later = Sample {
        at: now.at + Duration::from_secs(2),
        ..before
    };
    assert_eq!(rows(&now, &later, &view).total.opened, 0.0);
    // While no agent answers, the screen shows a problem.
    let gone = Sample {
        problem: Some("no kpx answers".to_owned()),
        ..later
    };
    let header = rows(&now, &gone, &view).header;
    assert_eq!(header.health, "unhealthy");
    assert_eq!(header.problems, ["no kpx answers"]);
    Ok(())
}

#[test]
fn services_that_refuse_stand_before_idle_ones_and_are_coloured() -> Result<()> {
    let at = Instant::now();
    let none = counts(0, 0, (0, 0), (0, 0), 0);
    let before = sample(
        at,
        vec![
            service("a", &none),
            service("b", &none),
            service("c", &none),
        ],
        &json!({}),
    )?;
    let refuses = counts(0, 0, (0, 0), (0, 0), 8);
    let now = vec![
        service("a", &none),
        service("b", &refuses),
        service("c", &none),
    ];
    let now = sample(at + Duration::from_secs(1), now, &json!({}))?;
    let rows = rows(
        &before,
        &now,
        &View {
            namespace: Some("shop".to_owned()),
            ..View::default()
        },
    );
    assert_eq!(
        rows.services
            .iter()
            .map(|row| row.name.as_str())
            .collect::<Vec<_>>(),
        ["shop/b", "shop/a", "shop/c"]
    );
    assert_eq!(screen::red(&rows, &mut View::default()), ["8.0"]);
    let elsewhere = View {
        namespace: Some("sho".to_owned()),
        ..View::default()
    };
    assert!(super::rows(&before, &now, &elsewhere).services.is_empty());
    Ok(())
}

#[test]
fn data_says_what_the_table_says() -> Result<()> {
    let (before, now) = samples()?;
    let rows = rows(
        &before,
        &now,
        &View {
            filter: "web".to_owned(),
            ..View::default()
        },
    );
    let rates = json!({
        "openedPerSec": 1500.0, "packetsPerSec": 15000.0, "bytesPerSec": 12200000.0, "unservedPerSec": 5.0, "flows": 60,
        "connectsPerSec": 0.0, "connectP50": null, "connectP99": null, "refusedPerSec": 0.0, "unansweredPerSec": 0.0,
    });
    let mut web =
        json!({ "namespace": "shop", "name": "web", "backendsInUse": 1, "backendsListed": 1 });
    web.as_object_mut()
        .unwrap()
        .extend(rates.as_object().unwrap().clone());
    let data = json!({
        "nodeName": "n1", "health": "healthy", "problems": [], "intervalSecs": 2.0, "services": [web], "total": rates,
        "unservedReasons": { "no_endpoints": 5.0 },
    });
    assert_eq!(serde_json::to_value(data::Traffic::of(&rows, None))?, data);
    Ok(())
}

#[test]
fn agent_without_lists_waits_and_is_not_unhealthy() -> Result<()> {
    let (before, mut now) = samples()?;
    (now.status.healthy, now.status.complete) = (false, false);
    assert_eq!(
        rows(&before, &now, &View::default()).header.health,
        "waiting for the first lists"
    );
    now.status.complete = true;
    assert_eq!(
        rows(&before, &now, &View::default()).header.health,
        "unhealthy"
    );
    Ok(())
}

/// Adds connections to the Service's port and its first backend: answered by bucket, refused,
/// unanswered.
fn dialled(sample: &mut Sample, name: &str, buckets: &[u64], refused: u64, unanswered: u64) {
    let service = sample
        .services
        .iter_mut()
        .find(|service| service.name == name)
        .unwrap();
    let connects = buckets.iter().sum();
    let buckets = buckets.to_vec();
    let failed = refused + unanswered;
    let view = ConnectView {
        connects,
        failed,
        refused,
        unanswered,
        buckets,
        ..ConnectView::default()
    };
    service.ports[0].backends[0].connect = view.clone();
    service.ports[0].connect = view;
}

#[test]
fn connect_times_and_failures_are_those_of_the_interval() -> Result<()> {
    let (mut before, mut now) = samples()?;
    // Earlier connections were fast.
    dialled(&mut before, "web", &[1_000], 7, 0);
    dialled(
        &mut now,
        "web",
        &[1_000, 0, 0, 0, 0, 0, 0, 99, 0, 0, 0, 0, 0, 1],
        11,
        1,
    );
    dialled(&mut now, "cart", &[2], 0, 0);
    let mut view = View {
        sort: Sort::Name,
        ..View::default()
    };
    let all = rows(&before, &now, &view);
    let text: String = screen::text(&all, &mut view, 130, 9)
        .iter()
        .map(|line| format!("{:?}\n", line.trim_end()))
        .collect();
    expect![[r#"
        "kpx 1.2.3 on n1: healthy; 3 services, 69 flows"
        "not served: no_endpoints 5.0/s"
        ""
        "SERVICE                     OPENED/S  PACKETS/S   BYTES/S  UNSERVED/S  CONN-P50  CONN-P99  REFUSED/S  SILENT/S     FLOWS  BACKENDS"
        "shop/cart                        1.0         19       10k           0      33us      65us          0         0         5       1/1"
        "shop/new                         2.0        8.0       600           0                              0         0         4       1/1"
        "shop/web                        1.5k        15k       12M         5.0     6.3ms     8.4ms        2.0       0.5        60       1/1"
        "total                           1.5k        15k       12M         5.0     6.3ms     8.4ms        2.0       0.5        69"
        "q quit  / filter  Enter backends  sort: Opened Packets Bytes Unserved Flows Name"
    "#]].assert_eq(&text);
    assert_eq!(
        screen::red(&all, &mut view),
        ["5.0"],
        "a narrow screen leaves connections out"
    );
    let opened = backends::backends(&before, &now, "shop/web");
    let text: String = screen::text_of_backends(&all, &opened, 130, 7)
        .iter()
        .map(|line| format!("{:?}\n", line.trim_end()))
        .collect();
    expect![[r#"
        "kpx 1.2.3 on n1: healthy; 3 services, 69 flows"
        "not served: no_endpoints 5.0/s"
        ""
        "shop/web"
        "BACKEND            POD      PORT     STATE    CONNECTS/S   CONN-P50   CONN-P99   REFUSED/S   SILENT/S   FLOWS"
        "10.244.1.11:8080   <none>   80/TCP   in use   50           6.3ms      8.4ms      2.0         0.5        1"
        "q quit  Esc all Services  arrows scroll"
    "#]]
    .assert_eq(&text);
    assert_eq!(
        backends::text(&backends::backends(&before, &now, "shop/gone"), PLAIN),
        "kpx serves no Service shop/gone\n"
    );
    let data = serde_json::to_value(data::Traffic::of(&all, Some(&opened)))?;
    assert_eq!(
        (
            &data["backends"][0]["refusedPerSec"],
            &data["backends"][0]["unansweredPerSec"]
        ),
        (&json!(2.0), &json!(0.5))
    );
    assert_eq!(data["services"][2]["connectsPerSec"], 50.0);
    Ok(())
}

/// A case: the expected state, and a change of a plain backend that causes it.
type Case = (&'static str, fn(&mut BackendView));

#[test]
fn state_of_a_backend_says_why_it_takes_nothing() -> Result<()> {
    let (before, mut now) = samples()?;
    let cases: [Case; 4] = [
        ("in use", |pod| pod.in_redirect_set = true),
        ("ejected", |pod| (pod.silent, pod.ejected) = (true, true)),
        ("silent", |pod| {
            (pod.silent, pod.in_cluster_set) = (true, true)
        }),
        ("drained", |pod| pod.weight = 0),
    ];
    let web = now
        .services
        .iter_mut()
        .position(|service| service.name == "web")
        .context("web")?;
    let plain = BackendView {
        ready: true,
        terminating: false,
        in_cluster_set: false,
        in_local_set: false,
        ..now.services[web].ports[0].backends[0].clone()
    };
    for (word, change) in cases {
        let backend = &mut now.services[web].ports[0].backends[0];
        *backend = plain.clone();
        change(backend);
        let text = backends::text(&backends::backends(&before, &now, "shop/web"), PLAIN);
        anyhow::ensure!(text.contains(&format!("  {word}  ")), "{word}: {text}");
    }
    Ok(())
}
