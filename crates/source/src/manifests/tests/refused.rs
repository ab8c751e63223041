//! Tests which documents are refused, and the texts of the errors.

use super::*;

/// Edits of `WEB`, each to a document that kubectl apply would refuse.
const EDITS: &[(&str, &str)] = &[
    ("port: 80", "port: eighty"),
    ("port: 80", "port: '80'"),
    ("port: 80", "port: 0"),
    ("port: 80", "port: 80\n    protocol: QUIC"),
    ("port: 80", "port: 80\n    nodePort: 70000"),
    ("port: 80", "port: 80\n  - port: 81"),
    (
        "port: 80",
        "port: 80\n    name: a\n  - port: 80\n    name: b",
    ),
    ("port: 80", "port: 80\n  ports: []"),
    ("port: 80", "{port: 80"),
    ("  - port: 80", "   port: 80"),
    ("name: web", "nmae: web"),
    ("name: web", "name: [web]"),
    ("name: web", "name: Web"),
    ("name: web", "name: web\n  labels: {a: 1}"),
    ("name: web", "name: web\n  namespace: 7"),
    ("10.96.0.10", "10.96.0.256"),
    ("10.96.0.10", "10.96.0.10\n  clusterIPs: [10.96.0.11]"),
    (
        "10.96.0.10",
        "10.96.0.10\n  clusterIPs: [10.96.0.10, fd00::x]",
    ),
    ("10.96.0.10", "10.96.0.10\n  ipFamilies: [IPv6]"),
    ("10.96.0.10", "10.96.0.10\n  type: Clusterip"),
    ("10.96.0.10", "10.96.0.10\n  externalTrafficPolicy: local"),
    ("10.96.0.10", "10.96.0.10\n  externalIPs: [192.0.2.1, host]"),
    (
        "10.96.0.10",
        "10.96.0.10\n  loadBalancerSourceRanges: [' 192.0.2.0/24 ', 192.0.2.0/33]",
    ),
    (
        "10.96.0.10",
        "10.96.0.10\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}",
    ),
    ("kind: Service", "kind: Servce"),
    ("kind: Service", "Kind: Service"),
    ("apiVersion: v1", "apiVersion: apps/v1"),
    ("apiVersion: v1", "apiVersion: 1"),
    (WEB, "- a\n- b\n"),
    (
        WEB,
        "kind: List\napiVersion: v1\nitems:\n- {kind: Pod, apiVersion: v1}\n- 5\n- {kind: Service, apiVersion: v1}\n",
    ),
    (
        WEB,
        "kind: ServiceList\napiVersion: v1\nitems:\n- metadata: {name: a}\n  spec: 5\n",
    ),
    (WEB, "kind: ServiceList\napiVersion: v1\nitems: {}\n"),
];

#[test]
fn a_bad_document_yields_the_place_and_the_reason() {
    let mut said = String::new();
    for (from, to) in EDITS {
        let text = format!(
            "# first\n{}---\n{}",
            service("other", 1),
            WEB.replace(from, to)
        );
        let (objects, problems) = folder(&[("web.yaml", &text)]).1;
        assert_eq!(objects.len(), 1, "only the other is good: {to}");
        assert!(!problems.is_empty(), "{to}");
        show_problems(&mut said, &problems);
    }
    expect![[r#"
        web.yaml:18: Service default/web: spec.ports[0].port: invalid type: string "eighty", expected i32
        web.yaml:18: Service default/web: spec.ports[0].port: invalid type: string "80", expected i32
        web.yaml:18: Service default/web: spec.ports[0].port: 0 is not a port (1 to 65535)
        web.yaml:19: Service default/web: spec.ports[0].protocol: "QUIC" is not one of TCP, UDP, SCTP
        web.yaml:19: Service default/web: spec.ports[0].nodePort: 70000 is not a port (1 to 65535)
        web.yaml:18: Service default/web: spec.ports[0].name: is missing, and there are several ports
        web.yaml:20: Service default/web: spec.ports[1].port: 80/TCP is another port's
        web.yaml:19: document 2: duplicate mapping key `ports` is not allowed here
        web.yaml:18: document 2: unclosed bracket '{'
        web.yaml:17: Service default/web: spec.ports: invalid type: map, expected a sequence
        web.yaml:14: document 2: strict decoding error: unknown field "metadata.nmae"
        web.yaml:14: document 2: metadata.name: invalid type: sequence, expected a string
        web.yaml:14: Service default/Web: metadata.name: "Web" has characters outside a-z, 0-9, '-' and '.'
        web.yaml:15: Service default/web: metadata.labels.a: invalid type: integer `1`, expected a string
        web.yaml:15: document 2: metadata.namespace: invalid type: integer `7`, expected a string
        web.yaml:16: Service default/web: spec.clusterIP: "10.96.0.256" is not an IP address
        web.yaml:17: Service default/web: spec.clusterIPs[0]: "10.96.0.11" is not the clusterIP, "10.96.0.10"
        web.yaml:17: Service default/web: spec.clusterIPs[1]: "fd00::x" is not an IP address
        web.yaml:17: Service default/web: spec.ipFamilies[0]: is not that of clusterIPs[0], 10.96.0.10
        web.yaml:17: Service default/web: spec.type: "Clusterip" is not one of ClusterIP, NodePort, LoadBalancer, ExternalName
        web.yaml:17: Service default/web: spec.externalTrafficPolicy: "local" is not one of Cluster, Local
        web.yaml:17: Service default/web: spec.externalIPs[1]: "host" is not an IP address
        web.yaml:17: Service default/web: spec.loadBalancerSourceRanges[1]: "192.0.2.0/33" is not a network (address/length)
        web.yaml:17: Service default/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not within 1 to 86400
        web.yaml:12: Servce web: kind: no matches for kind "Servce" in version "v1"
        web.yaml:11: document 2: kind: is missing
        web.yaml:11: Service web: apiVersion: Service is in version "v1", not "apps/v1"
        web.yaml:11: Service web: apiVersion: is not a string
        web.yaml:11: document 2: is not an object
        web.yaml:15: document 2: items[1]: is not an object
        web.yaml:16: document 2: items[2]: metadata.name: is missing
        web.yaml:15: Service default/a: spec: invalid type: integer `5`, expected ServiceSpec
        web.yaml:13: document 2: items: is not a list
    "#]].assert_eq(&said);
}

/// Such a document may come from a newer API server.
#[test]
fn unknown_field_or_null_refuses_nothing() {
    let mut said = String::new();
    for (from, to) in [
        ("port: 80", "port: 80\n    prot: TCP\n    nmae: http"),
        ("port: 80", "port: 80\n  port: 81"),
        (
            "port: 80",
            "port: 80\nstatus: {conditions: [{type: A, lastTransitionTime: null}, null], loadBalancer: null}",
        ),
        ("port: 80", "port: 80\n  - null"),
        ("port: 80", "port: 80\nstatus: {conditions: 7, newer: 8}"),
        ("name: web", "name: web\n  managedFields: [{time: never}]"),
    ] {
        let (objects, problems) = folder(&[("web.yaml", &WEB.replace(from, to))]).1;
        let kept = |objects| format!("{:?}", all(objects));
        assert_eq!(
            kept(&objects),
            kept(&folder(&[("web.yaml", WEB)]).1.0),
            "{to}"
        );
        show_problems(&mut said, &problems);
    }
    expect![[r#"
        web.yaml:10: Service default/web: left out: unknown field "spec.ports[0].nmae", unknown field "spec.ports[0].prot"
        web.yaml:9: Service default/web: left out: unknown field "spec.port"
    "#]].assert_eq(&said);
}

#[test]
fn a_bad_slice_or_cidr_yields_the_place_and_the_reason() {
    let slice = |edit: (&str, &str)| slice("web-1", "10.0.0.1").replace(edit.0, edit.1);
    let cidr = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: more}\nspec: {cidrs: [10.96.0.1/16]}\n";
    let texts = [
        slice(("discovery.k8s.io/v1", "v1")),
        slice(("discovery.k8s.io/v1", "discovery.k8s.io/v1beta1")),
        slice(("IPv4", "ipv4")),
        slice(("addressType: IPv4", "")),
        slice(("[10.0.0.1]", "['fd00::1']")),
        slice(("[10.0.0.1]", "[10.0.0.1, 127.0.0.1]")),
        slice(("[10.0.0.1]", "[224.0.0.251]")),
        slice(("IPv4", "IPv6")).replace("[10.0.0.1]", "['ff02::1']"),
        slice(("[10.0.0.1]", "[]")),
        slice(("port: 8080", "port: 80800")),
        slice(("{port: 8080}", "{port: 8080}, {port: 8081}")),
        slice(("addresses", "adresses")),
        cidr.to_owned(),
        cidr.replace("10.96.0.1/16", "all"),
        cidr.replace("ServiceCIDR", "ServiceCidr"),
    ];
    let mut said = String::new();
    for text in texts {
        let (objects, problems) = folder(&[("a.yaml", &text)]).1;
        assert!(objects.is_empty() && !problems.is_empty(), "{text}");
        show_problems(&mut said, &problems);
    }
    expect![[r#"
        a.yaml:1: EndpointSlice web-1: apiVersion: EndpointSlice is in version "discovery.k8s.io/v1", not "v1"
        a.yaml:1: EndpointSlice web-1: apiVersion: EndpointSlice is in version "discovery.k8s.io/v1", not "discovery.k8s.io/v1beta1"
        a.yaml:4: EndpointSlice default/web-1: addressType: "ipv4" is not one of IPv4, IPv6, FQDN
        a.yaml:1: EndpointSlice default/web-1: addressType: "" is not one of IPv4, IPv6, FQDN
        a.yaml:5: EndpointSlice default/web-1: endpoints[0].addresses[0]: fd00::1 is not IPv4
        a.yaml:5: EndpointSlice default/web-1: endpoints[0].addresses[1]: 127.0.0.1 is not the address of an endpoint
        a.yaml:5: EndpointSlice default/web-1: endpoints[0].addresses[0]: 224.0.0.251 is not the address of an endpoint
        a.yaml:5: EndpointSlice default/web-1: endpoints[0].addresses[0]: ff02::1 is not the address of an endpoint
        a.yaml:5: EndpointSlice default/web-1: endpoints[0].addresses: is empty
        a.yaml:6: EndpointSlice default/web-1: ports[0].port: 80800 is not a port (1 to 65535)
        a.yaml:6: EndpointSlice default/web-1: ports[1].name: "" is the name of another port
        a.yaml:5: EndpointSlice default/web-1: strict decoding error: unknown field "endpoints[0].adresses"
        a.yaml:4: ServiceCIDR more: spec.cidrs[0]: 10.96.0.1/16 has bits beyond its prefix, 10.96.0.0/16
        a.yaml:4: ServiceCIDR more: spec.cidrs[0]: "all" is not a network (address/length)
        a.yaml:2: ServiceCidr more: kind: no matches for kind "ServiceCidr" in version "networking.k8s.io/v1"
    "#]].assert_eq(&said);
}

#[test]
fn a_bad_file_yields_a_problem() {
    let (dir, manifests) = (TempDir::new().unwrap(), |dir: &TempDir| {
        read(dir, Manifests::default())
    });
    fs::write(dir.path().join("latin.yaml"), b"a: \xe9").unwrap();
    fs::write(
        dir.path().join("broken.json"),
        "{\"kind\": \"List\",\n \"items\": [}",
    )
    .unwrap();
    symlink("nowhere", dir.path().join("link.yml")).unwrap();
    fs::create_dir(dir.path().join("folder.yaml")).unwrap();
    fs::write(dir.path().join("README.md"), "not: [ours").unwrap();
    fs::write(dir.path().join(".web.yaml.swp"), "not: [ours").unwrap();
    fs::write(dir.path().join(".hidden.yaml"), "not: [ours").unwrap();
    fs::write(dir.path().join("web.yaml~"), "not: [ours").unwrap();
    fs::write(dir.path().join("empty.yaml"), "# nothing\n---\n").unwrap();
    let mut said = String::new();
    show_problems(&mut said, &manifests(&dir).state().1);
    expect![[r#"
        broken.json:2: document 1: mismatched bracket '[' closed by '}'
        latin.yaml: is not UTF-8 text
        link.yml: No such file or directory (os error 2)
    "#]]
    .assert_eq(&said);
}
