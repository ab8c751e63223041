//! Tests of files, and of files together with flags.

use std::fs;
use std::time::Duration;

use proxy_common::frontend::Algorithm;

use super::{ConfigFile, Configuration, load, run_args, settings};
use crate::config::kube_proxy::KubeProxyConfiguration;
use crate::config::node_ports::NodePortAddresses;
use crate::node::Masquerade;
use crate::settings::{Mode, Settings};

const KPX: &str = "apiVersion: kpx.dev/v1alpha1\nkind: KpxConfiguration\n";

#[test]
fn file_sets_the_same_as_flags() {
    let cases = [
        ("", ""),
        (
            "clusterCIDR: 10.244.0.0/16,fd00::/48",
            "--cluster-cidr=10.244.0.0/16,fd00::/48",
        ),
        ("detectLocalMode: NodeCIDR", "--detect-local-mode NodeCIDR"),
        (
            "{detectLocalMode: BridgeInterface, detectLocal: {bridgeInterface: cni0}}",
            "--detect-local-mode BridgeInterface --pod-bridge-interface cni0",
        ),
        (
            "nodePortAddresses: [10.0.0.0/8]",
            "--nodeport-addresses=10.0.0.0/8",
        ),
        ("mode: nftables", "--proxy-mode=nftables"),
        (
            "{mode: nftables, nodePortAddresses: []}",
            "--nodeport-addresses=primary --proxy-mode=nftables",
        ),
        (
            "{mode: nftables, nftables: {masqueradeAll: true, syncPeriod: 1m}}",
            "--proxy-mode=nftables --masquerade-all --iptables-sync-period=60s",
        ),
        (
            "{mode: ipvs, ipvs: {syncPeriod: 7s}, iptables: {masqueradeAll: true}}",
            "--proxy-mode=ipvs --ipvs-sync-period=7s --masquerade-all",
        ),
        (
            "{mode: ipvs, ipvs: {scheduler: sed}}",
            "--proxy-mode=ipvs --ipvs-scheduler=sed",
        ),
        ("mode: ipvs", "--proxy-mode=ipvs --lb-algorithm=round-robin"),
        (
            "{mode: ipvs, ipvs: {excludeCIDRs: [10.9.0.0/16, 'fd09::/64']}}",
            "--proxy-mode=ipvs --ipvs-exclude-cidrs=10.9.0.0/16,fd09::/64",
        ),
        (
            "iptables: {minSyncPeriod: 1s500ms}",
            "--iptables-min-sync-period=1.5s",
        ),
        ("bindAddress: 192.0.2.7", "--bind-address=192.0.2.7"),
        ("bindAddress: '2001:db8::7'", "--bind-address=2001:db8::7"),
        (
            "healthzBindAddress: 192.0.2.7",
            "--healthz-bind-address=192.0.2.7:10256",
        ),
        (
            "metricsBindAddress: '0.0.0.0:9249'",
            "--metrics-bind-address=0.0.0.0 --metrics-port=9249",
        ),
        (
            "metricsBindAddress: '127.0.0.1:9249'",
            "--metrics-port=9249",
        ),
        ("metricsBindAddress: 0.0.0.0:0", "--metrics-bind-address="),
        ("healthzBindAddress: ':0'", "--healthz-port=0"),
        (
            "conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, udpTimeout: 30s, tcpBeLiberal: true}",
            "--conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-udp-timeout=30s --conntrack-tcp-be-liberal",
        ),
        ("oomScoreAdj: 5", "--oom-score-adj=5"),
        ("oomScoreAdj: 0", "--oom-score-adj 0"),
        (
            "clientConnection: {kubeconfig: /etc/k, qps: -1}",
            "--kubeconfig=/etc/k --kube-api-qps=-1",
        ),
        ("bindAddressHardFail: true", "--bind-address-hard-fail"),
    ];
    for (fields, line) in cases {
        let file = if fields.starts_with('{') {
            let fields = fields.trim_matches(['{', '}']);
            let kind = "apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration";
            ConfigFile::new(&format!(
                "{{{kind}, {fields}{}",
                if fields.ends_with(' ') {
                    ""
                } else {
                    closing(fields)
                }
            ))
        } else {
            ConfigFile::kube_proxy(fields)
        };
        assert_eq!(
            comparable(file.settings("")),
            comparable(settings(line)),
            "{fields}"
        );
    }
}

/// Returns `fields`' closing brackets, and one more.
fn closing(fields: &str) -> &'static str {
    let open = fields.matches('{').count() - fields.matches('}').count();
    &"}}}"[..=open]
}

fn comparable(settings: Settings) -> Settings {
    Settings {
        files: Default::default(),
        configz: Default::default(),
        ..settings
    }
}

#[test]
fn addresses_follow_the_family_of_the_bind_address() {
    for (fields, healthz, metrics) in [
        ("", Some("0.0.0.0:10256"), Some("127.0.0.1:10249")),
        ("bindAddress: '::'", Some("[::]:10256"), Some("[::1]:10249")),
        (
            "bindAddress: 'fd00::7'\nmetricsBindAddress: '::'",
            Some("[::]:10256"),
            Some("[::]:10249"),
        ),
        (
            "healthzBindAddress: '[fd00::1]:7'\nmetricsBindAddress: '[fd00::1]'",
            Some("[fd00::1]:7"),
            Some("[fd00::1]:10249"),
        ),
        (
            "healthzBindAddress: 0.0.0.0:0\nmetricsBindAddress: '[::]:0'",
            None,
            None,
        ),
    ] {
        let settings = ConfigFile::kube_proxy(fields).settings("");
        let address = |text: Option<&str>| text.map(|text| text.parse().unwrap());
        assert_eq!(
            (settings.healthz_address, settings.metrics_address),
            (address(healthz), address(metrics)),
            "{fields}"
        );
    }
    let node_ips = |fields| ConfigFile::kube_proxy(fields).settings("").node.node_ips;
    assert!(
        node_ips("bindAddress: '::'").is_empty(),
        "the unspecified address is no node's"
    );
    assert_eq!(
        node_ips("bindAddress: 192.0.2.7"),
        ["192.0.2.7".parse::<std::net::IpAddr>().unwrap()]
    );
}

#[test]
fn one_file_or_two_hold_documents_of_both_kinds() {
    let kube_proxy = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n";
    let kpx = format!("{KPX}masquerade: compat\nmode: host\n");
    let mut primary = NodePortAddresses::default();
    assert!(primary.add("primary"));
    let one = ConfigFile::new(&format!("# both\n---\n{kpx}---\n{kube_proxy}---\n")).settings("");
    assert_eq!(
        (one.mode, one.node.masquerade),
        (Mode::Host, Masquerade::Compat)
    );
    assert_eq!(one.node.node_ports, primary);
    let first = ConfigFile::new(kube_proxy);
    let second = ConfigFile::new(&kpx);
    let two = first.settings(&format!("--kpx-config {}", second.path.display()));
    assert_eq!(comparable(two), comparable(one.clone()));
    let json = r#"{"kind":"KubeProxyConfiguration","apiVersion":"kubeproxy.config.k8s.io/v1alpha1","mode":"nftables"}
                  {"kind":"KpxConfiguration","apiVersion":"kpx.dev/v1alpha1","masquerade":"compat","mode":"host"}"#;
    assert_eq!(
        comparable(ConfigFile::new(json).settings("")),
        comparable(one)
    );
    let alone = second.path.display();
    let own = load(&format!(
        "--kpx-config {alone} --proxy-mode=nftables --node-name n1 --masquerade=default"
    ))
    .unwrap();
    assert_eq!(
        own.settings().unwrap().node.masquerade,
        Masquerade::Default,
        "kpx's flags go before its file"
    );
    assert_eq!(
        own.kube_proxy.mode, "nftables",
        "kube-proxy's flags count without --config"
    );
}

/// In YAML 1.1, which Helm and kpx read, some unquoted words are booleans.
#[test]
fn words_on_and_off_need_no_quotes() {
    let kpx = |fields: &str| {
        let file = ConfigFile::new(&format!("{KPX}{fields}\n"));
        load(&format!("--kpx-config {}", file.path.display()))
    };
    let own = kpx("fastPath: on\npodRoutes: off\nsocketLB: off\nbackendHealth: on")
        .unwrap()
        .kpx;
    let quoted = "fastPath: 'on'\npodRoutes: 'off'\nsocketLB: 'off'\nbackendHealth: 'on'";
    assert_eq!(own, kpx(quoted).unwrap().kpx);
    let error = format!("{:#}", kpx("masquerade: off").unwrap_err());
    assert!(
        error.contains(
            "KpxConfiguration.masquerade: Invalid value: \"off\": must be one of default, compat"
        ),
        "{error}"
    );
}

#[test]
fn file_overrides_all_flags_but_a_few() {
    let file =
        ConfigFile::kube_proxy("hostnameOverride: file\nlogging: {verbosity: 1}\nmode: ipvs\n");
    let line =
        "--hostname-override=Flag --v=4 --logging-format=json --proxy-mode=nftables --masquerade-all --healthz-port=1
                --cluster-ip-external --iptables-masquerade-bit=3 --master=https://10.0.0.1:6443 --vmodule=a=1";
    let configuration = file.load(line).unwrap();
    let settings = configuration.settings().unwrap();
    assert_eq!(settings.node_name, "flag");
    assert_eq!(
        (
            configuration.kube_proxy.logging.verbosity,
            configuration.kube_proxy.logging.format.as_str()
        ),
        (4, "json")
    );
    assert_eq!(configuration.kube_proxy.mode, "ipvs");
    assert_eq!(configuration.kpx.master, "https://10.0.0.1:6443");
    assert!(settings.node.cluster_ip_external && !settings.node.masquerade_all);
    assert_eq!(
        settings.healthz_address,
        Some("0.0.0.0:10256".parse().unwrap())
    );
    assert_eq!(
        configuration.remarks.overruled_flags,
        ["healthz-port", "proxy-mode", "masquerade-all"]
    );
    assert_eq!(
        configuration.remarks.ignored_flags,
        ["iptables-masquerade-bit", "vmodule"]
    );
}

#[test]
fn strict_decoding_gives_way_to_lenient_with_a_warning() {
    let file = ConfigFile::kube_proxy(
        "mode: ipvs\nfuture: {deep: 1}\niptables:\n  syncPeriod: 40s\n  snat: [1]\nmode: nftables\n",
    );
    let configuration = file.load("").unwrap();
    let doubtful: Vec<_> = configuration
        .remarks
        .doubtful_fields
        .iter()
        .map(|field| field.replace(&format!("{}/", file.folder.path().display()), ""))
        .collect();
    assert_eq!(
        doubtful,
        [
            "KubeProxyConfiguration.future (config.conf:4): unknown field",
            "KubeProxyConfiguration.iptables.snat (config.conf:7): unknown field",
            "KubeProxyConfiguration.mode (config.conf:8): given more than once, the last one counts",
        ]
    );
    assert_eq!(configuration.kube_proxy.mode, "nftables");
    assert_eq!(
        configuration.kube_proxy.iptables.sync_period.std(),
        Some(Duration::from_secs(40))
    );

    let gates = ConfigFile::kube_proxy("featureGates: {TopologyAwareHints: true, Flying: false}")
        .load("")
        .unwrap();
    assert_eq!(gates.remarks.unknown_feature_gates, ["Flying"]);
}

#[test]
fn host_mode_keeps_the_hosts_connection_tracking() {
    assert_eq!(settings("--mode host").conntrack, Default::default());
    let explicit = settings("--mode host --conntrack-min=7 --conntrack-max-per-core=3").conntrack;
    assert_eq!(
        (
            explicit.max_per_core,
            explicit.min,
            explicit.tcp_established_timeout
        ),
        (Some(3), Some(7), None)
    );
}

#[test]
fn written_configuration_can_be_read() {
    let lines = [
        "",
        "--proxy-mode=nftables -v=3 --healthz-bind-address= --metrics-port=0",
        "--masquerade compat --node-ip 192.0.2.1,fd00::1 --service-cidr=10.96.0.0/12 --ui --flow-table-size 4096",
        "--feature-gates=A=true,B=false --conntrack-max-per-core=0 --kube-api-qps=0.5 --bind-address=fd00::7",
        "--mode host --manifests /tmp/x",
    ];
    for line in lines {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("written.yaml");
        let configuration = load(&format!("--node-name n1 {line}")).unwrap();
        configuration.write_to(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(
            text.contains("KpxConfiguration"),
            configuration.kpx != Default::default(),
            "{line}"
        );
        let args = run_args(&format!("--config {}", path.display())).unwrap();
        let again = Configuration::load(&args).unwrap_or_else(|error| panic!("{line}: {error:#}"));
        assert_eq!(again.remarks.doubtful_fields, [""; 0], "{line}");
        assert_eq!(again.to_yaml().unwrap(), text, "{line}");
        let [was, is] =
            [configuration, again].map(|configuration| configuration.settings().unwrap());
        assert_eq!(
            Settings {
                files: Default::default(),
                ..is
            },
            was,
            "{line}"
        );
    }
    assert_ne!(
        KubeProxyConfiguration::default().healthz_bind_address,
        settings("").configz["kubeproxy.config.k8s.io"]["HealthzBindAddress"]
    );
}

#[tokio::test]
async fn changed_file_is_noticed_and_touched_file_is_not() {
    let file = ConfigFile::kube_proxy("mode: ipvs\n");
    let text = fs::read_to_string(&file.path).unwrap();
    let files = file.load("").unwrap().files;
    let mut changed = tokio::spawn({
        let files = files.clone();
        async move { files.changed().await }
    });
    fs::write(file.folder.path().join("neighbour"), "x").unwrap();
    fs::write(file.folder.path().join("new"), &text).unwrap();
    fs::rename(file.folder.path().join("new"), &file.path).unwrap();
    still_waits(&mut changed).await;
    fs::write(
        file.folder.path().join("new"),
        text.replace("ipvs", "nftables"),
    )
    .unwrap();
    fs::rename(file.folder.path().join("new"), &file.path).unwrap();
    assert_eq!(
        within_time(changed).await,
        format!("{} has changed", file.path.display())
    );

    fs::remove_file(&file.path).unwrap();
    let gone = files.changed().await;
    assert!(gone.contains("is no longer readable"), "{gone}");
}

/// Replaces files like the kubelet: `config.conf` links to `..data/config.conf`, and `..data` links
/// to a directory that is replaced.
#[tokio::test]
async fn changed_config_map_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let inside = |name: &str| folder.path().join(name);
    let version = |name: &str, mode: &str| {
        fs::create_dir(inside(name)).unwrap();
        let kind = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration";
        fs::write(
            inside(name).join("config.conf"),
            format!("{kind}\nmode: {mode}\n"),
        )
        .unwrap();
        std::os::unix::fs::symlink(name, inside("..data_tmp")).unwrap();
        fs::rename(inside("..data_tmp"), inside("..data")).unwrap();
    };
    version("..1", "ipvs");
    std::os::unix::fs::symlink("..data/config.conf", inside("config.conf")).unwrap();
    let path = inside("config.conf");
    let files = load(&format!("--config {}", path.display())).unwrap().files;
    let mut changed = tokio::spawn(async move { files.changed().await });
    version("..2", "ipvs");
    fs::remove_dir_all(inside("..1")).unwrap();
    still_waits(&mut changed).await;
    version("..3", "nftables");
    assert_eq!(
        within_time(changed).await,
        format!("{} has changed", path.display())
    );
}

/// Waits long enough for inotify to wake the task.
async fn still_waits<T>(task: &mut tokio::task::JoinHandle<T>) {
    assert!(
        tokio::time::timeout(Duration::from_millis(200), task)
            .await
            .is_err(),
        "nothing has changed"
    );
}

async fn within_time<T>(task: tokio::task::JoinHandle<T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), task)
        .await
        .expect("noticed in time")
        .unwrap()
}

#[test]
fn fields_of_mode_ipvs_are_obeyed_mapped_or_named() {
    let fields =
        "mode: ipvs\nipvs: {scheduler: sh, strictARP: true, tcpTimeout: 15m, udpTimeout: 0s}\n";
    let file = ConfigFile::kube_proxy(fields);
    let configuration = file.load("--node-name n1").unwrap();
    let named: Vec<_> = configuration
        .remarks
        .fields_without_effect
        .iter()
        .map(|(field, _)| *field)
        .collect();
    assert_eq!(named, ["ipvs.tcpTimeout", "ipvs.strictARP"]);
    let settings = configuration.settings().unwrap();
    assert_eq!(settings.model.algorithm, Algorithm::MAGLEV);
    assert!(
        settings.node.notices[0].starts_with("ipvs.scheduler sh: served by the algorithm maglev: ")
    );

    let own = file.settings("--lb-algorithm random");
    assert_eq!(
        (own.model.algorithm, own.node.notices.len()),
        (Algorithm::RANDOM, 0),
        "the operator chooses"
    );
    let other_mode =
        ConfigFile::kube_proxy(&fields.replace("mode: ipvs", "mode: nftables")).settings("");
    assert_eq!(
        (other_mode.model.algorithm, other_mode.node.notices.len()),
        (Algorithm::RANDOM, 0)
    );
}
