use std::collections::BTreeSet;

use proxy_source::{Source, kubernetes};
use proxy_view::{DNS_ADDRESS, Mode};

use super::*;

const CIDR: &str = "10.96.0.0/16";

fn setting() -> Setting {
    Setting {
        mode: Mode::Host,
        source: Source::Kubernetes(kubernetes::Options::default()),
        names: Some(DNS_ADDRESS),
        cluster_domain: "corp.example".to_owned(),
        has_tunnel: false,
        service_cidrs: Vec::new(),
        pod_networks: Vec::new(),
    }
}

fn granted(refused: &[&str], cidrs: &[&str]) -> Granted {
    Granted {
        server: "https://192.0.2.1:6443/".to_owned(),
        refused: refused
            .iter()
            .map(|resource| ((*resource).to_owned(), "403".to_owned()))
            .collect(),
        service_cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
        streams: None,
    }
}

fn facts(granted: Granted) -> Outside {
    Outside {
        granted: Some(Ok(granted)),
        ..Outside::default()
    }
}

fn levels(setting: &Setting, facts: &Outside) -> Vec<String> {
    let shown = judge(setting, facts)
        .into_iter()
        .map(|finding| format!("{:?} {}", finding.level, finding.what));
    shown.collect()
}

#[test]
fn findings_tell_what_keeps_a_laptop_from_services() {
    let levels = |facts: &Outside| levels(&setting(), facts);
    let not = NotGranted::from(anyhow::anyhow!("refused"));
    assert_eq!(
        levels(&Outside {
            granted: Some(Err(not)),
            ..Outside::default()
        }),
        ["Fail API server", "Ok names"]
    );
    assert_eq!(levels(&Outside::default()), ["Ok names"]);
    let well = [
        "Ok API server",
        "Ok rights",
        "Ok service networks",
        "Ok names",
    ];
    assert_eq!(levels(&facts(granted(&[], &[CIDR]))), well);
    assert_eq!(
        levels(&facts(granted(&["nodes"], &[CIDR])))[1],
        "Warn rights"
    );
    assert_eq!(
        levels(&facts(granted(&["services"], &[])))[1..3],
        ["Fail rights", "Warn service networks"]
    );
    let overlaps = vec![(
        CIDR.parse().unwrap(),
        "10.96.3.1/24 of device docker0".to_owned(),
    )];
    let overlapping = Outside {
        overlaps,
        names: Names::NoResolved,
        ..facts(granted(&[], &[CIDR]))
    };
    assert_eq!(
        levels(&overlapping)[2..],
        ["Warn service networks", "Warn names"]
    );
}

#[test]
fn operators_ranges_count_before_the_clusters() {
    let named = Setting {
        service_cidrs: vec![CIDR.parse().unwrap()],
        ..setting()
    };
    let findings = judge(&named, &facts(granted(&[], &[])));
    assert_eq!(findings[2].found, "10.96.0.0/16 are free here");
    let overlaps = vec![(
        CIDR.parse().unwrap(),
        "10.96.3.1/24 of device docker0".to_owned(),
    )];
    let away = Outside {
        granted: Some(Err(anyhow::anyhow!("away").into())),
        overlaps,
        ..Outside::default()
    };
    assert_eq!(
        judge(&named, &away)[1].what,
        "service networks",
        "no server is needed for that"
    );
}

#[test]
fn right_to_streams_is_judged_where_the_tunnel_is_asked_for() {
    let nowhere = |lacks: &[&'static str]| Streams::Nowhere {
        namespace: "shop".to_owned(),
        lacks: lacks.to_vec(),
    };
    for (streams, level, found) in [
        (
            Streams::Everywhere,
            Level::Ok,
            "pods/portforward is granted in all namespaces",
        ),
        (
            Streams::In("shop".to_owned()),
            Level::Warn,
            "pods/portforward is granted in namespace shop, and not in all",
        ),
        (
            nowhere(&["create"]),
            Level::Warn,
            "no right to create pods/portforward, in all namespaces or in shop",
        ),
        (
            nowhere(&["get", "create"]),
            Level::Fail,
            "no right to get and create pods/portforward, in all namespaces or in shop",
        ),
        (
            Streams::Unknown("404".to_owned()),
            Level::Warn,
            "unknown whether pods/portforward is granted: 404",
        ),
    ] {
        let granted = Granted {
            streams: Some(streams),
            ..granted(&[], &[CIDR])
        };
        let finding = judge(&setting(), &facts(granted)).remove(2);
        assert_eq!(
            (finding.what, finding.level, finding.found.as_str()),
            ("tunnel", level, found)
        );
        assert_eq!(finding.fix.is_some(), level != Level::Ok);
    }
}

#[test]
fn each_fault_on_the_way_to_the_server_has_its_advice() {
    let faults = [
        Fault::NoKubeconfig,
        Fault::Kubeconfig,
        Fault::Context,
        Fault::Plugin,
        Fault::Credentials,
        Fault::Certificate,
        Fault::Name,
        Fault::Unreachable,
        Fault::Answer,
    ];
    assert_eq!(
        faults.map(mend).into_iter().collect::<BTreeSet<_>>().len(),
        faults.len()
    );
}

#[test]
fn each_failure_to_listen_has_its_advice() {
    let held = UdpSocket::bind("127.0.0.1:0").unwrap();
    let taken = held.local_addr().unwrap();
    let of = |at: SocketAddr| match names(Some(at)) {
        Names::Unbound { at, kind, .. } => (at, kind),
        other => panic!("{at} is free: {other:?}"),
    };
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    // No machine has an address of the documentation range.
    let elsewhere = "192.0.2.1:53530".parse().unwrap();
    let found = [of(taken), of(held.local_addr().unwrap()), of(elsewhere)];
    assert_eq!(
        found.map(|(_, kind)| kind),
        [
            ErrorKind::AddrInUse,
            ErrorKind::AddrInUse,
            ErrorKind::AddrNotAvailable
        ]
    );

    let kinds = [
        ErrorKind::AddrInUse,
        ErrorKind::PermissionDenied,
        ErrorKind::AddrNotAvailable,
        ErrorKind::Other,
    ];
    let reported = |kind| {
        judge_names(
            &setting(),
            &Names::Unbound {
                at: DNS_ADDRESS,
                kind,
                why: "odd".to_owned(),
            },
        )
    };
    let reported = kinds.map(reported);
    assert!(reported.iter().all(|finding| finding.level == Level::Warn));
    assert_eq!(
        reported.map(|finding| finding.found),
        [
            "127.0.0.153:53 is taken by another program",
            "this process may not listen at 127.0.0.153:53",
            "127.0.0.153 is not assigned to this host",
            "kpx cannot listen at 127.0.0.153:53: odd",
        ]
    );
    let fixes = kinds.map(|kind| {
        judge_names(
            &setting(),
            &Names::Unbound {
                at: DNS_ADDRESS,
                kind,
                why: String::new(),
            },
        )
        .fix
    });
    assert_eq!(
        fixes.into_iter().collect::<BTreeSet<_>>().len(),
        kinds.len()
    );
    assert_eq!(names(None), Names::Off);
    let fix = judge_names(&setting(), &Names::NoResolved).fix.unwrap();
    assert!(fix.contains("127.0.0.153 for corp.example"), "{fix}");
}

#[test]
fn samples_are_in_their_range() {
    for range in [
        "10.96.0.0/12",
        "10.96.0.0/31",
        "10.96.0.1/32",
        "fd00:96::/112",
        "fd00::/8",
        "::/0",
    ] {
        let range: IpNet = range.parse().unwrap();
        let samples = samples(&range);
        assert!(
            !samples.is_empty() && samples.iter().all(|ip| range.contains(ip)),
            "{range}: {samples:?}"
        );
    }
}
