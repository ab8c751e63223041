//! Property tests: a written configuration reads back the same, and a damaged configuration is
//! refused with a reason.

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};

use crate::config::file_config::FileConfig;
use crate::config::flags::FlagValues;
use crate::config::{Configuration, KubeProxyConfiguration};

fn duration() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!(null)),
        (0_u32..100_000).prop_map(|secs| json!(format!("{secs}s"))),
        Just(json!("1h2m3.5s"))
    ]
}

fn address() -> impl Strategy<Value = Value> {
    let texts = [
        "",
        "0.0.0.0",
        "192.0.2.1:0",
        "192.0.2.1:9",
        "::",
        "[::1]:80",
        "[fd00::1]",
        ":77",
    ];
    proptest::sample::select(texts.to_vec()).prop_map(Value::from)
}

fn one_of(values: &'static [&'static str]) -> impl Strategy<Value = Value> {
    proptest::sample::select(values.to_vec()).prop_map(Value::from)
}

prop_compose! {
    fn kube_proxy()(
        healthz in address(), metrics in address(), sync in 1_u32..9_999, min in 0_u32..2, udp in duration(), tcp in duration(),
        mode in one_of(&["", "iptables", "ipvs", "nftables", "ebpf"]), bind in one_of(&["", "0.0.0.0", "::", "192.0.2.9", "fd00::9"]),
        cidr in one_of(&["", "10.0.0.0/8", "fd00::/8,10.0.0.0/8"]), ports in proptest::sample::subsequence(vec!["10.0.0.0/8", "::/0"], 0..=2),
        per_core in proptest::option::of(0_i32..9), oom in proptest::option::of(-1000_i32..=1000), all in any::<bool>(),
        verbosity in 0_u32..10, qps in proptest::option::of(-1_i8..9), name in "[a-z][a-z0-9.-]{0,12}|yes|no|null|1e3|0x1f|~",
    ) -> Value {
        let section = json!({"masqueradeAll": all, "syncPeriod": format!("{sync}s"), "minSyncPeriod": format!("{min}s")});
        let periods = json!({"syncPeriod": format!("{sync}s"), "minSyncPeriod": format!("{min}s")});
        json!({
            "apiVersion": KubeProxyConfiguration::API_VERSION, "kind": KubeProxyConfiguration::KIND, "mode": mode,
            "bindAddress": bind, "healthzBindAddress": healthz, "metricsBindAddress": metrics, "clusterCIDR": cidr,
            "nodePortAddresses": ports, "oomScoreAdj": oom, "iptables": section, "nftables": section, "ipvs": periods,
            "conntrack": {"maxPerCore": per_core, "udpTimeout": udp, "tcpEstablishedTimeout": tcp},
            "logging": {"verbosity": verbosity}, "clientConnection": {"qps": qps}, "hostnameOverride": name,
        })
    }
}

prop_compose! {
    fn kpx()(
        mode in one_of(&["node", "host"]), masquerade in one_of(&["default", "compat"]), attach in one_of(&["", "tcx", "clsact"]),
        algorithm in one_of(&["random", "maglev", "round-robin", "least-connections"]), external in any::<bool>(), ui in any::<bool>(),
        ips in proptest::sample::subsequence(vec!["192.0.2.1", "fd00::1"], 0..=2), size in 0_u32..9_999, context in "[ -~]{0,9}",
    ) -> Value {
        json!({
            "apiVersion": "kpx.dev/v1alpha1", "kind": "KpxConfiguration", "mode": mode, "masquerade": masquerade, "attach": attach,
            "lbAlgorithm": algorithm, "clusterIPExternal": external, "nodeIPs": ips, "flowTableSize": size, "endpointTableSize": size / 2, "ui": ui, "context": context,
        })
    }
}

fn resolve(text: &str) -> Configuration {
    let mut from_files = FileConfig::default();
    from_files
        .read("config".as_ref(), text)
        .unwrap_or_else(|error| panic!("{error:#}\n{text}"));
    assert!(from_files.doubtful.is_empty(), "{:?}", from_files.doubtful);
    Configuration::resolve(&FlagValues::default(), from_files, true)
        .unwrap_or_else(|error| panic!("{error:#}\n{text}"))
}

/// The shipped files, in which every line sets a field.
const FILES: [&str; 3] = [
    include_str!("../../../../deploy/debian/config.yaml"),
    include_str!("../../../../deploy/systemd/host.yaml"),
    super::kubeadm::CONFIG,
];

/// Pieces of YAML that change the meaning of the surrounding text.
const PIECES: [&str; 16] = [
    "", "\n", "  ", ":", ": ", "- ", "{", "}", "[", "'", "\"", "#", "\n---\n", "null", "-1",
    "\u{e4}",
];

fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        proptest::sample::select(PIECES.to_vec()).prop_map(str::to_owned),
        any::<String>(),
    ]
}

proptest! {
    #[test]
    fn damaged_file_is_refused_with_a_reason_or_reads_the_same_again(
        file in proptest::sample::select(FILES.to_vec()),
        damage in proptest::collection::vec((any::<Index>(), 0_usize..20, piece()), 1..4),
    ) {
        let mut text: Vec<char> = file.chars().collect();
        for (at, length, piece) in damage {
            let at = at.index(text.len() + 1);
            let end = text.len().min(at + length);
            text.splice(at..end, piece.chars());
        }
        let text = String::from_iter(text);
        match Configuration::parse(&text) {
            Err(error) => prop_assert_ne!(format!("{error:#}"), ""),
            Ok(first) => {
                let written = first.to_yaml().unwrap();
                let again = Configuration::parse(&written)
                    .unwrap_or_else(|error| panic!("{error:#}\n{written}"));
                prop_assert_eq!(again.to_yaml().unwrap(), written);
            }
        }
    }

    #[test]
    fn written_configuration_reads_the_same(kube_proxy in kube_proxy(), kpx in kpx()) {
        // The web page needs an address: a configuration without one, or with port 0, is invalid.
        prop_assume!(kpx["ui"] == false || !["", "192.0.2.1:0"].contains(&kube_proxy["metricsBindAddress"].as_str().unwrap_or_default()));
        let first = resolve(&format!("{kube_proxy}\n{kpx}"));
        let written = first.to_yaml().unwrap();
        let again = resolve(&written);
        prop_assert_eq!(again.settings().unwrap(), first.settings().unwrap());
        prop_assert_eq!(again.to_yaml().unwrap(), written);
    }
}
