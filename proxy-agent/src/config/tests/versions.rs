//! Tests of Kubernetes versions: feature gates, the default mode.

use super::{ConfigFile, load, settings};
use crate::config::node_ports::{Localhost, NodePortAddresses};

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
    let file = ConfigFile::kube_proxy(
        "---\nkind: KpxConfiguration\napiVersion: kpx.dev/v1alpha1\nkubernetesVersion: '1.40'",
    );
    assert_eq!(file.load("").unwrap().kube_proxy.mode, "nftables");
}
