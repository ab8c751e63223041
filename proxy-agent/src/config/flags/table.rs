//! All flags. `docs/configuration.md` is written from here.

use super::{Effect, Flag, Kind};
use crate::config::choice::{BackendHealth, LbAlgorithm, values};
use crate::config::ipvs;
use crate::node::{FastPath, Masquerade};
use crate::settings::{Mode, PodRoutes, SocketLb, Tunnel};
use Effect::{Command, Development, Kpx, KubeProxy, KubeProxyOver, Nothing, Port};
use Kind::{
    Choice, Dir, Duration, File, Gates, Integer, IntegerOr, List, Number, OneOf, Switch, Text,
    Version,
};
use proxy_datapath::Mechanism;

/// The flags that `kpx trace` takes as well.
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

/// The flags that `kpx check` takes as well.
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
    flag("config", File, Command, "Read the configuration from this file: YAML or JSON, a KubeProxyConfiguration and optionally a KpxConfiguration. Most flags of kube-proxy are ignored then"),
    flag("kpx-config", File, Command, "Read the KpxConfiguration from this file"),
    flag("write-config-to", File, Command, "Write the configuration in force, with all defaults, to this file, and end"),
    flag("cleanup", Switch, Command, "Remove from this node everything that a kpx or a kube-proxy left, and end"),
    flag("init-only", Switch, Command, "Do the steps that need privileges, and end"),
    flag("version", Version, Command, "Print the version, and end"),

    flag("kubeconfig", File, KubeProxy(&["clientConnection.kubeconfig"]), "Kubeconfig to use; without it the pod's service account, else $KUBECONFIG or ~/.kube/config"),
    flag("kube-api-qps", Number, KubeProxy(&["clientConnection.qps"]), "Lists and writes per second for which kpx asks the API server; below 0 there is no limit"),
    flag("kube-api-burst", Integer, KubeProxy(&["clientConnection.burst"]), "Lists and writes that kpx may send at once"),
    Flag { aliases: &["node-name"], ..flag("hostname-override", Text, KubeProxyOver("hostnameOverride"), "Name of this node's Node object; without it the host name") },
    flag("bind-address", Text, KubeProxy(&["bindAddress"]), "This node's primary address, unless it is the unspecified one; kpx does not listen there"),
    flag("healthz-bind-address", Text, KubeProxy(&["healthzBindAddress"]), "Address that answers /healthz and /livez; empty or port 0: none"),
    flag("metrics-bind-address", Text, KubeProxy(&["metricsBindAddress"]), "Address that answers /metrics; empty or port 0: none"),
    flag("healthz-port", Integer, Port("healthzBindAddress"), "Deprecated: port for a --healthz-bind-address without one; 0: none"),
    flag("metrics-port", Integer, Port("metricsBindAddress"), "Deprecated: port for a --metrics-bind-address without one; 0: none"),
    flag("bind-address-hard-fail", Switch, KubeProxy(&["bindAddressHardFail"]), "End if kpx cannot listen on --healthz-bind-address or --metrics-bind-address"),
    flag("proxy-mode", Text, KubeProxy(&["mode"]), "The mode of kube-proxy that gives defaults and periods: iptables, ipvs, nftables or ebpf. kpx always uses eBPF"),
    flag("iptables-sync-period", Duration, KubeProxy(&["iptables.syncPeriod", "nftables.syncPeriod"]), "Period of repairs and retries. A change that is not in force after twice this time makes the node unhealthy"),
    flag("iptables-min-sync-period", Duration, KubeProxy(&["iptables.minSyncPeriod", "nftables.minSyncPeriod"]), "Write to the kernel at most once in this time; 0: at once (kube-proxy's own default is 1s)"),
    flag("ipvs-sync-period", Duration, KubeProxy(&["ipvs.syncPeriod"]), "The same in proxy mode ipvs"),
    flag("ipvs-min-sync-period", Duration, KubeProxy(&["ipvs.minSyncPeriod"]), "The same in proxy mode ipvs"),
    flag("ipvs-scheduler", Text, KubeProxy(&["ipvs.scheduler"]), "In proxy mode ipvs: the algorithm that is nearest to this scheduler of IPVS, unless --lb-algorithm names one (docs/migration.md); default: rr"),
    flag("ipvs-exclude-cidrs", List, KubeProxy(&["ipvs.excludeCIDRs"]), "In proxy mode ipvs: virtual servers of IPVS in these networks are not kube-proxy's, and --cleanup leaves them"),
    flag("masquerade-all", Switch, KubeProxy(&["iptables.masqueradeAll", "nftables.masqueradeAll"]), "Masquerade every client of a ClusterIP"),
    flag("detect-local-mode", OneOf(LOCAL_MODES), KubeProxy(&["detectLocalMode"]), "How kpx recognises local pods: by --cluster-cidr, the Node's podCIDRs, --pod-bridge-interface or --pod-interface-name-prefix"),
    flag("pod-bridge-interface", Text, KubeProxy(&["detectLocal.bridgeInterface"]), "The bridge of local pods, in mode BridgeInterface"),
    flag("pod-interface-name-prefix", Text, KubeProxy(&["detectLocal.interfaceNamePrefix"]), "The prefix of the names of local pods' devices, in mode InterfaceNamePrefix"),
    flag("cluster-cidr", Text, KubeProxy(&["clusterCIDR"]), "The pods' networks, one per family: a client with an address there is inside the cluster"),
    flag("nodeport-addresses", List, KubeProxy(&["nodePortAddresses"]), "Addresses that serve node ports: the node's addresses in these networks, `primary` for its primary addresses, `all`, or `localhost` for 127.0.0.1 and ::1, which serve programs of the host itself. Default: all except ::1, and in proxy mode nftables `primary`. A family without a network or `primary`, or with a network of length zero, has all its addresses"),
    flag("iptables-localhost-nodeports", Switch, KubeProxy(&["iptables.localhostNodePorts"]), "In proxy mode iptables: serve node ports to programs of the host at 127.0.0.1 too, if --nodeport-addresses includes it"),
    flag("oom-score-adj", Integer, KubeProxy(&["oomScoreAdj"]), "Score by which the kernel kills this process when memory runs out, from -1000 (never) to 1000"),
    flag("conntrack-max-per-core", Integer, KubeProxy(&["conntrack.maxPerCore"]), "Entries of the kernel's connection tracking, per core; 0: leave it"),
    flag("conntrack-min", Integer, KubeProxy(&["conntrack.min"]), "Minimum of entries of the kernel's connection tracking, unless --conntrack-max-per-core is 0"),
    flag("conntrack-tcp-timeout-established", Duration, KubeProxy(&["conntrack.tcpEstablishedTimeout"]), "Time for which the kernel keeps idle TCP connections; 0: leave it"),
    flag("conntrack-tcp-timeout-close-wait", Duration, KubeProxy(&["conntrack.tcpCloseWaitTimeout"]), "Time for which the kernel keeps TCP connections that one side has closed; 0: leave it"),
    flag("conntrack-tcp-be-liberal", Switch, KubeProxy(&["conntrack.tcpBeLiberal"]), "Have the kernel accept TCP packets out of window"),
    flag("conntrack-udp-timeout", Duration, KubeProxy(&["conntrack.udpTimeout"]), "Time for which the kernel keeps UDP exchanges without a reply; 0: leave it"),
    flag("conntrack-udp-timeout-stream", Duration, KubeProxy(&["conntrack.udpStreamTimeout"]), "Time for which the kernel keeps UDP exchanges with replies; 0: leave it"),
    flag("feature-gates", Gates, KubeProxy(&["featureGates"]), "Kubernetes' feature gates. kpx obeys AllowServiceExternalIPs and, in proxy mode nftables, KubeProxyNFTablesLocalhostNodePorts"),
    Flag { aliases: &["v"], ..flag("v", Integer, KubeProxyOver("logging.verbosity"), "Log level: 0, 2 (the source), 4 (every change), 6 (trace). RUST_LOG takes precedence") },
    flag("logging-format", Text, KubeProxyOver("logging.format"), "text or json"),

    flag("master", Text, Kpx("master"), "Address of the API server, instead of the kubeconfig's"),
    flag("context", Text, Kpx("context"), "Context of the kubeconfig, instead of its current one"),
    flag("manifests", Dir, Kpx("manifests"), "Read Services, EndpointSlices, Nodes and ServiceCIDRs from the YAML files of a folder instead of an API server"),
    flag("mode", Choice(values::<Mode>), Kpx("mode"), "What this host is to the cluster: one of its nodes (node), or a machine outside from which ClusterIPs become reachable (host)"),
    flag("pod-routes", Choice(values::<PodRoutes>), Kpx("podRoutes"), "In mode host: how to reach pods that the host has no route for: not at all (off), by the default route (default), or by routes that kpx makes through their nodes (nodes)"),
    flag("tunnel", Choice(values::<Tunnel>), Kpx("tunnel"), "In mode host: how to reach Services whose pods have no route and that have no node port: not at all (off), or by TCP through the API server, as kubectl port-forward does (tcp). It takes the right to get and create pods/portforward"),
    flag("dns-address", Text, Kpx("dnsAddress"), "In mode host: the address and port at which programs of this machine ask for the cluster's names, or `none`; default: 127.0.0.153:53"),
    flag("cluster-domain", Text, Kpx("clusterDomain"), "In mode host: the domain of the cluster's names"),
    flag("node-ip", List, Kpx("nodeIPs"), "This node's addresses, one per family, instead of the Node object's"),
    flag("service-cidr", List, Kpx("serviceCIDRs"), "The ranges of ClusterIPs, instead of the ServiceCIDR objects'"),
    flag("external-ip-cidrs", List, Kpx("externalIPCIDRs"), "The networks from which Services may have ExternalIPs, or `none`; without it any addresses but the API server's, those that mean the same on every host, this node's podCIDRs and pods of other namespaces. In mode host the networks from which they may have ExternalIPs and load balancer addresses; without it none"),
    flag("masquerade", Choice(values::<Masquerade>), Kpx("masquerade"), "Which clients to masquerade: only where replies would otherwise bypass the node (default), or exactly as kube-proxy does (compat)"),
    flag("cluster-ip-external", Switch, Kpx("clusterIPExternal"), "Let clients outside the cluster reach ClusterIPs through this node, as kube-proxy does; false restricts ClusterIPs to the cluster"),
    flag("lb-algorithm", Choice(values::<LbAlgorithm>), Kpx("lbAlgorithm"), "Algorithm that selects a new flow's backend, for Services without the annotation `kpx.dev/lb-algorithm`; in proxy mode ipvs the default goes by --ipvs-scheduler"),
    flag("local-redirect", Switch, Kpx("localRedirect"), "Let pods of this node answer for a Service, where its annotation `kpx.dev/local-redirect` or a LocalRedirect names them. kpx then watches the node's Pods, and LocalRedirects if the cluster has them"),
    flag("local-redirect-addresses", List, Kpx("localRedirectAddresses"), "The networks of addresses that a LocalRedirect may redirect where they are no Service's, such as 169.254.169.254/32 of a cloud's metadata, for all pods of the node; without it none. Needs --local-redirect"),
    flag("kubernetes-version", Text, Kpx("kubernetesVersion"), "Version of the cluster, such as 1.38, for what kube-proxy does by its version: from 1.40 on a configuration without a mode means nftables, and ExternalIPs need the feature gate AllowServiceExternalIPs"),
    flag("backend-health", Choice(values::<BackendHealth>), Kpx("backendHealth"), "What follows where a backend gives no answer on this node, for Services without the annotation `kpx.dev/backend-health`: nothing (off), Events and metrics (observe), or new TCP connections of this node go to other backends, at most half of them are left out, and a SYN that comes again after a second tries another one (on)"),
    flag("attach", Choice(values::<Mechanism>), Kpx("attach"), "How to attach programs; default: TCX where the kernel has it, else clsact"),
    flag("fast-path", Choice(values::<FastPath>), Kpx("fastPath"), "Which packets skip the node's stack: none (off); whole connections between its pods where no rule would change them, open ones between its pods where rules let those pass, and open ones that conntrack does not follow (auto); whole ones as with auto, and all open ones, whose opening and end alone the rules see then (on)"),
    flag("flow-table-size", Integer, Kpx("flowTableSize"), "Entries of each family's flow table. A flow takes two or four of them; a quarter as many flows may be half-open. 0: by the machine's memory, an entry for every 64 KiB, down to the next power of two, from 131,072 to 1,048,576. A larger existing table stays"),
    flag("service-table-size", Integer, Kpx("serviceTableSize"), "Entries of each family's tables of frontends and of service ports. A Service has a frontend for its ClusterIP, and one for each of its ports at each address and node port. 0: by the machine's memory, an entry for every 56 KiB, down to the next power of two, from 65,536 to 262,144. A larger existing table stays"),
    flag("endpoint-table-size", Integer, Kpx("endpointTableSize"), "Entries of each family's tables of endpoints. An endpoint has one for each service port, and one more where that port has local endpoints of its own. 0: by the machine's memory, an entry for every 28 KiB, down to the next power of two, from 262,144 to 1,048,576. A larger existing table stays"),
    flag("socket-lb", Choice(values::<SocketLb>), Kpx("socketLB"), "Which sockets to connect straight to a backend, so that none of their packets is translated: none (off), the host's own (host), those of pods as well (all), or on a node the host's own and those of pods that nothing speaks against, if kernel and cgroups allow that (auto)"),
    flag("socket-lb-udp", Switch, Kpx("socketLBUDP"), "With --socket-lb: UDP sockets as well as TCP sockets"),
    flag("cgroup-root", Dir, Kpx("cgroupRoot"), "With --socket-lb: the cgroup (version 2) whose sockets are translated; default: the root"),
    flag("node-timeout", Duration, Kpx("nodeTimeout"), "Time to wait for the Node object's podCIDRs, where --detect-local-mode needs them, before kpx gives up. For the object and its addresses kpx waits no longer than this and 30 s, and then serves with the machine's own addresses"),
    flag("run-dir", Dir, Kpx("runDir"), "Folder for the agent's socket, and for the list of its changes on this host"),
    flag("socket-group", Text, Kpx("socketGroup"), "Group whose members may ask the agent by its socket, by name in /etc/group or by number; without it root alone may. They read what `kpx status`, `flows` and `monitor` show, and change nothing"),
    flag("bpf-dir", Dir, Kpx("bpfDir"), "Folder in a BPF file system for the maps and links that outlive the agent"),
    flag("cleanup-on-exit", Switch, Kpx("cleanupOnExit"), "Remove everything from this host when the agent ends. Without it Services stay reachable in their last known state, as restarts and upgrades need. On by default in mode host"),
    flag("ui", Switch, Kpx("ui"), "Serve a web page beside /metrics"),
    flag("service-metrics", IntegerOr("500"), Kpx("serviceMetrics"), "Tell traffic, connect times and failures of so many ports of Services in /metrics, and the sum of the other Services; without a number of 500. Each port then has 17 series"),
    flag("monitor-history", IntegerOr("10000"), Kpx("monitorHistory"), "Keep the last so many packets that opened flows, and as many that were dropped or rejected, for `kpx monitor --since`; without a number 10,000, at most 100,000. Each takes less than 1 KiB, and the programs then tell of such packets all the time"),
    flag("bpf-stats", Switch, Kpx("bpfStats"), "Have the kernel measure how often and how long the programs run, for /metrics. Each run then takes some tens of nanoseconds more"),

    flag("bpf-object", File, Development, "Load the kernel programs of this object instead of those in this binary"),

    ignored("config-sync-period", Duration, KubeProxy(&["configSyncPeriod"]), "kpx's watches have their own pace"),
    ignored("kube-api-content-type", Text, KubeProxy(&["clientConnection.contentType"]), "kpx speaks JSON with the API server"),
    ignored("profiling", Switch, KubeProxy(&["enableProfiling"]), "kpx has no Go profiles"),
    ignored("show-hidden-metrics-for-version", Text, KubeProxy(&["showHiddenMetricsForVersion"]), "kpx hides no metrics"),
    ignored("iptables-masquerade-bit", Integer, KubeProxy(&["iptables.masqueradeBit", "nftables.masqueradeBit"]), "kpx sets no firewall mark"),
    ignored("ipvs-strict-arp", Switch, KubeProxy(&["ipvs.strictARP"]), ipvs::STRICT_ARP),
    ignored("ipvs-tcp-timeout", Duration, KubeProxy(&["ipvs.tcpTimeout"]), ipvs::TIMEOUTS),
    ignored("ipvs-tcpfin-timeout", Duration, KubeProxy(&["ipvs.tcpFinTimeout"]), ipvs::TIMEOUTS),
    ignored("ipvs-udp-timeout", Duration, KubeProxy(&["ipvs.udpTimeout"]), ipvs::TIMEOUTS),
    ignored("proxy-port-range", Text, KubeProxy(&["portRange"]), "kpx binds no ports"),
    ignored("vmodule", List, Nothing, "RUST_LOG does the same for kpx's modules"),
    ignored("log-flush-frequency", Duration, KubeProxy(&["logging.flushFrequency"]), LOG),
    ignored("log-text-split-stream", Switch, Nothing, LOG),
    ignored("log-text-info-buffer-size", Text, Nothing, LOG),
    ignored("log-json-split-stream", Switch, Nothing, LOG),
    ignored("log-json-info-buffer-size", Text, Nothing, LOG),
    ignored("boot-id-file", Text, Nothing, "kpx does not report it"),
    ignored("machine-id-file", Text, Nothing, "kpx does not report it"),
    ignored("windows-service", Switch, KubeProxy(&["windowsRunAsService"]), WINDOWS),
    ignored("network-name", Text, KubeProxy(&["winkernel.networkName"]), WINDOWS),
    ignored("source-vip", Text, KubeProxy(&["winkernel.sourceVip"]), WINDOWS),
    ignored("enable-dsr", Switch, KubeProxy(&["winkernel.enableDSR"]), WINDOWS),
    ignored("root-hnsendpoint-name", Text, KubeProxy(&["winkernel.rootHnsEndpointName"]), WINDOWS),
    ignored("forward-healthcheck-vip", Switch, KubeProxy(&["winkernel.forwardHealthCheckVip"]), WINDOWS),
];

const LOG: &str = "kpx does not buffer its log";
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

/// `help` says why.
const fn ignored(name: &'static str, kind: Kind, effect: Effect, help: &'static str) -> Flag {
    Flag {
        is_obeyed: false,
        ..flag(name, kind, effect, help)
    }
}

/// Fields without a flag, and why kpx does nothing with them.
#[cfg(test)]
pub(in crate::config) const FIELDS_WITHOUT_FLAG: &[(&str, &str)] = &[
    (
        "clientConnection.acceptContentTypes",
        "kpx speaks JSON with the API server",
    ),
    (
        "logging.vmodule",
        "RUST_LOG does the same for kpx's modules",
    ),
    ("logging.options", LOG),
];
