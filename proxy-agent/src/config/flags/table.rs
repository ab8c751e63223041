//! All flags. `docs/configuration.md` is generated from this table.

use super::{Effect, Flag, Kind};
use crate::config::choice::{BackendHealth, Forwarding, LbAlgorithm, values};
use crate::config::ipvs;
use crate::node::{FastPath, Masquerade};
use crate::settings::{Mode, PodRoutes, SocketLb, Tunnel};
use Effect::{Command, Development, Kpx, KubeProxy, KubeProxyOver, Nothing, Port};
use Kind::{
    Choice, Dir, Duration, File, Gates, Integer, IntegerOr, List, Number, OneOf, Switch, Text,
    Version,
};
use proxy_datapath::Mechanism;

/// The flags that `kpx trace` accepts too.
pub(super) const OF_A_NODE: [&str; 10] = [
    "nodeport-addresses",
    "masquerade-all",
    "cluster-cidr",
    "detect-local-mode",
    "pod-bridge-interface",
    "pod-interface-name-prefix",
    "masquerade",
    "cluster-ip-external",
    "lb-algorithm",
    "external-ip-cidrs",
];

/// The flags that `kpx check` accepts too.
pub(super) const OF_A_CHECK: [&str; 11] = [
    "config",
    "kpx-config",
    "kubeconfig",
    "master",
    "context",
    "mode",
    "tunnel",
    "dns-address",
    "cluster-domain",
    "service-cidr",
    "cluster-cidr",
];

const LOCAL_MODES: &[&str] = &[
    "ClusterCIDR",
    "NodeCIDR",
    "BridgeInterface",
    "InterfaceNamePrefix",
];

#[rustfmt::skip]
pub(in crate::config) const FLAGS: &[Flag] = &[
    flag("config", File, Command, "YAML or JSON file with a KubeProxyConfiguration and, optionally, a KpxConfiguration. The file then overrides most kube-proxy flags"),
    flag("kpx-config", File, Command, "YAML or JSON file with the KpxConfiguration"),
    flag("write-config-to", File, Command, "Write the effective configuration, defaults included, to this file and exit"),
    flag("cleanup", Switch, Command, "Remove everything that kpx or kube-proxy left on this node, and exit"),
    flag("init-only", Switch, Command, "Run the privileged setup steps, and exit"),
    flag("version", Version, Command, "Print the version, and exit"),

    flag("kubeconfig", File, KubeProxy(&["clientConnection.kubeconfig"]), "Kubeconfig file. Default: the pod's service account, else $KUBECONFIG, else ~/.kube/config"),
    flag("kube-api-qps", Number, KubeProxy(&["clientConnection.qps"]), "Maximum requests per second to the API server (lists and writes); negative: unlimited"),
    flag("kube-api-burst", Integer, KubeProxy(&["clientConnection.burst"]), "Maximum burst of requests to the API server (lists and writes)"),
    Flag { aliases: &["node-name"], ..flag("hostname-override", Text, KubeProxyOver("hostnameOverride"), "Name of this node's Node object. Default: the host name") },
    flag("bind-address", Text, KubeProxy(&["bindAddress"]), "Primary address of this node, unless it is 0.0.0.0 or ::. kpx does not listen on it"),
    flag("healthz-bind-address", Text, KubeProxy(&["healthzBindAddress"]), "Address and port of /healthz and /livez; empty or port 0 disables them"),
    flag("metrics-bind-address", Text, KubeProxy(&["metricsBindAddress"]), "Address and port of /metrics; empty or port 0 disables it"),
    flag("healthz-port", Integer, Port("healthzBindAddress"), "Deprecated: port for a --healthz-bind-address without a port; 0 disables it"),
    flag("metrics-port", Integer, Port("metricsBindAddress"), "Deprecated: port for a --metrics-bind-address without a port; 0 disables it"),
    flag("bind-address-hard-fail", Switch, KubeProxy(&["bindAddressHardFail"]), "Exit if kpx cannot listen on --healthz-bind-address or --metrics-bind-address"),
    flag("proxy-mode", Text, KubeProxy(&["mode"]), "kube-proxy mode whose defaults and sync periods apply: iptables, ipvs, nftables or ebpf. kpx always uses eBPF"),
    flag("iptables-sync-period", Duration, KubeProxy(&["iptables.syncPeriod", "nftables.syncPeriod"]), "Interval of repairs and retries. A change that is still pending after twice this interval makes the node unhealthy"),
    flag("iptables-min-sync-period", Duration, KubeProxy(&["iptables.minSyncPeriod", "nftables.minSyncPeriod"]), "Minimum interval between writes to the kernel; 0: write at once (kube-proxy's default is 1s)"),
    flag("ipvs-sync-period", Duration, KubeProxy(&["ipvs.syncPeriod"]), "--iptables-sync-period for proxy mode ipvs"),
    flag("ipvs-min-sync-period", Duration, KubeProxy(&["ipvs.minSyncPeriod"]), "--iptables-min-sync-period for proxy mode ipvs"),
    flag("ipvs-scheduler", Text, KubeProxy(&["ipvs.scheduler"]), "Proxy mode ipvs: IPVS scheduler, mapped to the nearest algorithm of kpx (docs/migration.md) unless --lb-algorithm is set. Default: rr"),
    flag("ipvs-exclude-cidrs", List, KubeProxy(&["ipvs.excludeCIDRs"]), "Proxy mode ipvs: networks whose IPVS virtual servers --cleanup keeps"),
    flag("masquerade-all", Switch, KubeProxy(&["iptables.masqueradeAll", "nftables.masqueradeAll"]), "Masquerade every client of a ClusterIP"),
    flag("detect-local-mode", OneOf(LOCAL_MODES), KubeProxy(&["detectLocalMode"]), "Detect local pods by --cluster-cidr (ClusterCIDR), by the Node's podCIDRs (NodeCIDR), by --pod-bridge-interface (BridgeInterface) or by --pod-interface-name-prefix (InterfaceNamePrefix)"),
    flag("pod-bridge-interface", Text, KubeProxy(&["detectLocal.bridgeInterface"]), "Bridge of the local pods, for --detect-local-mode=BridgeInterface"),
    flag("pod-interface-name-prefix", Text, KubeProxy(&["detectLocal.interfaceNamePrefix"]), "Prefix of the local pods' interface names, for --detect-local-mode=InterfaceNamePrefix"),
    flag("cluster-cidr", Text, KubeProxy(&["clusterCIDR"]), "Networks of the pods, one per family. Clients in these networks are inside the cluster"),
    flag("nodeport-addresses", List, KubeProxy(&["nodePortAddresses"]), "Node addresses that serve node ports: networks, `primary` (the primary addresses), `all`, or `localhost` (127.0.0.1 and ::1, for processes of the host). An IP family without an entry, or with a /0 network, serves all its addresses. Default: all except ::1; in proxy mode nftables `primary`"),
    flag("iptables-localhost-nodeports", Switch, KubeProxy(&["iptables.localhostNodePorts"]), "Proxy mode iptables: serve node ports on 127.0.0.1 to processes of the host, if --nodeport-addresses includes it"),
    flag("oom-score-adj", Integer, KubeProxy(&["oomScoreAdj"]), "OOM score adjustment of this process, from -1000 (never killed) to 1000"),
    flag("conntrack-max-per-core", Integer, KubeProxy(&["conntrack.maxPerCore"]), "Maximum number of conntrack entries per core; 0 keeps the kernel's value"),
    flag("conntrack-min", Integer, KubeProxy(&["conntrack.min"]), "Minimum number of conntrack entries; ignored if --conntrack-max-per-core is 0"),
    flag("conntrack-tcp-timeout-established", Duration, KubeProxy(&["conntrack.tcpEstablishedTimeout"]), "Idle timeout of established TCP connections, for conntrack and for kpx; 0 keeps the kernel's value"),
    flag("conntrack-tcp-timeout-close-wait", Duration, KubeProxy(&["conntrack.tcpCloseWaitTimeout"]), "Idle timeout of TCP connections that one side has closed, for conntrack and for kpx; 0 keeps the kernel's value"),
    flag("conntrack-tcp-be-liberal", Switch, KubeProxy(&["conntrack.tcpBeLiberal"]), "Let conntrack accept TCP packets outside the window"),
    flag("conntrack-udp-timeout", Duration, KubeProxy(&["conntrack.udpTimeout"]), "Idle timeout of UDP flows without a reply, for conntrack and for kpx; 0 keeps the kernel's value"),
    flag("conntrack-udp-timeout-stream", Duration, KubeProxy(&["conntrack.udpStreamTimeout"]), "Idle timeout of UDP flows with replies, for conntrack and for kpx; 0 keeps the kernel's value"),
    flag("feature-gates", Gates, KubeProxy(&["featureGates"]), "Kubernetes feature gates. kpx honours AllowServiceExternalIPs and, in proxy mode nftables, KubeProxyNFTablesLocalhostNodePorts"),
    Flag { aliases: &["v"], ..flag("v", Integer, KubeProxyOver("logging.verbosity"), "Log verbosity: 0, 2 (API events), 4 (every map change), 6 (trace). RUST_LOG overrides it") },
    flag("logging-format", Text, KubeProxyOver("logging.format"), "Log format: text or json"),

    flag("master", Text, Kpx("master"), "Address of the API server; overrides the kubeconfig's"),
    flag("context", Text, Kpx("context"), "Kubeconfig context; overrides the current context"),
    flag("manifests", Dir, Kpx("manifests"), "Folder of YAML files with Services, EndpointSlices, Nodes and ServiceCIDRs, instead of an API server"),
    flag("mode", Choice(values::<Mode>), Kpx("mode"), "Role of this host: a node of the cluster (node), or a machine outside that reaches ClusterIPs (host)"),
    flag("pod-routes", Choice(values::<PodRoutes>), Kpx("podRoutes"), "Host mode: route to pods that the host has no route for: none (off), the default route (default), or a route per node that kpx adds (nodes)"),
    flag("tunnel", Choice(values::<Tunnel>), Kpx("tunnel"), "Host mode: reach Services that have neither routed pods nor a node port: not at all (off), or by TCP through the API server, as kubectl port-forward does (tcp; needs get and create on pods/portforward)"),
    flag("dns-address", Text, Kpx("dnsAddress"), "Host mode: listen address of the DNS server for the cluster's names; `none` disables it. Default: 127.0.0.153:53"),
    flag("cluster-domain", Text, Kpx("clusterDomain"), "Host mode: DNS domain of the cluster"),
    flag("node-ip", List, Kpx("nodeIPs"), "Addresses of this node, one per family; overrides the Node object's"),
    flag("service-cidr", List, Kpx("serviceCIDRs"), "ClusterIP ranges; overrides the ServiceCIDR objects"),
    flag("external-ip-cidrs", List, Kpx("externalIPCIDRs"), "Networks from which Services may use ExternalIPs, or `none`. Default: any address except the API server's, host-local and multicast addresses, this node's podCIDRs, and pods of other namespaces. Host mode: also restricts load balancer addresses; default `none`"),
    flag("masquerade", Choice(values::<Masquerade>), Kpx("masquerade"), "Masquerade only clients whose replies would otherwise bypass the node (default), or exactly those that kube-proxy masquerades (compat)"),
    flag("cluster-ip-external", Switch, Kpx("clusterIPExternal"), "Let clients outside the cluster reach ClusterIPs through this node, as kube-proxy does"),
    flag("lb-algorithm", Choice(values::<LbAlgorithm>), Kpx("lbAlgorithm"), "Load-balancing algorithm of Services without the annotation `kpx.dev/lb-algorithm`. Proxy mode ipvs takes its default from --ipvs-scheduler"),
    flag("local-redirect", Switch, Kpx("localRedirect"), "Send a Service's traffic to pods of the client's node where the annotation `kpx.dev/local-redirect` or a LocalRedirect names such pods. kpx then watches the node's Pods, and LocalRedirects if the cluster has the CRD"),
    flag("local-redirect-addresses", List, Kpx("localRedirectAddresses"), "Networks outside Services that a LocalRedirect may redirect for all pods of the node, such as 169.254.169.254/32 (cloud metadata). Needs --local-redirect. Default: none"),
    flag("kubernetes-version", Text, Kpx("kubernetesVersion"), "Version of the cluster, such as 1.38, for version-dependent defaults: from 1.40 on, proxy mode nftables, and ExternalIPs only with the feature gate AllowServiceExternalIPs"),
    flag("backend-health", Choice(values::<BackendHealth>), Kpx("backendHealth"), "Reaction to backends that do not answer this node or refuse its connections, for Services without the annotation `kpx.dev/backend-health`: none (off), Events and metrics (observe), or also eject them for new TCP connections of this node, at most half of a Service's backends, and retry an unanswered SYN on another backend (on)"),
    flag("external-forwarding", Choice(values::<Forwarding>), Kpx("externalForwarding"), "Way of clients outside to backends on other nodes, under externalTrafficPolicy: Cluster: with this node's address (masquerade), or unchanged to the backend's node, which answers directly (dsr). The annotation `kpx.dev/external-forwarding` of a Service excludes it. Every node takes part by its own flag. See docs/external-forwarding.md"),
    flag("attach", Choice(values::<Mechanism>), Kpx("attach"), "Attachment of programs to devices. Default: TCX if the kernel supports it, else clsact"),
    flag("fast-path", Choice(values::<FastPath>), Kpx("fastPath"), "Packets that skip the node's stack: none (off); packets of connections that netfilter's rules leave unchanged, and of all open connections if the node has no such rules and conntrack tracks nothing (auto); or packets of every open connection, so that rules see only its beginning and end (on). See docs/fast-path.md"),
    flag("flow-table-size", Integer, Kpx("flowTableSize"), "Entries of each family's flow table. A flow takes two or four; a quarter of the flows may be half-open. 0: one entry per 64 KiB of memory, rounded down to a power of two, from 131,072 to 1,048,576. An existing larger table stays"),
    flag("service-table-size", Integer, Kpx("serviceTableSize"), "Entries of each family's tables of frontends and service ports. A Service takes a frontend for its ClusterIP and one for each port at each address and node port. 0: one entry per 56 KiB of memory, rounded down to a power of two, from 65,536 to 262,144. An existing larger table stays"),
    flag("endpoint-table-size", Integer, Kpx("endpointTableSize"), "Entries of each family's endpoint tables. An endpoint takes one for each service port, and another where that port has a set of local endpoints. 0: one entry per 28 KiB of memory, rounded down to a power of two, from 262,144 to 1,048,576. An existing larger table stays"),
    flag("socket-lb", Choice(values::<SocketLb>), Kpx("socketLB"), "Sockets that get a backend at connect(), so that their packets need no translation: none (off), the host's (host), also those of pods (all), or the host's, and those of pods where packets cannot skip the stack instead (auto). See docs/socket-lb.md"),
    flag("socket-lb-udp", Switch, Kpx("socketLBUDP"), "Include UDP sockets in --socket-lb"),
    flag("cgroup-root", Dir, Kpx("cgroupRoot"), "Root of the cgroup v2 subtree for --socket-lb. Default: the root cgroup"),
    flag("node-timeout", Duration, Kpx("nodeTimeout"), "Maximum wait for the Node object's podCIDRs, if --detect-local-mode needs them, before kpx exits. For the Node object and its addresses kpx waits at most 30 s, and then uses the machine's own addresses"),
    flag("run-dir", Dir, Kpx("runDir"), "Folder of the agent's socket, and of the record of its changes to this host"),
    flag("socket-group", Text, Kpx("socketGroup"), "Group (name or number) whose members may read the agent's state through its socket with `kpx status`, `flows` and `monitor`. Default: root only"),
    flag("bpf-dir", Dir, Kpx("bpfDir"), "Folder in a BPF file system for the maps and links that outlive the agent"),
    flag("cleanup-on-exit", Switch, Kpx("cleanupOnExit"), "Remove everything from this host when the agent exits. By default Services stay reachable in their last known state, as restarts and upgrades need; host mode cleans up by default"),
    flag("ui", Switch, Kpx("ui"), "Serve the web page at /ui/ on --metrics-bind-address"),
    flag("service-metrics", IntegerOr("500"), Kpx("serviceMetrics"), "Export per-port metrics for at most N Service ports, up to 20 series each, and the sum of the others; without a value 500"),
    flag("monitor-history", IntegerOr("10000"), Kpx("monitorHistory"), "Keep the last N packets that opened flows and the last N that were dropped or rejected, for `kpx monitor --since`; without a value 10,000, at most 100,000. Each takes under 1 KiB, and the programs then report every such packet"),
    flag("bpf-stats", Switch, Kpx("bpfStats"), "Let the kernel measure run count and run time of the programs, for /metrics. Each run then takes some tens of nanoseconds more"),

    flag("bpf-object", File, Development, "Load the kernel programs from this object instead of the built-in object"),

    ignored("config-sync-period", Duration, KubeProxy(&["configSyncPeriod"]), "kpx uses watches instead of a resync"),
    ignored("kube-api-content-type", Text, KubeProxy(&["clientConnection.contentType"]), "kpx uses JSON with the API server"),
    ignored("profiling", Switch, KubeProxy(&["enableProfiling"]), "kpx has no Go profiles"),
    ignored("show-hidden-metrics-for-version", Text, KubeProxy(&["showHiddenMetricsForVersion"]), "kpx hides no metrics"),
    ignored("iptables-masquerade-bit", Integer, KubeProxy(&["iptables.masqueradeBit", "nftables.masqueradeBit"]), "kpx sets no firewall mark"),
    ignored("ipvs-strict-arp", Switch, KubeProxy(&["ipvs.strictARP"]), ipvs::STRICT_ARP),
    ignored("ipvs-tcp-timeout", Duration, KubeProxy(&["ipvs.tcpTimeout"]), ipvs::TIMEOUTS),
    ignored("ipvs-tcpfin-timeout", Duration, KubeProxy(&["ipvs.tcpFinTimeout"]), ipvs::TIMEOUTS),
    ignored("ipvs-udp-timeout", Duration, KubeProxy(&["ipvs.udpTimeout"]), ipvs::TIMEOUTS),
    ignored("proxy-port-range", Text, KubeProxy(&["portRange"]), "kpx binds no ports for Services"),
    ignored("vmodule", List, Nothing, "RUST_LOG sets the level of each module"),
    ignored("log-flush-frequency", Duration, KubeProxy(&["logging.flushFrequency"]), LOG),
    ignored("log-text-split-stream", Switch, Nothing, LOG),
    ignored("log-text-info-buffer-size", Text, Nothing, LOG),
    ignored("log-json-split-stream", Switch, Nothing, LOG),
    ignored("log-json-info-buffer-size", Text, Nothing, LOG),
    ignored("boot-id-file", Text, Nothing, "kpx does not use it"),
    ignored("machine-id-file", Text, Nothing, "kpx does not use it"),
    ignored("windows-service", Switch, KubeProxy(&["windowsRunAsService"]), WINDOWS),
    ignored("network-name", Text, KubeProxy(&["winkernel.networkName"]), WINDOWS),
    ignored("source-vip", Text, KubeProxy(&["winkernel.sourceVip"]), WINDOWS),
    ignored("enable-dsr", Switch, KubeProxy(&["winkernel.enableDSR"]), WINDOWS),
    ignored("root-hnsendpoint-name", Text, KubeProxy(&["winkernel.rootHnsEndpointName"]), WINDOWS),
    ignored("forward-healthcheck-vip", Switch, KubeProxy(&["winkernel.forwardHealthCheckVip"]), WINDOWS),
];

const LOG: &str = "kpx writes its log unbuffered";
const WINDOWS: &str = "kpx does not run on Windows";

const fn flag(name: &'static str, kind: Kind, effect: Effect, help: &'static str) -> Flag {
    Flag {
        name,
        aliases: &[],
        kind,
        effect,
        is_obeyed: true,
        help,
    }
}

/// A flag without effect. `help` has the reason.
const fn ignored(name: &'static str, kind: Kind, effect: Effect, help: &'static str) -> Flag {
    Flag {
        is_obeyed: false,
        ..flag(name, kind, effect, help)
    }
}

/// Fields without a flag, and the reason why kpx ignores them.
#[cfg(test)]
pub(in crate::config) const FIELDS_WITHOUT_FLAG: &[(&str, &str)] = &[
    (
        "clientConnection.acceptContentTypes",
        "kpx uses JSON with the API server",
    ),
    ("logging.vmodule", "RUST_LOG sets the level of each module"),
    ("logging.options", LOG),
];
