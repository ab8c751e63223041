//! The configuration for `/configz`. kube-proxy's part uses kube-proxy's internal field names.

use serde_json::{Value, json};

use super::{KpxConfiguration, KubeProxyConfiguration};

pub(super) fn configz(kube_proxy: &KubeProxyConfiguration, kpx: &KpxConfiguration) -> Value {
    json!({"kubeproxy.config.k8s.io": internal(kube_proxy), "kpx.dev": kpx.without_secrets()})
}

fn internal(config: &KubeProxyConfiguration) -> Value {
    let common = config.common();
    let connection = &config.client_connection;
    let cluster_cidrs: Vec<_> = config
        .cluster_cidr
        .split(',')
        .filter(|cidr| !cidr.is_empty())
        .collect();
    json!({
        "Linux": {
            "Conntrack": conntrack(config),
            "MasqueradeAll": common.masquerade_all,
            "OOMScoreAdj": config.oom_score_adj,
        },
        "Windows": {"RunAsService": config.windows_run_as_service},
        "FeatureGates": config.feature_gates,
        "ClientConnection": {
            "Kubeconfig": connection.kubeconfig,
            "AcceptContentTypes": connection.accept_content_types,
            "ContentType": connection.content_type,
            "QPS": connection.qps,
            "Burst": connection.burst,
        },
        // Only `Logging` has the same field names inside as in files.
        "Logging": config.logging,
        "HostnameOverride": config.hostname_override,
        "BindAddress": config.bind_address,
        "HealthzBindAddress": config.healthz_bind_address,
        "MetricsBindAddress": config.metrics_bind_address,
        "BindAddressHardFail": config.bind_address_hard_fail,
        "EnableProfiling": config.enable_profiling,
        "ShowHiddenMetricsForVersion": config.show_hidden_metrics_for_version,
        "Mode": config.mode,
        "IPTables": {
            "MasqueradeBit": config.iptables.masquerade_bit,
            "LocalhostNodePorts": config.iptables.localhost_node_ports,
        },
        "IPVS": {
            "Scheduler": config.ipvs.scheduler,
            "ExcludeCIDRs": config.ipvs.exclude_cidrs,
            "StrictARP": config.ipvs.strict_arp,
            "TCPTimeout": config.ipvs.tcp_timeout,
            "TCPFinTimeout": config.ipvs.tcp_fin_timeout,
            "UDPTimeout": config.ipvs.udp_timeout,
        },
        "Winkernel": {
            "NetworkName": config.winkernel.network_name,
            "SourceVip": config.winkernel.source_vip,
            "EnableDSR": config.winkernel.enable_dsr,
            "RootHnsEndpointName": config.winkernel.root_hns_endpoint_name,
            "ForwardHealthCheckVip": config.winkernel.forward_health_check_vip,
        },
        "NFTables": {"MasqueradeBit": config.nftables.masquerade_bit},
        "DetectLocalMode": config.detect_local_mode,
        "DetectLocal": {
            "BridgeInterface": config.detect_local.bridge_interface,
            "ClusterCIDRs": cluster_cidrs,
            "InterfaceNamePrefix": config.detect_local.interface_name_prefix,
        },
        "NodePortAddresses": config.node_port_addresses,
        "SyncPeriod": common.sync_period,
        "MinSyncPeriod": common.min_sync_period,
        "ConfigSyncPeriod": config.config_sync_period,
    })
}

fn conntrack(config: &KubeProxyConfiguration) -> Value {
    let conntrack = &config.conntrack;
    json!({
        "MaxPerCore": conntrack.max_per_core,
        "Min": conntrack.min,
        "TCPEstablishedTimeout": conntrack.tcp_established_timeout,
        "TCPCloseWaitTimeout": conntrack.tcp_close_wait_timeout,
        "TCPBeLiberal": conntrack.tcp_be_liberal,
        "UDPTimeout": conntrack.udp_timeout,
        "UDPStreamTimeout": conntrack.udp_stream_timeout,
    })
}
