//! Tests of invalid values and their errors.

use super::{ConfigFile, Trace, load};
use clap::Parser as _;

/// The fields of a KubeProxyConfiguration, and their errors.
const CASES: &[(&str, &str)] = &[
    (
        "bindAddress: nowhere",
        r#"bindAddress: Invalid value: "nowhere": not a valid textual representation of an IP address"#,
    ),
    (
        "metricsBindAddress: 127.0.0.1:65536",
        r#"metricsBindAddress: Invalid value: "127.0.0.1:65536": must be IP:port, with a port from 1 to 65535, or 0 for none"#,
    ),
    (
        "healthzBindAddress: localhost:80",
        r#"healthzBindAddress: Invalid value: "localhost:80": must be IP:port, with a port from 1 to 65535, or 0 for none"#,
    ),
    (
        "mode: userspace",
        r#"mode: Invalid value: "userspace": must be iptables, ipvs, nftables, ebpf or blank; kpx uses eBPF in all of them"#,
    ),
    (
        "iptables: {syncPeriod: -1s, minSyncPeriod: -2s}",
        "iptables.syncPeriod: Invalid value: -1s: must be greater than 0\n  KubeProxyConfiguration.iptables.minSyncPeriod: Invalid value: -2s: must be greater than or equal to 0",
    ),
    (
        "iptables: {syncPeriod: 1s, minSyncPeriod: 2s}",
        "iptables.syncPeriod: Invalid value: 1s: must be greater than or equal to iptables.minSyncPeriod",
    ),
    (
        "mode: nftables\nnftables: {syncPeriod: 1s, minSyncPeriod: 2s}",
        "nftables.syncPeriod: Invalid value: 1s: must be greater than or equal to nftables.minSyncPeriod",
    ),
    (
        "iptables: {masqueradeBit: 32}",
        "iptables.masqueradeBit: Invalid value: 32: must be within the range [0, 31]",
    ),
    (
        "mode: ipvs\nipvs: {scheduler: best}",
        r#"ipvs.scheduler: Invalid value: "best": must be one of rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh, ovf, fo"#,
    ),
    (
        "mode: ipvs\nipvs: {tcpTimeout: -1s}",
        "ipvs.tcpTimeout: Invalid value: -1s: must be greater than or equal to 0",
    ),
    (
        "mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/8, x]}",
        r#"ipvs.excludeCIDRs[1]: Invalid value: "x": must be a CIDR"#,
    ),
    (
        "oomScoreAdj: 1001",
        "oomScoreAdj: Invalid value: 1001: must be within the range [-1000, 1000]",
    ),
    (
        "configSyncPeriod: -1s",
        "configSyncPeriod: Invalid value: -1s: must be greater than 0",
    ),
    (
        "clientConnection: {burst: -1}",
        "clientConnection.burst: Invalid value: -1: must be greater than or equal to 0",
    ),
    (
        "clusterCIDR: 10.0.0.0",
        r#"clusterCIDR: Invalid value: "10.0.0.0": must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"#,
    ),
    (
        "clusterCIDR: 10.0.0.0/16,10.1.0.0/16",
        r#"clusterCIDR: Invalid value: "10.0.0.0/16,10.1.0.0/16": must be a CIDR of each family at most (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)"#,
    ),
    (
        "conntrack: {min: -1}",
        "conntrack.min: Invalid value: -1: must be greater than or equal to 0",
    ),
    (
        "conntrack: {udpStreamTimeout: -5s}",
        "conntrack.udpStreamTimeout: Invalid value: -5s: must be greater than or equal to 0",
    ),
    (
        "nodePortAddresses: [10.0.0.1]",
        r#"nodePortAddresses[0]: Invalid value: "10.0.0.1": must be a CIDR (e.g. 10.0.0.0/8), `primary`, `localhost` or `all`"#,
    ),
    (
        "nodePortAddresses: [primary, loopback, localhost]",
        r#"nodePortAddresses[1]: Invalid value: "loopback": must be a CIDR (e.g. 10.0.0.0/8), `primary`, `localhost` or `all`"#,
    ),
    (
        "featureGates: {AllowServiceExternalIps: false}",
        "featureGates.AllowServiceExternalIps: Invalid value: false: unknown feature gate; did you mean AllowServiceExternalIPs?",
    ),
    (
        "detectLocalMode: Guess",
        r#"detectLocalMode: Invalid value: "Guess": must be one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix"#,
    ),
    (
        "detectLocalMode: BridgeInterface",
        r#"detectLocal.bridgeInterface: Invalid value: "": must be the name of a device, of 1 to 15 bytes, in this detectLocalMode"#,
    ),
    (
        "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: abcdefghijklmnop}",
        r#"detectLocal.interfaceNamePrefix: Invalid value: "abcdefghijklmnop": must be the name of a device, of 1 to 15 bytes, in this detectLocalMode"#,
    ),
    (
        "logging: {format: xml}",
        r#"logging.format: Invalid value: "xml": must be text or json"#,
    ),
];

#[test]
fn every_wrong_field_is_named() {
    for (fields, want) in CASES {
        let error = ConfigFile::kube_proxy(fields).error("");
        assert_eq!(
            error.trim_start_matches("2 fields of the configuration are invalid:\n  "),
            format!("KubeProxyConfiguration.{want}")
        );
    }
}

#[test]
fn every_wrong_field_of_kpx_is_named() {
    let cases = [
        (
            "masquerade: some",
            r#"masquerade: Invalid value: "some": must be one of default, compat"#,
        ),
        (
            "lbAlgorithm: fair",
            r#"lbAlgorithm: Invalid value: "fair": must be one of random, maglev, round-robin, least-connections"#,
        ),
        (
            "mode: guest",
            r#"mode: Invalid value: "guest": must be one of node, host"#,
        ),
        (
            "socketLB: pods",
            r#"socketLB: Invalid value: "pods": must be one of off, auto, host, all"#,
        ),
        (
            "socketLB: 'off'\nsocketLBUDP: true",
            "socketLBUDP: Invalid value: true: is not for socketLB off",
        ),
        (
            "mode: host\ncgroupRoot: /sys/fs/cgroup",
            r#"cgroupRoot: Invalid value: "/sys/fs/cgroup": needs socketLB host or all in host mode"#,
        ),
        (
            "socketLB: host\ncgroupRoot: here",
            r#"cgroupRoot: Invalid value: "here": must be the full path of a folder"#,
        ),
        (
            "attach: nail",
            r#"attach: Invalid value: "nail": must be one of tcx, clsact"#,
        ),
        (
            "nodeIPs: [10.0.0.1/8]",
            r#"nodeIPs[0]: Invalid value: "10.0.0.1/8": must be an IP address"#,
        ),
        (
            "serviceCIDRs: ['::/0', x]",
            r#"serviceCIDRs[1]: Invalid value: "x": must be a CIDR"#,
        ),
        (
            "kubernetesVersion: latest",
            r#"kubernetesVersion: Invalid value: "latest": must be a version of Kubernetes (e.g. 1.38)"#,
        ),
        (
            "runDir: ''",
            r#"runDir: Invalid value: "": must be a folder"#,
        ),
        (
            "manifests: /m\ncontext: c",
            r#"manifests: Invalid value: "/m": cannot be used with an API server: a kubeconfig, a context of one, or a master"#,
        ),
    ];
    for (fields, want) in cases {
        let file = ConfigFile::new(&format!(
            "apiVersion: kpx.dev/v1alpha1\nkind: KpxConfiguration\n{fields}\n"
        ));
        let error = load(&format!("--kpx-config {}", file.path.display()))
            .map(|_| ())
            .unwrap_err();
        assert_eq!(format!("{error:#}"), format!("KpxConfiguration.{want}"));
    }
}

#[test]
fn all_errors_are_listed_with_their_flags() {
    let error = load(
        "--bind-address=x --oom-score-adj=-2000 --lb-algorithm=random --attach=tcx --node-ip=1.2.3 --cluster-cidr=y",
    );
    assert_eq!(
        format!("{:#}", error.map(|_| ()).unwrap_err()),
        r#"4 fields of the configuration are invalid:
  KubeProxyConfiguration.bindAddress (--bind-address): Invalid value: "x": not a valid textual representation of an IP address
  KubeProxyConfiguration.clusterCIDR (--cluster-cidr): Invalid value: "y": must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)
  KubeProxyConfiguration.oomScoreAdj (--oom-score-adj): Invalid value: -2000: must be within the range [-1000, 1000]
  KpxConfiguration.nodeIPs[0] (--node-ip): Invalid value: "1.2.3": must be an IP address"#
    );
    let file = ConfigFile::kube_proxy("mode: x\n").error("--proxy-mode=y --v=1");
    assert!(
        file.starts_with(r#"KubeProxyConfiguration.mode: Invalid value: "x""#),
        "the flag does not count: {file}"
    );
    let large = load("--conntrack-min=99999999999").map(|_| ()).unwrap_err();
    let want = "KubeProxyConfiguration.conntrack.min (--conntrack-min): invalid value: integer `99999999999`, expected i32";
    assert_eq!(format!("{large:#}"), want);
    let port = format!(
        "{:#}",
        load("--healthz-port=70000").map(|_| ()).unwrap_err()
    );
    assert!(
        port.starts_with(
            r#"KubeProxyConfiguration.healthzBindAddress (--healthz-port): Invalid value: ":70000""#
        ),
        "{port}"
    );
    let args = Trace::try_parse_from(["trace", "--nodeport-addresses", "x"])
        .unwrap()
        .args;
    let trace = format!("{:#}", args.options().unwrap_err());
    assert!(
        trace.starts_with("KubeProxyConfiguration.nodePortAddresses[0] (--nodeport-addresses): "),
        "{trace}"
    );
}

#[test]
fn wrong_types_and_documents_are_named_with_their_lines() {
    let kind = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let cases = [
        (
            format!("{kind}iptables:\n  syncPeriod: 30\n"),
            r#"config.conf:4: KubeProxyConfiguration.iptables.syncPeriod: invalid type: integer `30`, expected a duration such as "30s", "15m0s" or "1h""#,
        ),
        (
            format!("{kind}configSyncPeriod: soon\n"),
            r#"config.conf:3: KubeProxyConfiguration.configSyncPeriod: invalid value: string "soon", expected a duration such as "30s", "15m0s" or "1h""#,
        ),
        (
            format!("{kind}nodePortAddresses:\n- 10.0.0.0/8\n- 10\n"),
            "config.conf:5: KubeProxyConfiguration.nodePortAddresses[1]: invalid type: integer `10`, expected a string",
        ),
        (
            format!("{kind}future: 1\nbindAddressHardFail: 'yes'\n"),
            r#"config.conf:4: KubeProxyConfiguration.bindAddressHardFail: invalid type: string "yes", expected a boolean"#,
        ),
        (
            format!("{kind}conntrack: {{min: 1.5}}"),
            "config.conf:3: KubeProxyConfiguration.conntrack.min: invalid type: floating point `1.5`, expected i32",
        ),
        (
            "kind: KubeProxyConfiguration\n".into(),
            r#"config.conf:1: unknown kind "KubeProxyConfiguration" of apiVersion ""; expected KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1 or KpxConfiguration of kpx.dev/v1alpha1"#,
        ),
        (
            kind.replace("v1alpha1", "v1alpha2"),
            r#"config.conf:2: unknown kind "KubeProxyConfiguration" of apiVersion "kubeproxy.config.k8s.io/v1alpha2"; expected KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1 or KpxConfiguration of kpx.dev/v1alpha1"#,
        ),
        (
            format!("{kind}---\n{kind}"),
            "config.conf:5: a second KubeProxyConfiguration",
        ),
        (
            format!("{kind}---\na: [\n"),
            "config.conf:4: unclosed bracket '['",
        ),
        (
            "# nothing\n".into(),
            "config.conf: has no KubeProxyConfiguration: --kpx-config takes files without",
        ),
        (
            "- 1\n".into(),
            r#"config.conf:1: unknown kind "" of apiVersion ""; expected KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1 or KpxConfiguration of kpx.dev/v1alpha1"#,
        ),
    ];
    for (text, want) in cases {
        assert_eq!(ConfigFile::new(&text).error(""), want, "{text}");
    }
    let file = ConfigFile::kube_proxy("");
    let error = load(&format!("--kpx-config {}", file.path.display()))
        .map(|_| ())
        .unwrap_err();
    assert!(
        format!("{error:#}").ends_with("a KubeProxyConfiguration belongs to --config"),
        "{error:#}"
    );
    let missing = format!("{:#}", load("--config /nowhere/x").map(|_| ()).unwrap_err());
    assert!(missing.starts_with("read /nowhere/x: "), "{missing}");
}
