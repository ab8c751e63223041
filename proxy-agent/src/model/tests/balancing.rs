//! How service ports spread clients, and what is kept for clients that return.

use expect_test::expect;
use proxy_common::addr::Addr4;
use proxy_common::frontend::{Algorithm, Backend, MAGLEV_PLACES, Set};

use super::check;
use crate::builders::{listed, object_name, service, slice};
use crate::desired::Desired;
use crate::model::{ModelOptions, NodeModel, ServiceModel};

#[test]
fn an_annotation_asks_for_an_algorithm() {
    let web = |name: &str, last: u8| service(name).cluster_ip(&format!("10.96.0.{last}")).tcp(80);
    check(
        [
            web("random", 1).algorithm("random").into(),
            web("maglev", 2).algorithm("maglev").into(),
            web("round-robin", 3).algorithm("round-robin").into(),
            web("least-connections", 4).algorithm("least-connections").into(),
            web("other", 5).algorithm("fair").into(),
            slice("maglev-1", "maglev").tcp(80).ready("10.244.0.1").ready("10.244.0.2").into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=2 local=0 has-endpoints maglev
              cluster[0] -> 10.244.0.1:80
              cluster[1] -> 10.244.0.2:80
              maglev cluster 2 slots ae238399
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=0 local=0 round-robin
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=0 local=0 least-connections
            10.96.0.5 address
            10.96.0.5:80/tcp cluster-ip cluster=0 local=0
            skipped Service default/other metadata.annotations[kpx.dev/lb-algorithm]: "fair" is not one of random, maglev, round-robin, least-connections
        "#]],
    );
}

#[test]
fn the_node_has_a_default_algorithm() {
    let mut desired =
        Desired::with_options("here", ModelOptions { algorithm: Algorithm::ROUND_ROBIN, ..Default::default() });
    let web = |name: &str, last: u8| service(name).cluster_ip(&format!("10.96.0.{last}")).tcp(80);
    let objects = [web("none", 1), web("own", 2).algorithm("random"), web("odd", 3).algorithm("")];
    for input in listed().into_iter().chain(objects.map(Into::into)) {
        desired.apply(input);
    }
    desired.sync();
    expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=0 local=0 round-robin
        10.96.0.2 address
        10.96.0.2:80/tcp cluster-ip cluster=0 local=0
        10.96.0.3 address
        10.96.0.3:80/tcp cluster-ip cluster=0 local=0 round-robin
    "#]]
    .assert_eq(&desired.tables().to_string());
}

#[test]
fn each_set_has_its_table() {
    check(
        [
            service("web")
                .cluster_ip("10.96.0.1")
                .type_("NodePort")
                .tcp(80)
                .node_port(30_080)
                .external_local()
                .algorithm("maglev")
                .into(),
            slice("web-1", "web").tcp(80).ready("10.244.0.1").on("here").ready("10.244.1.1").ready("10.244.1.2").into(),
        ],
        expect![[r#"
            IPv4 *:30080/tcp node-port of 10.96.0.1:80/tcp
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=3 local=1 external-local has-endpoints maglev
              cluster[0] -> 10.244.0.1:80 local
              cluster[1] -> 10.244.1.1:80
              cluster[2] -> 10.244.1.2:80
              local[0] -> 10.244.0.1:80 local
              maglev cluster 3 slots 7f5d0c87
              maglev local 1 slots 42f3f92f
        "#]],
    );
}

#[test]
fn affinity_has_a_default_and_limits() {
    let web = |name: &str, last: u8| service(name).cluster_ip(&format!("10.96.0.{last}")).tcp(80);
    let with_type = |name: &str| Some(name.to_owned());
    check(
        [
            web("none", 1).edit(|spec| spec.session_affinity = with_type("None")).into(),
            web("default", 2).affinity(None).into(),
            web("least", 3).affinity(Some(1)).into(),
            web("most", 4).affinity(Some(86_400)).into(),
            web("too-short", 5).affinity(Some(0)).into(),
            web("too-long", 6).affinity(Some(86_401)).into(),
            web("negative", 7).affinity(Some(-1)).into(),
            web("other", 8).edit(|spec| spec.session_affinity = with_type("Cookie")).into(),
            // Its timeout is not asked for.
            web("off", 9).affinity(Some(0)).edit(|spec| spec.session_affinity = None).into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=0 local=0 affinity=10800s
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=0 local=0 affinity=1s
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=0 local=0 affinity=86400s
            10.96.0.5 address
            10.96.0.5:80/tcp cluster-ip cluster=0 local=0 affinity=10800s
            10.96.0.6 address
            10.96.0.6:80/tcp cluster-ip cluster=0 local=0 affinity=10800s
            10.96.0.7 address
            10.96.0.7:80/tcp cluster-ip cluster=0 local=0 affinity=10800s
            10.96.0.8 address
            10.96.0.8:80/tcp cluster-ip cluster=0 local=0
            10.96.0.9 address
            10.96.0.9:80/tcp cluster-ip cluster=0 local=0
            skipped Service default/negative spec.sessionAffinityConfig.clientIP.timeoutSeconds: -1 is not in 1..=86400, so 10800 counts
            skipped Service default/other spec.sessionAffinity: "Cookie" is not one of None, ClientIP
            skipped Service default/too-long spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not in 1..=86400, so 10800 counts
            skipped Service default/too-short spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not in 1..=86400, so 10800 counts
        "#]],
    );
}

/// For UDP always, as its flows move on when a backend has gone; for the others with affinity.
#[test]
fn endpoints_are_remembered_where_they_are_asked_for() {
    let endpoints = |slice: crate::builders::SliceBuilder| {
        slice
            .ready("10.244.0.1")
            .on("here")
            .terminating("10.244.0.2")
            .on("here")
            .ready("10.244.1.1")
            .unready("10.244.1.2")
    };
    check(
        [
            service("dns").cluster_ip("10.96.0.1").port("", "UDP", 53).internal_local().into(),
            endpoints(slice("dns-1", "dns").port("", "UDP", 53)).into(),
            service("web").cluster_ip("10.96.0.2").tcp(80).affinity(None).into(),
            endpoints(slice("web-1", "web").tcp(80)).into(),
            service("plain").cluster_ip("10.96.0.3").tcp(80).into(),
            endpoints(slice("plain-1", "plain").tcp(80)).into(),
            // In both sets, in either, in none.
            service("both")
                .cluster_ip("10.96.0.4")
                .port("", "UDP", 53)
                .type_("NodePort")
                .node_port(30_053)
                .external_local()
                .into(),
            slice("both-1", "both")
                .port("", "UDP", 53)
                .terminating("10.244.0.1")
                .on("here")
                .ready("10.244.1.1")
                .hints(&["here"], &[])
                .ready("10.244.1.2")
                .hints(&["there"], &[])
                .into(),
        ],
        expect![[r#"
            IPv4 *:30053/udp node-port of 10.96.0.4:53/udp
            10.96.0.1 address
            10.96.0.1:53/udp cluster-ip cluster=0 local=1 internal-local has-endpoints
              local[0] -> 10.244.0.1:53 local
              endpoint 10.244.0.1:53 in-local local
              endpoint 10.244.0.2:53 local
              endpoint 10.244.1.1:53
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=2 local=0 has-endpoints affinity=10800s
              cluster[0] -> 10.244.0.1:80 local
              cluster[1] -> 10.244.1.1:80
              endpoint 10.244.0.1:80 in-cluster local
              endpoint 10.244.0.2:80 local
              endpoint 10.244.1.1:80 in-cluster
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=2 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:80 local
              cluster[1] -> 10.244.1.1:80
            10.96.0.4 address
            10.96.0.4:53/udp cluster-ip cluster=1 local=1 external-local has-endpoints
              cluster[0] -> 10.244.1.1:53
              local[0] -> 10.244.0.1:53 local
              endpoint 10.244.0.1:53 in-local local
              endpoint 10.244.1.1:53 in-cluster
              endpoint 10.244.1.2:53
        "#]],
    );
}

#[test]
fn more_backends_than_places_are_cut_and_reported() {
    let backends = (0..=MAGLEV_PLACES).fold(slice("web-1", "web").tcp(80), |slice, index| {
        slice.ready(&format!("10.244.{}.{}", index / 256, index % 256))
    });
    let model = |web: crate::builders::ServiceBuilder| {
        let node = NodeModel { name: "here".to_owned(), ..Default::default() };
        ServiceModel::new(&object_name("web"), &web.object(), [&backends.object()].into_iter(), &node)
    };
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80).affinity(None);
    let (cut, skipped) = model(web().algorithm("maglev"));
    let port = cut.v4.unwrap().ports.into_values().next().unwrap();
    assert_eq!(port.cluster.len(), MAGLEV_PLACES);
    assert_eq!(port.maglev.len(), 1);
    let in_set = port.endpoints.iter().filter(|(_, endpoint)| endpoint.is_in(Set::CLUSTER)).count();
    assert_eq!((port.endpoints.len(), in_set), (MAGLEV_PLACES + 1, MAGLEV_PLACES));
    let skipped: Vec<_> = skipped.iter().map(ToString::to_string).collect();
    assert_eq!(
        skipped,
        ["Service default/web spec.ports[0]: of 4094 backends in the cluster set only the first 4093 serve"]
    );
    let (whole, skipped) = model(web());
    let port = whole.v4.unwrap().ports.into_values().next().unwrap();
    assert_eq!((port.cluster.len(), skipped.len()), (MAGLEV_PLACES + 1, 0));
    assert!(port.cluster.is_sorted_by_key(|backend: &Backend<Addr4>| backend.addr));
}
