//! Collects facts about this host. This module neither evaluates the facts nor changes the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use aya::programs::{SchedClassifier, TcAttachType, loaded_programs};
use caps::{CapSet, Capability};
use ipnet::IpNet;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::needs::{Need, missing};
use crate::orphan::is_orphaned;
use crate::probe::{Probed, probe};
use crate::processes;
use crate::rules::KubeProxyRules;
use crate::setting::Setting;
use proxy_net::anchor::anchor_mtu;
use proxy_net::fib;
use proxy_net::filter;
use proxy_net::foreign_rule::{self, ForeignRule};
use proxy_net::kernel::Preemption;
use proxy_net::link::{KUBE_IPVS0, Link};
use proxy_net::netfilter::{Netfilter, Refusal};
use proxy_net::role::{Role, role, why_no_pod};
use proxy_net::rule;
use proxy_net::xfrm::{self, Policy};
use proxy_net::{self as net, LinkEvent, lock, sysctl};
use proxy_source::kubernetes::NotGranted;
use proxy_view::RUN_DIR;
use proxy_view::client::Client;

#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// The kernel's release, as `uname -r` prints it.
    pub(crate) kernel: String,
    pub(crate) preemption: Preemption,
    /// The capabilities that kpx needs and this process does not have.
    pub(crate) missing_capabilities: Vec<Need>,
    pub(crate) probed: Probed,
    pub(crate) btf: bool,
    /// The types of mounted file systems.
    pub(crate) mounted: BTreeSet<String>,
    /// The limit on locked memory in bytes, after the loader has raised it as far as permitted;
    /// `None` if unlimited.
    pub(crate) memlock: Option<u64>,
    /// The kernel's sysctls by their keys below `net`.
    pub(crate) sysctls: BTreeMap<&'static str, String>,
    /// The CNI plugins named in configurations.
    pub(crate) cni: BTreeSet<String>,
    /// The names of all BPF programs in the kernel.
    pub(crate) programs: BTreeSet<String>,
    /// Foreign programs on kpx's hooks: device, hook, program.
    pub(crate) others: Vec<(String, &'static str, String)>,
    /// The IPsec policies for outgoing packets.
    pub(crate) ipsec: Vec<Policy>,
    /// The error from reading the IPsec policies.
    pub(crate) ipsec_unknown: Option<String>,
    /// The routing rules that the programs' FIB look-ups ignore.
    pub(crate) unasked_rules: Vec<ForeignRule>,
    /// The operator's ClusterIP ranges. The networks of this host's routes inside them follow.
    pub(crate) service_ranges: Vec<IpNet>,
    pub(crate) routes_in_ranges: Vec<IpNet>,
    /// Foreign routing rules before kpx's that may match this host's packets to ClusterIPs.
    pub(crate) early_rules: Vec<String>,
    /// The netfilter chains that refuse traffic between pods and clients outside the cluster.
    pub(crate) refusals: Vec<Refusal>,
    /// Descriptions of the chains that drop packets to the host itself.
    pub(crate) closed_inputs: Vec<String>,
    /// The pods' networks, if the operator configured them.
    pub(crate) pod_networks: Vec<IpNet>,
    /// The error from reading netfilter's rules.
    pub(crate) netfilter_unknown: Option<String>,
    /// The devices on which a foreign qdisc takes the place of clsact.
    pub(crate) without_egress: Vec<String>,
    /// The sysctl for bpf(2) without CAP_BPF: 0 permits it. `None` if the sysctl is missing.
    pub(crate) unprivileged_bpf_disabled: Option<u8>,
    /// True if a kpx instance serves this host.
    pub(crate) kpx_runs: bool,
    /// True if kpx's programs serve without an agent.
    pub(crate) is_orphaned: bool,
    /// The place that keeps the running kpx's programs and maps across its restarts: see
    /// [`proxy_view::status::Status::kept_by`].
    pub(crate) kept_by: Option<String>,
    /// The result of reading the kubeconfig; `None` if no kubeconfig is given.
    pub(crate) kubeconfig: Option<Result<(), NotGranted>>,
    /// The ids of processes with the name kube-proxy, except kpx's own.
    pub(crate) kube_proxies: Vec<u32>,
    pub(crate) kube_proxy_rules: KubeProxyRules,
    /// The error from reading kube-proxy's rules.
    pub(crate) kube_proxy_rules_unknown: Option<String>,
    /// True if the device of kube-proxy's IPVS mode exists.
    pub(crate) kube_ipvs0: bool,
    /// The default ports of kpx that cannot be bound.
    pub(crate) taken_ports: Vec<u16>,
    /// The smallest MTU of the devices that leave this host, in bytes.
    pub(crate) mtu: u32,
    /// The largest MTU of a pod's device, in bytes.
    pub(crate) pod_mtu: Option<u32>,
    /// The reasons why veths into other network namespaces do not count as pods'. Veths that cannot
    /// be pods' are omitted.
    pub(crate) no_pods: Vec<String>,
}

pub(crate) const IP_FORWARD: &str = "ipv4/ip_forward";
pub(crate) const IP6_FORWARD: &str = "ipv6/conf/all/forwarding";
pub(crate) const RP_FILTER: &str = "ipv4/conf/all/rp_filter";
pub(crate) const ROUTE_LOCALNET: &str = "ipv4/conf/all/route_localnet";
pub(crate) const CONNTRACK_MAX: &str = "netfilter/nf_conntrack_max";
pub(crate) const CONNTRACK_COUNT: &str = "netfilter/nf_conntrack_count";
pub(crate) const BRIDGE_IPTABLES: &str = "bridge/bridge-nf-call-iptables";

const SYSCTLS: [&str; 7] = [
    IP_FORWARD,
    IP6_FORWARD,
    RP_FILTER,
    ROUTE_LOCALNET,
    CONNTRACK_MAX,
    CONNTRACK_COUNT,
    BRIDGE_IPTABLES,
];

/// kpx's default ports for metrics and health, which are also kube-proxy's.
pub(crate) const PORTS: [u16; 2] = [10_249, 10_256];

const CNI_DIR: &str = "/etc/cni/net.d";

pub(crate) async fn gather(setting: &Setting) -> Result<Facts> {
    let links = links().await?;
    let pods = links
        .values()
        .filter(|link| role(link, &links) == Role::Device { pod: true });
    let mut sysctls = BTreeMap::new();
    for key in SYSCTLS {
        sysctls.extend(sysctl::read(key)?.map(|value| (key, value)));
    }
    let kpx_runs = lock::take().is_err();
    let (ipsec, ipsec_unknown) = match xfrm::outgoing_policies().await {
        Ok(policies) => (policies, None),
        Err(error) => (Vec::new(), Some(format!("{error:#}"))),
    };
    let netfilter = Netfilter::read().await;
    let everywhere = Netfilter::everywhere();
    let networks = if setting.pod_networks.is_empty() {
        &everywhere[..]
    } else {
        &setting.pod_networks
    };
    let (refusals, closed_inputs) = netfilter
        .as_ref()
        .map(|rules| (rules.refusals(networks), rules.closed_inputs()))
        .unwrap_or_default();
    let missing_capabilities = missing(CapSet::Effective)?;
    let (kube_proxy_rules, kube_proxy_rules_unknown) = kube_proxy_rules(&missing_capabilities);
    Ok(Facts {
        kernel: kernel()?,
        preemption: Preemption::read(Path::new("/"))?,
        missing_capabilities,
        probed: probe(),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        mounted: mounted()?,
        memlock: Some(
            getrlimit(Resource::RLIMIT_MEMLOCK)
                .context("read the limit on locked memory")?
                .0,
        )
        .filter(|limit| *limit != RLIM_INFINITY),
        sysctls,
        cni: cni(Path::new(CNI_DIR)),
        programs: loaded_programs()
            .filter_map(|info| Some(info.ok()?.name_as_str()?.to_owned()))
            .collect(),
        others: others(links.values()).await?,
        ipsec,
        ipsec_unknown,
        unasked_rules: unasked_rules().await?,
        service_ranges: setting.service_cidrs.clone(),
        routes_in_ranges: routes_in(&setting.service_cidrs).await?,
        early_rules: early_rules(&setting.service_cidrs).await?,
        refusals,
        closed_inputs,
        pod_networks: setting.pod_networks.clone(),
        netfilter_unknown: netfilter.err().map(|error| format!("{error:#}")),
        without_egress: links
            .values()
            .filter(|link| link.lacks_egress)
            .map(|link| link.name.clone())
            .collect(),
        unprivileged_bpf_disabled: unprivileged_bpf_disabled(),
        kpx_runs,
        is_orphaned: is_orphaned().await?,
        kept_by: kept_by().await,
        kubeconfig: usable(setting).await,
        kube_proxies: processes::kube_proxies()?,
        kube_proxy_rules,
        kube_proxy_rules_unknown,
        kube_ipvs0: links.values().any(|link| link.name == KUBE_IPVS0),
        taken_ports: PORTS.into_iter().filter(|port| !is_free(*port)).collect(),
        mtu: anchor_mtu(&links),
        pod_mtu: pods.map(|link| link.mtu).max(),
        no_pods: links
            .values()
            .filter_map(|link| why_no_pod(link, &links))
            .collect(),
    })
}

/// Returns the networks of this host's routes inside the ranges, except kpx's own routes.
async fn routes_in(ranges: &[IpNet]) -> Result<Vec<IpNet>> {
    let (driver, handle) = net::connect()?;
    tokio::select! {
        found = fib::networks_within(&handle, ranges) => found,
        () = driver => bail!("the netlink socket has failed"),
    }
}

/// Returns the routing rules before kpx's that may match packets to these ranges.
async fn early_rules(ranges: &[IpNet]) -> Result<Vec<String>> {
    let (driver, handle) = net::connect()?;
    tokio::select! {
        found = rule::before_ours(&handle, ranges) => found,
        () = driver => bail!("the netlink socket has failed"),
    }
}

/// Returns `kept_by` from the running kpx's status. Its run directory may be inside a container.
async fn kept_by() -> Option<String> {
    let process = processes::kpx().ok()??;
    let run_dir = format!("/proc/{process}/root{RUN_DIR}");
    let status = Client::new(Path::new(&run_dir)).status().await.ok()?;
    Some(status.kept_by).filter(|kept_by| !kept_by.is_empty())
}

async fn usable(setting: &Setting) -> Option<Result<(), NotGranted>> {
    setting.named_api_server()?;
    Some(setting.source.check().await.map_err(NotGranted::from))
}

/// Returns kube-proxy's rules, or the error from reading them.
fn kube_proxy_rules(missing: &[Need]) -> (KubeProxyRules, Option<String>) {
    let lacks = missing
        .iter()
        .any(|need| need.capability == Capability::CAP_NET_ADMIN);
    if lacks {
        let why = "reading them takes CAP_NET_ADMIN".to_owned();
        return (KubeProxyRules::default(), Some(why));
    }
    match KubeProxyRules::find() {
        Ok(rules) => (rules, None),
        Err(error) => (KubeProxyRules::default(), Some(format!("{error:#}"))),
    }
}

/// A period longer than this command runs.
const ONCE: Duration = Duration::from_secs(3_600);

pub(crate) async fn links() -> Result<BTreeMap<u32, Link>> {
    let (sender, mut events) = mpsc::channel(1);
    tokio::select! {
        ended = net::watch(sender, ONCE) => ended.and_then(|()| bail!("the watch on devices has ended")),
        event = events.recv() => match event {
            Some(LinkEvent::All(links)) => Ok(links.into_iter().map(|link| (link.index, link)).collect()),
            _ => bail!("the devices are not listed"),
        },
    }
}

fn kernel() -> Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/osrelease")
        .context("read the kernel's version")?
        .trim()
        .to_owned())
}

fn unprivileged_bpf_disabled() -> Option<u8> {
    fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled")
        .ok()?
        .trim()
        .parse()
        .ok()
}

fn mounted() -> Result<BTreeSet<String>> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("read the mounts")?;
    Ok(mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(2))
        .map(str::to_owned)
        .collect())
}

/// Returns the names of the plugins in all configurations. An unreadable file is ignored.
fn cni(dir: &Path) -> BTreeSet<String> {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    let read = files.filter_map(|file| {
        serde_json::from_str::<Value>(&fs::read_to_string(file.path()).ok()?).ok()
    });
    let types = |config: Value| -> Vec<String> {
        let plugins = config["plugins"].as_array().cloned().unwrap_or_default();
        let all = plugins.into_iter().chain([config]);
        all.filter_map(|plugin| plugin["type"].as_str().map(str::to_owned))
            .collect()
    };
    read.flat_map(types).collect()
}

/// Lists the TCX programs and BPF filters on the devices, except kpx's own.
async fn others(links: impl Iterator<Item = &Link>) -> Result<Vec<(String, &'static str, String)>> {
    let (driver, handle) = net::connect()?;
    let find = async {
        let mut others = Vec::new();
        for link in links {
            for (attach_type, hook) in [
                (TcAttachType::Ingress, "ingress"),
                (TcAttachType::Egress, "egress"),
            ] {
                // A kernel without TCX has no TCX programs.
                let programs = SchedClassifier::query_tcx(&link.name, attach_type)
                    .map(|(_, programs)| programs);
                let names = programs.unwrap_or_default().into_iter();
                let names = names.map(|program| program.name_as_str().unwrap_or("?").to_owned());
                others.extend(names.map(|name| (link.name.clone(), hook, name)));
            }
            for filter in filter::list(&handle, link.index)
                .await?
                .into_iter()
                .filter(|filter| !filter.is_ours())
            {
                others.push((link.name.clone(), filter.hook.name(), filter.name));
            }
        }
        others.retain(|(_, _, name)| !name.starts_with("kpx_"));
        anyhow::Ok(others)
    };
    tokio::select! {
        others = find => others,
        () = driver => bail!("the netlink socket has failed"),
    }
}

async fn unasked_rules() -> Result<Vec<ForeignRule>> {
    let (driver, handle) = net::connect()?;
    tokio::select! {
        rules = foreign_rule::unasked(&handle) => rules,
        () = driver => bail!("the netlink socket has failed"),
    }
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_read_from_single_configurations_and_lists() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            (
                "10-calico.conflist",
                r#"{"plugins": [{"type": "calico"}, {"type": "portmap"}]}"#,
            ),
            ("20-bridge.conf", r#"{"type": "bridge"}"#),
            ("README", "nothing"),
        ];
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        assert_eq!(
            Vec::from_iter(cni(dir.path())),
            ["bridge", "calico", "portmap"]
        );
        assert!(cni(&dir.path().join("none")).is_empty());
    }
}
