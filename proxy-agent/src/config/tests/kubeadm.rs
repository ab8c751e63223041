//! Tests of kubeadm's ConfigMap kube-proxy, which has every API field, most of them empty.

use std::time::Duration;

use super::ConfigFile;
use crate::config::Remarks;
use crate::config::node_ports::Localhost;
use crate::node::NodeOptions;
use crate::node::detect::Detector;
use crate::settings::{Conntrack, Mode};
use proxy_source::{Source, kubernetes};

pub(super) const CONFIG: &str = r#"apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"#;

#[test]
fn kubeadms_configuration_means_defaults() {
    let file = ConfigFile::new(CONFIG);
    let configuration = file.load("--hostname-override=Node-1 -v=2").unwrap();
    let remarks = Remarks {
        awaits_mode: true,
        ..Remarks::default()
    };
    assert_eq!(configuration.remarks, remarks, "nothing in it is doubtful");
    let no_file = super::load("--hostname-override=Node-1").unwrap();
    assert!(!no_file.remarks.awaits_mode, "kpx needs no mode");
    let settings = configuration.settings().unwrap();

    assert_eq!(settings.node_name, "node-1");
    assert_eq!(settings.mode, Mode::Node);
    let detector = Detector::ClusterCidr(vec!["10.244.0.0/16".parse().unwrap()]);
    assert_eq!(
        settings.node,
        NodeOptions {
            detector,
            localhost: Localhost::Included,
            ..NodeOptions::default()
        }
    );
    let kubeconfig = Some("/var/lib/kube-proxy/kubeconfig.conf".into());
    let rate = kubernetes::Rate::new(5.0, 10);
    let source = kubernetes::Options {
        kubeconfig,
        rate,
        pods: true,
        ..kubernetes::Options::default()
    };
    assert_eq!(settings.source, Source::Kubernetes(source));
    assert_eq!(
        settings.healthz_address,
        Some("0.0.0.0:10256".parse().unwrap())
    );
    assert_eq!(
        settings.metrics_address,
        Some("127.0.0.1:10249".parse().unwrap())
    );
    assert_eq!(
        [settings.sync_period, settings.min_sync_period],
        [Duration::from_secs(30), Duration::ZERO]
    );
    assert_eq!(settings.oom_score_adj, Some(-999));
    let conntrack = Conntrack {
        max_per_core: Some(32_768),
        min: Some(131_072),
        tcp_established_timeout: Some(Duration::from_secs(86_400)),
        tcp_close_wait_timeout: Some(Duration::from_secs(3_600)),
        ..Conntrack::default()
    };
    assert_eq!(settings.conntrack, conntrack);
    let configz = &settings.configz["kubeproxy.config.k8s.io"];
    assert_eq!(
        configz["Linux"]["Conntrack"]["TCPEstablishedTimeout"],
        "24h0m0s"
    );
    assert_eq!(
        configz["ClientConnection"]["ContentType"],
        "application/vnd.kubernetes.protobuf"
    );
    assert_eq!(configz["Logging"]["verbosity"], 2);
    assert_eq!(settings.configz["kpx.dev"]["masquerade"], "default");
}
