//! Compares with rules recorded from kube-proxy: see `tests/churn/kube_proxy`.

use std::collections::BTreeSet;

use super::*;

/// The values of the templates' placeholders.
const VALUES: [(&str, &str); 10] = [
    ("FAMILY", "ip"),
    ("ADDR_TYPE", "ipv4_addr"),
    ("CLUSTER_IP", "10.96.0.10"),
    ("NODE_IP", "172.18.0.11"),
    ("NODE_PORT", "30080"),
    ("SERVICE_CIDR", "10.96.0.0/16"),
    ("POD_CIDR", "10.244.0.0/16"),
    ("FIRST_ENDPOINT", "10.244.2.3:8080"),
    ("SECOND_ENDPOINT", "10.244.1.4:8080"),
    ("FIRST_IP", "10.244.2.3"),
];

fn rules() -> Rules {
    let endpoints = ["10.244.2.3:8080", "10.244.1.4:8080"]
        .map(|at| at.parse().unwrap())
        .to_vec();
    let web = ServicePort {
        service: "default/web".into(),
        name: "tcp".into(),
        proto: Proto::Tcp,
        cluster_ip: Ipv4Addr::new(10, 96, 0, 10),
        port: 80,
        node_port: Some(30080),
        endpoints,
        stand_in: false,
    };
    Rules {
        pods: "10.244.0.0/16".into(),
        services: "10.96.0.0/16".into(),
        node: Ipv4Addr::new(172, 18, 0, 11),
        local: vec![Ipv4Addr::new(10, 244, 1, 4)],
        ports: vec![web],
    }
}

fn fill(template: &str) -> String {
    let text = VALUES
        .iter()
        .fold(template.to_owned(), |text, (name, value)| {
            text.replace(name, value)
        });
    text.replace("SECOND_IP", "10.244.1.4")
}

/// Lines without their order, because chains may be filled in any order, and chains without their
/// hashes, which the templates leave open.
fn lines(text: &str) -> BTreeSet<String> {
    let word = |word: &str| {
        let kinds = [
            "KUBE-SVC-",
            "KUBE-EXT-",
            "KUBE-SEP-",
            "service-2",
            "service-7",
            "external-",
            "endpoint-",
        ];
        let kind = kinds
            .into_iter()
            .find(|kind| word.trim_start_matches(':').starts_with(kind));
        kind.map_or_else(|| word.to_owned(), |kind| kind[..8].to_owned())
    };
    let text = text.lines().filter(|line| !line.starts_with("# "));
    text.map(|line| {
        line.split_whitespace()
            .map(word)
            .collect::<Vec<_>>()
            .join(" ")
    })
    .collect()
}

#[test]
fn mode_iptables_has_its_shape() {
    let text = rules().iptables();
    assert_eq!(
        lines(&text),
        lines(&fill(include_str!(
            "../../../../tests/lab/churn/kube_proxy/iptables.txt"
        )))
    );
    // In order: a rule's position in a chain matters.
    let place = |what: &str| text.find(what).unwrap();
    assert!(place("80 -j KUBE-SVC-") < place("this must be the last rule"));
    assert!(place("! -s 10.244.0.0/16") < place("statistic"));
}

#[test]
fn mode_nftables_has_its_shape() {
    let names = fill(include_str!(
        "../../../../tests/lab/churn/kube_proxy/nftables.nft"
    ));
    assert_eq!(lines(&rules().nftables()), lines(&names));
}

/// Compares names with those in the comments of kube-proxy's source and in every cluster.
#[test]
fn chains_have_their_names() {
    let mut rules = rules();
    let port = &mut rules.ports[0];
    (port.service, port.name) = ("default/kubernetes".into(), "https".into());
    assert!(rules.iptables().contains("-j KUBE-SVC-NPX46M4PTMTKRN6Y\n"));
    let port = &mut rules.ports[0];
    (port.service, port.name) = ("ns1/svc1".into(), "p80".into());
    port.endpoints = vec!["10.180.0.1:80".parse().unwrap()];
    let text = rules.nftables();
    assert!(
        text.contains("goto service-ULMVA6XW-ns1/svc1/tcp/p80 }"),
        "{text}"
    );
    assert!(
        text.contains("0 : goto endpoint-5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80 }"),
        "{text}"
    );
}

#[test]
fn large_clusters_have_no_comments_on_endpoints() {
    let mut rules = rules();
    assert!(
        rules
            .iptables()
            .contains("default/web:tcp -> 10.244.2.3:8080")
    );
    rules.ports[0].endpoints = (0..1001)
        .map(|n| SocketAddrV4::new(Ipv4Addr::new(10, 244, 0, 1), n))
        .collect();
    let text = rules.iptables();
    assert!(!text.contains("->"));
    assert!(text.contains("--probability 0.0009990010 -j KUBE-SEP-"));
}

#[test]
fn stand_ins_share_chains() {
    let mut rules = rules();
    let stand_in = |nth: u8| ServicePort {
        service: format!("default/other-{nth}"),
        cluster_ip: Ipv4Addr::new(10, 96, 1, nth),
        stand_in: true,
        node_port: None,
        ..rules.ports[0].clone()
    };
    let others = [stand_in(1), stand_in(2)];
    rules.ports.extend(others);
    let text = rules.iptables();
    let jumps = |text: &str| {
        text.lines()
            .filter(|line| line.starts_with("-A KUBE-SERVICES"))
            .count()
    };
    assert_eq!(jumps(&text), 4);
    assert!(text.contains("default/other-2:tcp cluster IP"));
    assert_eq!(text.matches("\n:KUBE-SVC-").count(), 2);
    let text = rules.nftables();
    assert!(text.contains("10.96.1.2 . tcp . 80 : goto service-"));
    assert_eq!(text.matches("\tchain service-").count(), 2 + 1); // And service-endpoints-check.
}

#[test]
fn mode_ipvs_serves_what_its_sets_hold() {
    let ipvs = rules().ipvs();
    assert_eq!(
        ipvs.device,
        "link add kube-ipvs0 type dummy\naddr add 10.96.0.10/32 dev kube-ipvs0\n"
    );
    let added: Vec<&str> = ipvs
        .sets
        .lines()
        .filter_map(|line| line.strip_prefix("add "))
        .collect();
    let expected = [
        "KUBE-CLUSTER-IP 10.96.0.10,tcp:80",
        "KUBE-NODE-PORT-TCP 30080",
        // The set has only the node's own endpoint.
        "KUBE-LOOP-BACK 10.244.1.4,tcp:8080,10.244.1.4",
        "KUBE-IPVS-IPS 10.96.0.10",
    ];
    assert_eq!(added, expected);
    let servers = |at: &str| {
        format!(
            "-A -t {at} -s rr\n-a -t {at} -r 10.244.2.3:8080 -m -w 1\n-a -t {at} -r 10.244.1.4:8080 -m -w 1\n"
        )
    };
    assert_eq!(
        ipvs.servers,
        servers("10.96.0.10:80") + &servers("172.18.0.11:30080")
    );
}

#[test]
fn rules_of_mode_ipvs_name_sets_that_are_there() {
    let Ipvs { sets, iptables, .. } = rules().ipvs();
    let named: BTreeSet<&str> = iptables
        .split("--match-set ")
        .skip(1)
        .filter_map(|rest| rest.split(' ').next())
        .collect();
    let made: BTreeSet<&str> = sets
        .lines()
        .filter_map(|line| line.strip_prefix("create ")?.split(' ').next())
        .collect();
    assert!(named.is_subset(&made), "{named:?}");
    assert!(
        named.contains("KUBE-NODE-PORT-TCP") && !named.contains("KUBE-NODE-PORT-UDP"),
        "{named:?}"
    );
}
