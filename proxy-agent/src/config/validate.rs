//! Checks a configuration and resolves it. Reports every invalid field.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

use super::choice;
use super::invalid::{Fields, Invalid, Shown};
use super::ipvs;
use super::kpx::KpxConfiguration;
use super::kube_proxy::{Common, Ipvs, KubeProxyConfiguration, NFTABLES};
use crate::config::duration::GoDuration;
use crate::config::gates::Gates;
use crate::config::kube_version::KubeVersion;
use crate::config::node_ports::{Localhost, NodePortAddresses};
use crate::names::NamesOptions;
use crate::node::detect::Detector;
use crate::node::{FastPath, Masquerade, NodeOptions};
use crate::settings::{Conntrack, Mode, PodRoutes, SocketLb, Tunnel};
use proxy_core::model::{ExternalForwarding, HostRoutes, ModelOptions};
use proxy_datapath::SocketOptions;
use proxy_dns::Zone;
use proxy_view::DNS_ADDRESS;

/// The maximum length of a device's name in bytes: `IFNAMSIZ` without its final zero.
const DEVICE_NAME_MAX: usize = 15;
/// The maximum number of packets of a kind that the monitor keeps: up to 100 MiB.
const MONITOR_HISTORY_MAX: u32 = 100_000;

/// The checked fields of both documents.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) node: NodeOptions,
    pub(super) model: ModelOptions,
    pub(super) healthz_address: Option<SocketAddr>,
    pub(super) metrics_address: Option<SocketAddr>,
    pub(super) conntrack: Conntrack,
    pub(super) common: Common,
    pub(super) sockets: Option<SocketOptions>,
    pub(super) names: Option<NamesOptions>,
    pub(crate) socket_group: Option<u32>,
}

/// Returns the checked fields. `own` has the errors of `kpx` found so far.
pub(super) fn check(
    kube_proxy: &KubeProxyConfiguration,
    kpx: &KpxConfiguration,
    mut own: Fields,
) -> Result<Checked, Vec<Invalid>> {
    let mut fields = Fields::of(KubeProxyConfiguration::KIND);
    let gates = Gates {
        set: &kube_proxy.feature_gates,
        version: kpx.version(),
    };
    let node = node_options(&mut fields, &mut own, kube_proxy, kpx, gates);
    let model = model_options(&mut own, kpx, gates, &node);
    misspelt_gates(&mut fields, gates);
    let healthz_address = listen_address(
        &mut fields,
        "healthzBindAddress",
        &kube_proxy.healthz_bind_address,
    );
    let metrics_address = listen_address(
        &mut fields,
        "metricsBindAddress",
        &kube_proxy.metrics_bind_address,
    );
    let conntrack = conntrack(&mut fields, kube_proxy);
    let common = proxy_mode(&mut fields, kube_proxy);
    scalars(&mut fields, kube_proxy);
    of_the_mode(&mut own, kpx);
    let masquerades = kpx.masquerade == Masquerade::Compat || common.masquerade_all;
    let sockets = kpx.sockets(masquerades, &mut own);
    let names = names(&mut own, kpx);
    let socket_group = socket_group(&mut own, &kpx.socket_group);
    own_scalars(&mut own, kpx);
    let has_place = metrics_address.is_some() || !fields.invalid.is_empty();
    let why = "requires metricsBindAddress, which is disabled (default in host mode)";
    own.check(!kpx.ui || has_place, "ui", kpx.ui, why);
    manifests(&mut own, kube_proxy, kpx);
    external_forwarding(&mut own, kpx);

    let invalid = [fields.invalid, own.invalid].concat();
    if !invalid.is_empty() {
        return Err(invalid);
    }
    Ok(Checked {
        node,
        model,
        healthz_address,
        metrics_address,
        conntrack,
        common,
        sockets,
        names,
        socket_group,
    })
}

/// Returns the settings of the node. An invalid field gets its default.
fn node_options(
    fields: &mut Fields,
    own: &mut Fields,
    kube_proxy: &KubeProxyConfiguration,
    kpx: &KpxConfiguration,
    gates: Gates<'_>,
) -> NodeOptions {
    let is_host = kpx.mode == Mode::Host;
    let bind_address = bind_address(fields, kube_proxy);
    let mut node_ips = own.parse_each("nodeIPs", &kpx.node_ips, "must be an IP address");
    if node_ips.is_empty() {
        node_ips.extend(bind_address);
    }
    NodeOptions {
        node_ips,
        service_cidrs: own.parse_each("serviceCIDRs", &kpx.service_cidrs, "must be a CIDR"),
        node_ports: node_ports(fields, &kube_proxy.node_port_addresses),
        localhost: if is_host {
            Localhost::Off
        } else {
            localhost(kube_proxy, gates)
        },
        detector: detector(fields, kube_proxy).unwrap_or_default(),
        masquerade: kpx.masquerade,
        masquerade_all: kube_proxy.common().masquerade_all,
        cluster_ip_external: kpx.cluster_ip_external,
        // A host in host mode has no pods.
        fast_path: if is_host {
            FastPath::Off
        } else {
            kpx.fast_path
        },
        hands_over: kpx.external_forwarding.0 == ExternalForwarding::Dsr,
        pod_routing: is_host.then_some(kpx.pod_routes),
        notices: Vec::new(),
    }
}

/// Returns the settings that determine how Services are translated.
fn model_options(
    own: &mut Fields,
    kpx: &KpxConfiguration,
    gates: Gates<'_>,
    node: &NodeOptions,
) -> ModelOptions {
    ModelOptions {
        algorithm: kpx.lb_algorithm.0,
        backend_health: kpx.backend_health.0,
        external_forwarding: kpx.external_forwarding.0,
        node_ips: node.node_ips.clone(),
        external_ip_cidrs: external_ip_cidrs(own, &kpx.external_ip_cidrs),
        ignores_external_ips: !gates.external_ips(),
        service_cidrs: node.service_cidrs.clone(),
        host_routes: node
            .pod_routing
            .map(|routes| Arc::new(HostRoutes::unknown(routes == PodRoutes::Default))),
        has_redirects: kpx.local_redirect,
        redirect_addresses: redirect_addresses(own, kpx),
        ..ModelOptions::default()
    }
}

fn manifests(own: &mut Fields, kube_proxy: &KubeProxyConfiguration, kpx: &KpxConfiguration) {
    if !kpx.manifests.is_empty() {
        let apart =
            "cannot be used with an API server: a kubeconfig, a context of one, or a master";
        let given = [
            &kube_proxy.client_connection.kubeconfig,
            &kpx.context,
            &kpx.master,
        ];
        own.check(
            given.into_iter().all(String::is_empty),
            "manifests",
            &kpx.manifests,
            apart,
        );
    }
}

/// Refuses the mode `dsr` beside settings that it cannot work with.
fn external_forwarding(own: &mut Fields, kpx: &KpxConfiguration) {
    let obstacles = [
        (
            kpx.mode == Mode::Host,
            "mode host, whose machine is no node",
        ),
        (
            kpx.masquerade == Masquerade::Compat,
            "masquerade compat, which hides clients' addresses",
        ),
        (
            !kpx.manifests.is_empty(),
            "manifests: nodes find each other through the API server",
        ),
        (
            kpx.fast_path == FastPath::Off,
            "fastPath off: its reader of netfilter's rules decides where packets may be handed over",
        ),
    ];
    let is_dsr = kpx.external_forwarding.0 == ExternalForwarding::Dsr;
    for (_, what) in obstacles.into_iter().filter(|(is_there, _)| *is_there) {
        let name = kpx.external_forwarding.0.name();
        let why = format!("cannot be used with {what}");
        own.check(!is_dsr, "externalForwarding", name, &why);
    }
}

/// Returns the id of the group that may query the agent. A static binary can look up names only in
/// `/etc/group`.
fn socket_group(own: &mut Fields, group: &str) -> Option<u32> {
    if group.is_empty() {
        return None;
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let number = group.parse().ok().or_else(|| group_number(&groups, group));
    own.check(
        number.is_some(),
        "socketGroup",
        group,
        "must be a group of /etc/group, or its number",
    );
    number
}

/// Returns the id of a group from the text of `/etc/group`: `name:password:number:members`.
fn group_number(groups: &str, name: &str) -> Option<u32> {
    let lines = groups
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>());
    let mut numbers = lines
        .filter(|fields| fields.first() == Some(&name))
        .filter_map(|fields| fields.get(2)?.parse().ok());
    numbers.next()
}

fn misspelt_gates(fields: &mut Fields, gates: Gates<'_>) {
    for (gate, meant) in gates.misspelt() {
        let why = format!("unknown feature gate; did you mean {meant}?");
        fields.refuse(&format!("featureGates.{gate}"), gates.set[&gate], why);
    }
}

/// Checks the version, and the fields that only one mode uses.
fn of_the_mode(own: &mut Fields, kpx: &KpxConfiguration) {
    let version = &kpx.kubernetes_version;
    let is_version = version.parse::<KubeVersion>().is_ok();
    own.check(
        is_version,
        "kubernetesVersion",
        version,
        "must be a version of Kubernetes (e.g. 1.38)",
    );
    let is_host = kpx.mode == Mode::Host;
    let pod_routes = choice::name(&kpx.pod_routes);
    own.check(
        is_host || kpx.pod_routes == PodRoutes::Off,
        "podRoutes",
        pod_routes,
        "is for host mode",
    );
    let tunnel = choice::name(&kpx.tunnel);
    let is_off = kpx.tunnel == Tunnel::Off;
    own.check(is_off || is_host, "tunnel", &tunnel, "is for host mode");
    own.check(
        is_off || kpx.manifests.is_empty(),
        "tunnel",
        &tunnel,
        "needs an API server, not a folder of manifests",
    );
    // The tunnel finds a connection's Service in its flow. Sockets that are translated at `connect`
    // have no flow.
    let by_packets = matches!(kpx.socket_lb, SocketLb::Off | SocketLb::Auto);
    own.check(
        is_off || by_packets,
        "tunnel",
        &tunnel,
        "cannot be used with socketLB host or all",
    );
    let is_default = kpx.cluster_domain == KpxConfiguration::default().cluster_domain;
    own.check(
        is_host || is_default,
        "clusterDomain",
        &kpx.cluster_domain,
        "is for host mode",
    );
    own.check(
        !is_host || kpx.fast_path != FastPath::On,
        "fastPath",
        "on",
        "is for nodes, not for host mode",
    );
    let is_off = !kpx.local_redirect;
    let addresses = kpx.local_redirect_addresses.join(",");
    own.check(
        !is_off || addresses.is_empty(),
        "localRedirectAddresses",
        &addresses,
        "needs localRedirect",
    );
    own.check(
        is_off || !is_host,
        "localRedirect",
        true,
        "is for nodes, not for host mode",
    );
    own.check(
        is_off || kpx.manifests.is_empty(),
        "localRedirect",
        true,
        "needs an API server, not a folder of manifests",
    );
}

/// Returns the address and zone of the DNS server; `None` if disabled.
fn names(own: &mut Fields, kpx: &KpxConfiguration) -> Option<NamesOptions> {
    let zone = Zone::new(&kpx.cluster_domain);
    let why = zone.as_ref().err().map(|error| format!("{error:#}"));
    own.check(
        zone.is_ok(),
        "clusterDomain",
        &kpx.cluster_domain,
        &why.unwrap_or_default(),
    );
    let is_host = kpx.mode == Mode::Host;
    let address = match kpx.dns_address.as_str() {
        "none" => return None,
        "" if is_host => DNS_ADDRESS,
        "" => return None,
        address => own.parse(
            "dnsAddress",
            address,
            "must be an IP address with a port, or `none`",
        )?,
    };
    own.check(is_host, "dnsAddress", &kpx.dns_address, "is for host mode");
    // Other hosts could query a non-loopback address, and systemd-resolved needs a port.
    let is_fit = address.ip().is_loopback() && address.port() != 0;
    own.check(
        is_fit,
        "dnsAddress",
        &kpx.dns_address,
        "must be a loopback address with a port other than 0",
    );
    Some(NamesOptions {
        address,
        zone: zone.ok()?,
    })
}

/// Returns the node's own address; `None` for the unspecified address.
fn bind_address(fields: &mut Fields, kube_proxy: &KubeProxyConfiguration) -> Option<IpAddr> {
    let why = "not a valid textual representation of an IP address";
    let address: Option<IpAddr> = fields.parse("bindAddress", &kube_proxy.bind_address, why);
    address.filter(|address| !address.is_unspecified())
}

fn node_ports(fields: &mut Fields, given: &[String]) -> NodePortAddresses {
    let mut addresses = NodePortAddresses::default();
    for (index, item) in given.iter().enumerate() {
        let why = "must be a CIDR (e.g. 10.0.0.0/8), `primary`, `localhost` or `all`";
        fields.check(
            addresses.add(item.trim()),
            &format!("nodePortAddresses[{index}]"),
            item,
            why,
        );
    }
    addresses
}

/// Returns kube-proxy's rule for node ports at loopback addresses.
fn localhost(kube_proxy: &KubeProxyConfiguration, gates: Gates<'_>) -> Localhost {
    match kube_proxy.mode.as_str() {
        NFTABLES if !gates.localhost() => Localhost::Off,
        NFTABLES | "ipvs" => Localhost::Named,
        _ if kube_proxy.iptables.localhost_node_ports => Localhost::Included,
        _ => Localhost::Off,
    }
}

fn redirect_addresses(own: &mut Fields, kpx: &KpxConfiguration) -> Vec<IpNet> {
    let why = "must be a CIDR (e.g. 169.254.169.254/32)";
    own.parse_each("localRedirectAddresses", &kpx.local_redirect_addresses, why)
}

fn external_ip_cidrs(own: &mut Fields, given: &[String]) -> Option<Vec<IpNet>> {
    match given {
        [] => None,
        [one] if one == "none" => Some(Vec::new()),
        _ => Some(own.parse_each(
            "externalIPCIDRs",
            given,
            "must be a CIDR (e.g. 203.0.113.0/24), or `none` alone",
        )),
    }
}

fn detector(fields: &mut Fields, kube_proxy: &KubeProxyConfiguration) -> Option<Detector> {
    let cluster_cidrs = cluster_cidrs(fields, &kube_proxy.cluster_cidr);
    let detect = &kube_proxy.detect_local;
    match kube_proxy.detect_local_mode.as_str() {
        "ClusterCIDR" => Some(Detector::ClusterCidr(cluster_cidrs)),
        "NodeCIDR" => Some(Detector::NodeCidr),
        "BridgeInterface" => device_name(
            fields,
            "detectLocal.bridgeInterface",
            &detect.bridge_interface,
        )
        .map(Detector::Bridge),
        "InterfaceNamePrefix" => device_name(
            fields,
            "detectLocal.interfaceNamePrefix",
            &detect.interface_name_prefix,
        )
        .map(Detector::Prefix),
        other => {
            let why = "must be one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix";
            fields.refuse("detectLocalMode", other, why);
            None
        }
    }
}

fn cluster_cidrs(fields: &mut Fields, text: &str) -> Vec<IpNet> {
    let parts: Vec<_> = text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect();
    let cidrs: Result<Vec<IpNet>, _> = parts.iter().map(|part| part.parse()).collect();
    let why = match cidrs {
        Ok(cidrs) => {
            let of_family = |ipv4| {
                cidrs
                    .iter()
                    .filter(|cidr| cidr.addr().is_ipv4() == ipv4)
                    .count()
            };
            if of_family(true) <= 1 && of_family(false) <= 1 {
                return cidrs;
            }
            "must be a CIDR of each family at most (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)"
        }
        Err(_) => "must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)",
    };
    fields.refuse("clusterCIDR", text, why);
    Vec::new()
}

fn device_name(fields: &mut Fields, field: &str, name: &str) -> Option<String> {
    let fits = (1..=DEVICE_NAME_MAX).contains(&name.len());
    fields.check(
        fits,
        field,
        name,
        "must be the name of a device, of 1 to 15 bytes, in this detectLocalMode",
    );
    fits.then(|| name.to_owned())
}

/// Returns the address to listen on; `None` for port 0.
fn listen_address(fields: &mut Fields, field: &str, text: &str) -> Option<SocketAddr> {
    let address: Option<SocketAddr> = fields.parse(
        field,
        text,
        "must be IP:port, with a port from 1 to 65535, or 0 for none",
    );
    address.filter(|address| address.port() != 0)
}

/// Returns the conntrack settings. 0 keeps the kernel's value.
fn conntrack(fields: &mut Fields, kube_proxy: &KubeProxyConfiguration) -> Conntrack {
    let given = &kube_proxy.conntrack;
    let mut count = |field, count: i32| {
        fields.check(
            count >= 0,
            field,
            count,
            "must be greater than or equal to 0",
        );
        u32::try_from(count).ok().filter(|count| *count > 0)
    };
    let max_per_core = count("conntrack.maxPerCore", given.max_per_core);
    let min = count("conntrack.min", given.min);
    let mut timeout = |field, timeout: GoDuration| {
        fields.not_negative(field, timeout);
        timeout.std().filter(|timeout| !timeout.is_zero())
    };
    Conntrack {
        max_per_core,
        min,
        tcp_established_timeout: timeout(
            "conntrack.tcpEstablishedTimeout",
            given.tcp_established_timeout,
        ),
        tcp_close_wait_timeout: timeout(
            "conntrack.tcpCloseWaitTimeout",
            given.tcp_close_wait_timeout,
        ),
        tcp_be_liberal: given.tcp_be_liberal,
        udp_timeout: timeout("conntrack.udpTimeout", given.udp_timeout),
        udp_stream_timeout: timeout("conntrack.udpStreamTimeout", given.udp_stream_timeout),
    }
}

/// Checks the mode, and returns the settings of its section.
fn proxy_mode(fields: &mut Fields, kube_proxy: &KubeProxyConfiguration) -> Common {
    let common = kube_proxy.common();
    let mode = kube_proxy.mode.as_str();
    let is_known = matches!(mode, "" | "iptables" | "ipvs" | "nftables" | "ebpf");
    fields.check(
        is_known,
        "mode",
        mode,
        "must be iptables, ipvs, nftables, ebpf or blank; kpx uses eBPF in all of them",
    );
    let sync = format!("{}.syncPeriod", common.section);
    let min_sync = format!("{}.minSyncPeriod", common.section);
    fields.positive(&sync, common.sync_period);
    fields.not_negative(&min_sync, common.min_sync_period);
    let in_order = common.min_sync_period <= common.sync_period;
    fields.check(
        in_order,
        &sync,
        Shown(common.sync_period),
        &format!("must be greater than or equal to {min_sync}"),
    );
    if mode == "ipvs" {
        ipvs(fields, &kube_proxy.ipvs);
    }
    let bit = if mode == NFTABLES {
        "nftables.masqueradeBit"
    } else {
        "iptables.masqueradeBit"
    };
    fields.check(
        (0..32).contains(&common.masquerade_bit),
        bit,
        common.masquerade_bit,
        "must be within the range [0, 31]",
    );
    common
}

fn ipvs(fields: &mut Fields, ipvs: &Ipvs) {
    let is_known = ipvs::is_scheduler(&ipvs.scheduler);
    let why = format!("must be one of {}", ipvs::schedulers());
    fields.check(is_known, "ipvs.scheduler", &ipvs.scheduler, &why);
    fields.not_negative("ipvs.tcpTimeout", ipvs.tcp_timeout);
    fields.not_negative("ipvs.tcpFinTimeout", ipvs.tcp_fin_timeout);
    fields.not_negative("ipvs.udpTimeout", ipvs.udp_timeout);
    let _excluded: Vec<IpNet> =
        fields.parse_each("ipvs.excludeCIDRs", &ipvs.exclude_cidrs, "must be a CIDR");
}

/// Checks the durations, numbers and directories of kpx's own document.
fn own_scalars(own: &mut Fields, kpx: &KpxConfiguration) {
    own.positive("nodeTimeout", kpx.node_timeout);
    own.check(
        !kpx.run_dir.is_empty(),
        "runDir",
        &kpx.run_dir,
        "must be a folder",
    );
    own.at_most("monitorHistory", kpx.monitor_history, MONITOR_HISTORY_MAX);
    own.check(
        kpx.bpf_dir.starts_with('/'),
        "bpfDir",
        &kpx.bpf_dir,
        "must be the full path of a folder",
    );
}

/// Checks the durations and numbers of kube-proxy's document.
fn scalars(fields: &mut Fields, kube_proxy: &KubeProxyConfiguration) {
    let oom_score_adj = kube_proxy.oom_score_adj;
    let burst = kube_proxy.client_connection.burst;
    let in_range = (-1000..=1000).contains(&oom_score_adj);
    fields.check(
        in_range,
        "oomScoreAdj",
        oom_score_adj,
        "must be within the range [-1000, 1000]",
    );
    fields.check(
        burst >= 0,
        "clientConnection.burst",
        burst,
        "must be greater than or equal to 0",
    );
    fields.positive("configSyncPeriod", kube_proxy.config_sync_period);
    let format = kube_proxy.logging.format.as_str();
    fields.check(
        matches!(format, "text" | "json"),
        "logging.format",
        format,
        "must be text or json",
    );
}
