//! Randomly damaged files: unreadable parts have a reason, and the agent computes tables from the
//! rest.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proxy_core::desired::Desired;

use super::*;

const TEXT: &str = "\
apiVersion: v1
kind: Service
metadata: { name: web, annotations: { kpx.dev/lb-algorithm: maglev } }
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.1
  clusterIPs: [10.96.0.1, 'fd00::1']
  externalIPs: [203.0.113.1]
  externalTrafficPolicy: Local
  sessionAffinity: ClientIP
  loadBalancerSourceRanges: [198.51.100.0/24]
  ports:
  - { name: http, port: 80, nodePort: 30080, protocol: TCP, targetPort: 8080 }
  - { name: dns, port: 53, protocol: UDP }
status: { loadBalancer: { ingress: [{ ip: 203.0.113.5, ipMode: VIP }] } }
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: web-1, labels: { kubernetes.io/service-name: web } }
addressType: IPv4
ports: [{ name: http, port: 8080, protocol: TCP }, { name: dns, port: 5353, protocol: UDP }]
endpoints:
- addresses: [10.244.1.10]
  nodeName: node
  conditions: { ready: true, serving: true, terminating: false }
  hints: { forZones: [{ name: a }] }
- { addresses: [10.244.2.10], nodeName: other, zone: a }
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: { name: kubernetes }
spec: { cidrs: [10.96.0.0/16, 'fd00::/112'] }
---
{'apiVersion': 'v1', 'kind': 'List', 'items': [{'apiVersion': 'v1', 'kind': 'Node', 'metadata':
  {'name': 'node', 'labels': {'topology.kubernetes.io/zone': 'a'}},
  'status': {'addresses': [{'type': 'InternalIP', 'address': '172.18.0.11'}]}}, {'kind': 'Pod'}]}
";

/// Pieces of YAML that change the meaning of the surrounding text.
const PIECES: [&str; 16] = [
    "", "\n", "  ", ":", ": ", "- ", "{", "}", "[", "'", "#", "\n---\n", "null", "-1", "65536",
    "\u{e4}",
];

fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        select(PIECES.to_vec()).prop_map(str::to_owned),
        any::<String>()
    ]
}

proptest! {
    #[test]
    fn every_problem_has_a_reason_and_the_rest_has_tables(
        damage in vec((any::<Index>(), 0_usize..20, piece()), 1..4),
    ) {
        let mut text: Vec<char> = TEXT.chars().collect();
        for (at, length, piece) in damage {
            let at = at.index(text.len() + 1);
            let end = text.len().min(at + length);
            text.splice(at..end, piece.chars());
        }
        let file = File::parse("web.yaml", &String::from_iter(text), &File::default());
        let manifests = Manifests {
            files: [("web.yaml".into(), file)].into(),
            ..Manifests::default()
        };
        let (objects, problems) = manifests.state();
        prop_assert!(problems.values().all(|why| !why.is_empty()), "{problems:?}");
        let mut desired = Desired::new("node");
        for input in all(&objects) {
            desired.apply(input);
        }
        let first = desired.sync();
        let again = desired.sync();
        prop_assert!(again.changes.is_empty(), "{:?} after {:?}", again.changes, first.changes);
    }
}
