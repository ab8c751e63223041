//! Tests of endpoint selection for each set. Every rule is a row.

use proxy_common::addr::Addr4;
use proxy_common::frontend::{Backend, Service, Set};

use crate::builders::{ServiceBuilder, SliceBuilder, object_name, service, slice};
use crate::model::{NodeModel, ServiceModel, Surroundings};

/// The Service variants: a ClusterIP only, and combinations of policies and external addresses.
const CLUSTER: &str = "cluster";
const INTERNAL: &str = "internal-local";
const EXTERNAL: &str = "external";
const EXTERNAL_LOCAL: &str = "external-local";
const BOTH_LOCAL: &str = "internal-local external-local";
const INTERNAL_EXTERNAL: &str = "internal-local external";

/// The Service, its endpoints, and `cluster set | local set | drop or reject`. An empty set drops
/// if endpoints exist anywhere, and rejects otherwise.
///
/// An endpoint is a digit for its address and a letter for its conditions:
/// - `r`: ready
/// - `t`: terminating but serving
/// - `b`: both
/// - `n`: ready though not serving
/// - `s`: still serving though not ready
/// - `x`: gone
/// - `d`: dead while terminating
/// - `-`: no conditions at all
///
/// The endpoint is on node `@here` or `@there`, with node hints after `^` and zone hints after `/`.
/// A `;` begins another slice. The node is `here` in zone `east`.
#[rustfmt::skip]
const TABLE: &[(&str, &str, &str)] = &[
    // Without usable endpoints.
    (CLUSTER,           "",                                 "||reject"),
    (INTERNAL,          "",                                 "||reject"),
    (BOTH_LOCAL,        "",                                 "||reject"),
    (CLUSTER,           "1x 2s 3d",                         "||reject"),
    (INTERNAL,          "1x@here 2s@here 3d@here",          "||reject"),
    (EXTERNAL_LOCAL,    "1x@here 2s@there",                 "||reject"),
    // Conditions: ready always suffices. Serving counts only together with terminating.
    (CLUSTER,           "1r 2r",                            "12||drop"),
    (CLUSTER,           "1-",                               "1||drop"),
    (CLUSTER,           "1b 2r",                            "12||drop"),
    (CLUSTER,           "1n 2r",                            "12||drop"),
    (CLUSTER,           "1n",                               "1||drop"),
    (CLUSTER,           "1r 2s",                            "1||drop"),
    (CLUSTER,           "1r 2x 3d",                         "1||drop"),
    // The fallback: if no endpoint is ready, all serving, terminating endpoints.
    (CLUSTER,           "1r 2t",                            "1||drop"),
    (CLUSTER,           "1t 2t",                            "12||drop"),
    (CLUSTER,           "1t 2s",                            "1||drop"),
    (CLUSTER,           "1t 2d",                            "1||drop"),
    (CLUSTER,           "1t 2b",                            "2||drop"),
    // The used sets: local under a policy `Local`, cluster for all other frontends.
    (CLUSTER,           "1r@here 2r@there",                 "12||drop"),
    (EXTERNAL,          "1r@here 2r@there",                 "12||drop"),
    (INTERNAL,          "1r@here 2r@there",                 "|1|drop"),
    (EXTERNAL_LOCAL,    "1r@here 2r@there",                 "12|1|drop"),
    (BOTH_LOCAL,        "1r@here 2r@there",                 "12|1|drop"),
    (INTERNAL_EXTERNAL, "1r@here 2r@there",                 "12|1|drop"),
    // Only remote endpoints: the empty local set drops.
    (INTERNAL,          "1r@there",                         "||drop"),
    (EXTERNAL_LOCAL,    "1r@there",                         "1||drop"),
    (BOTH_LOCAL,        "1r@there 2r@there",                "12||drop"),
    (INTERNAL,          "1t@there",                         "||drop"),
    (INTERNAL,          "1s@there",                         "||reject"),
    (INTERNAL,          "1r@there 2s@here",                 "||drop"),
    // An endpoint without a node is remote.
    (INTERNAL,          "1r 2r@here",                       "|2|drop"),
    (INTERNAL,          "1r",                               "||drop"),
    // Each set falls back independently.
    (INTERNAL,          "1t@here 2r@there",                 "|1|drop"),
    (INTERNAL,          "1t@here 2r@here",                  "|2|drop"),
    (INTERNAL,          "1t@here 2t@there",                 "|1|drop"),
    (EXTERNAL_LOCAL,    "1t@here 2r@there",                 "2|1|drop"),
    (EXTERNAL_LOCAL,    "1t@here 2t@there",                 "12|1|drop"),
    (EXTERNAL_LOCAL,    "1r@here 2t@there",                 "1|1|drop"),
    (EXTERNAL_LOCAL,    "1s@here 2t@there",                 "2||drop"),
    (BOTH_LOCAL,        "1t@here 2r@there 3t@there",        "2|1|drop"),
    // Zone hints restrict the ready endpoints of the cluster set.
    (CLUSTER,           "1r/east 2r/west",                  "1||drop"),
    (CLUSTER,           "1r/east 2r/west 3r/west,east",     "13||drop"),
    (CLUSTER,           "1r/east 2r/east",                  "12||drop"),
    (EXTERNAL,          "1r/east 2r/west",                  "1||drop"),
    // Zone hints do not apply if a ready endpoint has no hint, no hint is for this zone, or no
    // endpoint is ready.
    (CLUSTER,           "1r/east 2r",                       "12||drop"),
    (CLUSTER,           "1r/ 2r/east",                      "12||drop"),
    (CLUSTER,           "1r/west 2r/west",                  "12||drop"),
    (CLUSTER,           "1t/east 2t/west",                  "12||drop"),
    // Endpoints that are not ready do not affect hints.
    (CLUSTER,           "1r/east 2r/west 3x 4s 5d",         "1||drop"),
    (CLUSTER,           "1r/east 2r/west 3t",               "1||drop"),
    (CLUSTER,           "1r/west 2r/west 3t/east",          "12||drop"),
    (CLUSTER,           "1r/west 2r/west 3s/east",          "12||drop"),
    // Node hints take precedence, by the same rules.
    (CLUSTER,           "1r^here 2r^there",                 "1||drop"),
    (CLUSTER,           "1r^here 2r^there,here",            "12||drop"),
    (CLUSTER,           "1r^there 2r^there",                "12||drop"),
    (CLUSTER,           "1r^here 2r",                       "12||drop"),
    (CLUSTER,           "1r^ 2r^here",                      "12||drop"),
    (CLUSTER,           "1r^there 2r^there 3t^here",        "12||drop"),
    (CLUSTER,           "1r^here/west 2r^there/east",       "1||drop"),
    (CLUSTER,           "1r^there/west 2r^there/east",      "2||drop"),
    (CLUSTER,           "1r^here/west 2r/east",             "2||drop"),
    (CLUSTER,           "1r^there/west 2r/west",            "12||drop"),
    (CLUSTER,           "1t^here 2t^there",                 "12||drop"),
    // The hint decides, not the endpoint's location.
    (CLUSTER,           "1r@here/west 2r@there/east",       "2||drop"),
    (CLUSTER,           "1r@here^there 2r@there^here",      "2||drop"),
    // The local set ignores hints; the cluster set of the same Service follows them.
    (INTERNAL,          "1r@here/west 2r@there/east",       "|1|drop"),
    (INTERNAL,          "1r@here^there 2r@there^here",      "|1|drop"),
    (EXTERNAL_LOCAL,    "1r@here/west 2r@there/east",       "2|1|drop"),
    (BOTH_LOCAL,        "1r@here/east 2r@there/west",       "1|1|drop"),
    (EXTERNAL_LOCAL,    "1t@here/east 2r@there/west",       "2|1|drop"),
    // Duplicates: the record that does not terminate wins, in any order and slice.
    (CLUSTER,           "1t 1r 2r",                         "12||drop"),
    (CLUSTER,           "1r 1t 2r",                         "12||drop"),
    (CLUSTER,           "1t ; 1r 2r",                       "12||drop"),
    (CLUSTER,           "1r 2r ; 1t",                       "12||drop"),
    (CLUSTER,           "1b 1x 2r",                         "2||drop"),
    (CLUSTER,           "1t 1x 2t",                         "2||drop"),
    (CLUSTER,           "1t 1s",                            "||reject"),
    (INTERNAL,          "1t@here 1r@there",                 "||drop"),
    (INTERNAL,          "1t@there ; 1r@here",               "|1|drop"),
    (CLUSTER,           "1t/west 1r/east 2r/west",          "1||drop"),
    (CLUSTER,           "1r 1r ; 1r",                       "1||drop"),
];

#[test]
fn every_rule_selects_its_endpoints() {
    let node = NodeModel {
        name: "here".to_owned(),
        zone: Some("east".to_owned()),
        ..Default::default()
    };
    for (policy, endpoints, expected) in TABLE {
        assert_eq!(
            selected(policy, endpoints, &node),
            *expected,
            "{policy}: {endpoints}"
        );
    }
}

#[test]
fn a_node_without_zone_or_name_takes_no_hint() {
    let zoneless = NodeModel {
        name: "here".to_owned(),
        ..Default::default()
    };
    assert_eq!(selected(CLUSTER, "1r/east 2r/west", &zoneless), "12||drop");
    assert_eq!(selected(CLUSTER, "1r^here 2r^there", &zoneless), "1||drop");
    let nameless = NodeModel {
        zone: Some("west".to_owned()),
        ..Default::default()
    };
    assert_eq!(
        selected(CLUSTER, "1r^here/east 2r^there/west", &nameless),
        "2||drop"
    );
    assert_eq!(
        selected(INTERNAL, "1r@ 2r", &nameless),
        "||drop",
        "none is local to a node without a name"
    );
}

fn selected(policy: &str, endpoints: &str, node: &NodeModel) -> String {
    let slices: Vec<_> = endpoints
        .split(';')
        .enumerate()
        .map(|(at, endpoints)| sliced(at, endpoints).object())
        .collect();
    let (model, skipped) = ServiceModel::new(
        &object_name("web"),
        &dialled(policy).object(),
        slices.iter(),
        None,
        &Surroundings::default(),
        node,
    );
    assert_eq!(skipped, [], "{policy}: {endpoints}");
    let port = model.v4.unwrap().ports.into_values().next().unwrap();
    let digits = |set| port.backends(set).iter().map(digit).collect::<String>();
    let verdict = if port.service.has(Service::HAS_ENDPOINTS) {
        "drop"
    } else {
        "reject"
    };
    assert_eq!(
        usize::from(port.service.count(Set::CLUSTER)),
        port.cluster.len()
    );
    assert_eq!(
        usize::from(port.service.count(Set::LOCAL)),
        port.local.len()
    );
    format!("{}|{}|{verdict}", digits(Set::CLUSTER), digits(Set::LOCAL))
}

fn digit(backend: &Backend<Addr4>) -> String {
    proxy_common::addr::Addr::ip(backend.addr)
        .to_string()
        .rsplit('.')
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn dialled(policy: &str) -> ServiceBuilder {
    let words: Vec<_> = policy.split(' ').collect();
    let mut web = service("web").cluster_ip("10.96.0.1").tcp(80);
    if words.contains(&"internal-local") {
        web = web.internal_local();
    }
    if words.iter().any(|word| word.starts_with("external")) {
        web = web.type_("NodePort").node_port(30_080);
    }
    if words.contains(&"external-local") {
        web.external_local()
    } else {
        web
    }
}

fn sliced(index: usize, endpoints: &str) -> SliceBuilder {
    endpoints.split_whitespace().fold(
        slice(&format!("web-{index}"), "web").tcp(8080),
        with_endpoint,
    )
}

fn with_endpoint(slice: SliceBuilder, text: &str) -> SliceBuilder {
    let (digit, rest) = text.split_at(1);
    let ip = format!("10.244.0.{digit}");
    let (condition, rest) = rest.split_at(1);
    let slice = match condition {
        "r" => slice.conditions(&ip, true, true, false),
        "t" => slice.conditions(&ip, false, true, true),
        "b" => slice.conditions(&ip, true, true, true),
        "n" => slice.conditions(&ip, true, false, false),
        "s" => slice.conditions(&ip, false, true, false),
        "x" => slice.conditions(&ip, false, false, false),
        "d" => slice.conditions(&ip, false, false, true),
        "-" => slice.endpoint(&ip),
        other => panic!("no condition {other} in {text}"),
    };
    let part = |mark: char| {
        let (_, part) = rest.split_once(mark)?;
        Some(part.split(['@', '^', '/']).next().unwrap_or_default())
    };
    let names = |mark| {
        part(mark)
            .into_iter()
            .flat_map(|names: &str| names.split(','))
            .filter(|name| !name.is_empty())
    };
    let slice = if let Some(node) = part('@') {
        slice.on(node)
    } else {
        slice
    };
    if part('^').is_none() && part('/').is_none() {
        return slice;
    }
    slice.hints(
        &names('^').collect::<Vec<_>>(),
        &names('/').collect::<Vec<_>>(),
    )
}
