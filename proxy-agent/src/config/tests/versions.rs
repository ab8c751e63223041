//! Tests of what Kubernetes' versions mean: feature gates, the default mode, the newer form of the
//! file.

use super::{ConfigFile, load, settings};
use proxy_versions::node_ports::{Localhost, NodePortAddresses};

const V1ALPHA2: &str =
    "apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration\n";

fn node_ports(items: &[&str]) -> NodePortAddresses {
    let mut addresses = NodePortAddresses::default();
    items
        .iter()
        .for_each(|item| assert!(addresses.add(item), "{item}"));
    addresses
}

/// KEP-6032.
#[test]
fn node_port_addresses_take_keywords_in_every_mixture() {
    for items in [
        "localhost",
        "all",
        "primary,localhost",
        "localhost,10.0.0.0/8,primary",
        "all,localhost",
        "primary,::1/128",
    ] {
        let want = node_ports(&items.split(',').collect::<Vec<_>>());
        assert_eq!(
            settings(&format!("--nodeport-addresses={items}"))
                .node
                .node_ports,
            want,
            "{items}"
        );
        let file = ConfigFile::kube_proxy(&format!(
            "mode: nftables\nnodePortAddresses: [{}]",
            items.replace("::1/128", "'::1/128'")
        ));
        assert_eq!(file.settings("").node.node_ports, want, "{items}");
    }
}

/// KEP-6032.
#[test]
fn mode_and_gate_decide_about_loopback_addresses() {
    let gate = "--feature-gates=KubeProxyNFTablesLocalhostNodePorts";
    for (line, want) in [
        ("", Localhost::Included),
        ("--socket-lb=off", Localhost::Included),
        ("--proxy-mode=ebpf", Localhost::Included),
        ("--iptables-localhost-nodeports=false", Localhost::Off),
        ("--proxy-mode=ipvs", Localhost::Named),
        ("--proxy-mode=nftables", Localhost::Named),
        (
            "--proxy-mode=nftables --iptables-localhost-nodeports=false",
            Localhost::Named,
        ),
        (
            &format!("--proxy-mode=nftables {gate}=true"),
            Localhost::Named,
        ),
        (
            &format!("--proxy-mode=nftables {gate}=false"),
            Localhost::Off,
        ),
        (&format!("{gate}=false"), Localhost::Included),
        ("--mode=host", Localhost::Off),
    ] {
        assert_eq!(settings(line).node.localhost, want, "{line}");
    }
}

/// KEP-5707.
#[test]
fn gate_and_version_decide_about_external_ips() {
    let gate = "--feature-gates=AllowServiceExternalIPs";
    for (line, ignored) in [
        (String::new(), false),
        ("--kubernetes-version=v1.39.2".to_owned(), false),
        ("--kubernetes-version=1.40".to_owned(), true),
        (format!("{gate}=false"), true),
        (format!("{gate}=true --kubernetes-version=1.40"), false),
    ] {
        assert_eq!(
            settings(&line).model.ignores_external_ips,
            ignored,
            "{line}"
        );
    }
}

/// KEP-5343.
#[test]
fn version_decides_about_the_mode_of_a_configuration_without() {
    for (line, mode) in [
        ("", ""),
        ("--kubernetes-version=1.39", ""),
        ("--kubernetes-version=1.40", "nftables"),
        (
            "--kubernetes-version=1.40 --proxy-mode=iptables",
            "iptables",
        ),
        ("--kubernetes-version=1.40 --proxy-mode=ipvs", "ipvs"),
    ] {
        let configuration = load(&format!("--node-name n1 {line}")).unwrap();
        assert_eq!(configuration.kube_proxy.mode, mode, "{line}");
        let node = configuration.settings().unwrap().node;
        let is_nftables = mode == "nftables";
        assert_eq!(
            node.node_ports,
            node_ports(if is_nftables { &["primary"] } else { &[] }),
            "{line}"
        );
        assert_eq!(
            node.localhost == Localhost::Included,
            !is_nftables && mode != "ipvs",
            "{line}"
        );
        assert_eq!(
            configuration.checked.common.section,
            if mode.is_empty() { "iptables" } else { mode },
            "{line}"
        );
    }
    let file =
        "kind: KpxConfiguration\napiVersion: kpx.dev/v1alpha1\nkubernetesVersion: '1.40'\n---\n";
    let file = ConfigFile::new(&format!("{file}{V1ALPHA2}"));
    assert_eq!(file.load("").unwrap().kube_proxy.mode, "nftables");
}

/// KEP-784.
#[test]
fn both_forms_of_a_file_mean_the_same() {
    let pairs = [
        (
            "",
            "iptables: {localhostNodePorts: false}\nbindAddressHardFail: true",
        ),
        (
            "iptables: {localhostNodePorts: true}\nbindAddressHardFail: false",
            "",
        ),
        (
            "mode: nftables\nsyncPeriod: 40s\nminSyncPeriod: 2s\nlinux: {masqueradeAll: true, oomScoreAdj: 1, conntrack: {min: 7}}",
            "mode: nftables\nnftables: {syncPeriod: 40s, minSyncPeriod: 2s, masqueradeAll: true}\noomScoreAdj: 1\nconntrack: {min: 7}\n\
             bindAddressHardFail: true\niptables: {localhostNodePorts: false}",
        ),
        (
            "detectLocal: {clusterCIDRs: [10.0.0.0/8, 'fd00::/8']}\nnodePortAddresses: [localhost]\nipFamilyPolicy: PreferDualStack",
            "clusterCIDR: 10.0.0.0/8,fd00::/8\nnodePortAddresses: [localhost]\nbindAddressHardFail: true\n\
             iptables: {localhostNodePorts: false}",
        ),
    ];
    for (new, old) in pairs {
        let [new, old] = [
            ConfigFile::new(&format!("{V1ALPHA2}{new}\n")),
            ConfigFile::kube_proxy(old),
        ];
        let [got, want] = [new.settings(""), old.settings("")];
        let files = want.files.clone();
        let configz = want.configz["kubeproxy.config.k8s.io"].clone();
        assert_eq!(
            got.configz["kubeproxy.config.k8s.io"]["SyncPeriod"],
            configz["SyncPeriod"]
        );
        let configz = want.configz.clone();
        let zpages = want.zpages.clone();
        assert_eq!(
            crate::settings::Settings {
                files,
                configz,
                zpages,
                ..got
            },
            want
        );
    }
    let ips = ConfigFile::new(&format!(
        "{V1ALPHA2}nodeIPOverride: ['2001:db8::1', 192.0.2.1]\n"
    ))
    .settings("");
    assert_eq!(
        ips.node
            .node_ips
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>(),
        ["2001:db8::1", "192.0.2.1"]
    );
    assert_eq!(ips.healthz_address, Some("[::]:10256".parse().unwrap()));
}

/// KEP-784.
#[test]
fn newer_form_is_strict_unless_it_says_otherwise() {
    for (fields, want) in [
        (
            "future: 1",
            "configHardFail: KubeProxyConfiguration.future (config.conf:3): unknown field",
        ),
        (
            "linux:\n  future: 1",
            "configHardFail: KubeProxyConfiguration.linux.future (config.conf:4): unknown field",
        ),
        (
            "mode: ipvs\nconntrack: {min: 1}",
            "configHardFail: KubeProxyConfiguration.conntrack (config.conf:4): unknown field, linux.conntrack stands for it",
        ),
        (
            "bindAddress: 192.0.2.1",
            "configHardFail: KubeProxyConfiguration.bindAddress (config.conf:3): unknown field, nodeIPOverride stands for it",
        ),
        (
            "mode: ipvs\nmode: nftables",
            "configHardFail: KubeProxyConfiguration.mode (config.conf:4): given more than once, the last one counts",
        ),
        (
            "linux:\n  conntrack: {min: many}",
            "config.conf:4: KubeProxyConfiguration.linux.conntrack.min: invalid type: string \"many\", expected i32",
        ),
        (
            "nodeIPOverride: 192.0.2.1",
            "config.conf:3: KubeProxyConfiguration.nodeIPOverride: must be a list of texts",
        ),
        (
            "linux: {oomScoreAdj: 5000}",
            "KubeProxyConfiguration.linux.oomScoreAdj: Invalid value: 5000: must be within the range [-1000, 1000]",
        ),
        (
            "minSyncPeriod: -1s",
            "KubeProxyConfiguration.minSyncPeriod: Invalid value: -1s: must be greater than or equal to 0",
        ),
        (
            "mode: ipvs\nsyncPeriod: 1s\nminSyncPeriod: 2s",
            "KubeProxyConfiguration.syncPeriod: Invalid value: 1s: must be greater than or equal to minSyncPeriod",
        ),
    ] {
        assert_eq!(
            ConfigFile::new(&format!("{V1ALPHA2}{fields}\n")).error(""),
            want,
            "{fields}"
        );
    }
    let lenient = ConfigFile::new(&format!(
        "{V1ALPHA2}configHardFail: false\nfuture: 1\nmode: nftables\n"
    ));
    let configuration = lenient.load("").unwrap();
    assert_eq!(
        (
            configuration.remarks.doubtful_fields.len(),
            configuration.kube_proxy.mode.as_str()
        ),
        (1, "nftables")
    );
}
