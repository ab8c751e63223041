//! The needs of a machine outside the cluster (`kpx check --mode host`): access to the API server,
//! rights there, ClusterIP ranges without overlap with this machine's networks, and names.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use ipnet::IpNet;

use crate::finding::{Finding, Level, fail, ok, warn};
use crate::processes::holds_lock;
use crate::setting::Setting;
use proxy_net::fib::{self, RouteClass};
use proxy_net::link::Link;
use proxy_net::{self as net, anchor};
use proxy_source::kubernetes::{Fault, ForeignHome, Granted, NotGranted, Streams};

/// The number of addresses of a range whose routes are checked, evenly spread.
const SAMPLES: u128 = 64;

/// The facts about a machine outside the cluster.
#[derive(Debug, Default)]
pub(crate) struct Outside {
    /// The rights that the API server grants, or the error from checking them. `None` if there is
    /// no API server.
    pub(crate) granted: Option<Result<Granted, NotGranted>>,
    /// This machine's networks and addresses inside ClusterIP ranges, each with the range.
    pub(crate) overlaps: Vec<(IpNet, String)>,
    pub(crate) names: Names,
    /// The kubeconfig's credential plugin, if its home directory belongs to another user.
    pub(crate) foreign_home: Option<ForeignHome>,
}

/// The state of name resolution.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Names {
    #[default]
    Resolved,
    /// systemd-resolved does not answer.
    NoResolved,
    Off,
    /// kpx's name server cannot bind its address.
    Unbound {
        at: SocketAddr,
        kind: ErrorKind,
        why: String,
    },
}

pub(crate) async fn gather(setting: &Setting, links: &BTreeMap<u32, Link>) -> Result<Outside> {
    let granted = match setting.api_server() {
        Some(options) => Some(options.granted(setting.has_tunnel).await),
        None => None,
    };
    let foreign_home = match setting.api_server() {
        Some(options) => options.foreign_home().await,
        None => None,
    };
    let overlaps = overlaps(ranges(setting, granted.as_ref()).unwrap_or_default(), links).await?;
    Ok(Outside {
        overlaps,
        granted,
        names: names(setting.names),
        foreign_home,
    })
}

/// Returns the ClusterIP ranges: the operator's ranges, otherwise the cluster's. `None` if neither
/// is available.
fn ranges<'a>(
    setting: &'a Setting,
    granted: Option<&'a Result<Granted, NotGranted>>,
) -> Option<&'a [IpNet]> {
    let of_operator = Some(&setting.service_cidrs).filter(|ranges| !ranges.is_empty());
    let of_cluster = granted.and_then(|granted| Some(&granted.as_ref().ok()?.service_cidrs));
    of_operator.or(of_cluster).map(Vec::as_slice)
}

/// Returns this machine's networks and addresses inside the ranges, except kpx's own devices and
/// routes.
async fn overlaps(ranges: &[IpNet], links: &BTreeMap<u32, Link>) -> Result<Vec<(IpNet, String)>> {
    let mut found = Vec::new();
    for range in ranges {
        for link in links
            .values()
            .filter(|link| ![anchor::NAME, anchor::PEER].contains(&link.name.as_str()))
        {
            let nets = link
                .addrs
                .iter()
                .filter(|net| range.contains(&net.addr()) || net.trunc().contains(&range.addr()));
            found.extend(nets.map(|net| (*range, format!("{net} of device {}", link.name))));
        }
        if !found.iter().any(|(of, _)| of == range)
            && let Some(ip) = routed(range, links).await?
        {
            found.push((
                *range,
                format!("a route for {ip}, perhaps a VPN's or a container network's"),
            ));
        }
    }
    Ok(found)
}

/// Returns an address of the range that has a route other than the default route.
async fn routed(range: &IpNet, links: &BTreeMap<u32, Link>) -> Result<Option<IpAddr>> {
    let ours = links
        .values()
        .find(|link| link.name == anchor::NAME)
        .map_or(0, |link| link.index);
    let (driver, handle) = net::connect()?;
    let ask = async {
        let classes = fib::route_classes(&handle, &samples(range), ours).await?;
        let is_taken = |class: &RouteClass| {
            matches!(
                class,
                RouteClass::Own | RouteClass::OnLink(_) | RouteClass::Routed
            )
        };
        anyhow::Ok(
            classes
                .into_iter()
                .find(|(_, class)| is_taken(class))
                .map(|(ip, _)| ip),
        )
    };
    tokio::select! {
        found = ask => found,
        () = driver => bail!("the netlink socket has failed"),
    }
}

/// Returns evenly spread addresses of a range, beginning with its second address.
fn samples(range: &IpNet) -> BTreeSet<IpAddr> {
    let bits = range.max_prefix_len() - range.prefix_len();
    let size = if bits >= 127 { u128::MAX } else { 1 << bits };
    let step = (size / SAMPLES).max(1);
    let nth = |n: u128| match range.network() {
        IpAddr::V4(first) => IpAddr::from((u32::from(first) + n as u32).to_be_bytes()),
        IpAddr::V6(first) => IpAddr::from((u128::from(first) + n).to_be_bytes()),
    };
    (0..SAMPLES.min(size))
        .map(|n| nth((n * step + 1).min(size - 1)))
        .collect()
}

fn names(at: Option<SocketAddr>) -> Names {
    let Some(at) = at else { return Names::Off };
    // A running kpx may hold the address.
    if let Err(error) = listen(at)
        && !(error.kind() == ErrorKind::AddrInUse && holds_lock().unwrap_or(false))
    {
        return Names::Unbound {
            at,
            kind: error.kind(),
            why: error.to_string(),
        };
    }
    let status = Command::new("resolvectl")
        .arg("dns")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if status.is_ok_and(|status| status.success()) {
        Names::Resolved
    } else {
        Names::NoResolved
    }
}

/// Binds the address like kpx's name server, and releases it.
fn listen(at: SocketAddr) -> io::Result<()> {
    let _udp = UdpSocket::bind(at)?;
    TcpListener::bind(at).map(drop)
}

/// Returns the findings in the order of the report.
pub(crate) fn judge(setting: &Setting, facts: &Outside) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &facts.granted {
        None => {}
        Some(Err(not)) => findings.push(fail("API server", not.to_string(), mend(not.fault))),
        Some(Ok(granted)) => {
            findings.push(ok("API server", format!("{} answers", granted.server)));
            findings.push(rights(granted));
            findings.extend(granted.streams.as_ref().map(tunnel));
        }
    }
    findings.extend(facts.foreign_home.as_ref().map(|foreign| {
        warn("credentials", foreign.to_string(), "if the plugin stores renewed tokens there, use a ServiceAccount's token: docs/host-mode.md#kubeconfigs-with-exec-plugins")
    }));
    let known = ranges(setting, facts.granted.as_ref());
    findings.extend(known.map(|known| service_networks(known, &facts.overlaps)));
    findings.push(judge_names(setting, &facts.names));
    findings
}

/// Returns the remedy for a fault on the path to the API server.
pub(crate) fn mend(fault: Fault) -> &'static str {
    match fault {
        Fault::NoKubeconfig => {
            "name a kubeconfig: --kubeconfig; under sudo kpx looks into root's home"
        }
        Fault::Kubeconfig => "fix this kubeconfig and its files, or use another: --kubeconfig",
        Fault::Context => "choose a context of the kubeconfig: --context",
        Fault::Plugin => {
            "run the kubeconfig's credential plugin as the user of kpx, who needs its program and its login"
        }
        Fault::Credentials => {
            "log in again, or name a kubeconfig with credentials that the API server takes"
        }
        Fault::Certificate => {
            "compare the kubeconfig's certificate-authority and server with the API server's certificate, and its dates with this clock"
        }
        Fault::Name => {
            "fix this machine's DNS, or use a kubeconfig with an IP address of the control plane"
        }
        Fault::Unreachable => {
            "use a kubeconfig with an address of the control plane that this machine reaches, or fix the path: VPN, firewall"
        }
        Fault::Answer => {
            "see if that address is an API server's, and if it is ready: kubectl get --raw /readyz"
        }
    }
}

fn judge_names(setting: &Setting, names: &Names) -> Finding {
    const WHAT: &str = "names";
    let domain = &setting.cluster_domain;
    let (at, kind, why) = match names {
        Names::Resolved => {
            return ok(
                WHAT,
                "systemd-resolved runs, and kpx configures it for the cluster's",
            );
        }
        Names::Off => return ok(WHAT, "disabled by --dns-address"),
        Names::NoResolved => {
            let at = setting
                .names
                .map(|at| at.ip().to_string())
                .unwrap_or_default();
            let fix = format!(
                "configure your resolver to use {at} for {domain}: docs/host-mode.md#names"
            );
            return warn(WHAT, "no systemd-resolved answers", fix);
        }
        Names::Unbound { at, kind, why } => (at, kind, why),
    };
    match kind {
        ErrorKind::AddrInUse => {
            let fix = format!(
                "give kpx another --dns-address, or end that program: ss -lnp sport = :{}",
                at.port()
            );
            warn(WHAT, format!("{at} is taken by another program"), fix)
        }
        ErrorKind::PermissionDenied => warn(
            WHAT,
            format!("this process may not listen at {at}"),
            "run kpx check as root; kpx needs CAP_NET_BIND_SERVICE for ports below 1024, or a --dns-address with a higher one",
        ),
        ErrorKind::AddrNotAvailable if at.is_ipv4() => warn(
            WHAT,
            format!("{} is not assigned to this host", at.ip()),
            "bring lo up: ip link set lo up",
        ),
        ErrorKind::AddrNotAvailable => warn(
            WHAT,
            format!("{} is not assigned to this host", at.ip()),
            "switch IPv6 on for lo (sysctl -w net.ipv6.conf.lo.disable_ipv6=0), or give kpx an IPv4 --dns-address",
        ),
        _ => warn(
            WHAT,
            format!("kpx cannot listen at {at}: {why}"),
            "give kpx another --dns-address",
        ),
    }
}

/// Checks the right that the tunnel needs.
fn tunnel(streams: &Streams) -> Finding {
    const WHAT: &str = "tunnel";
    const ROLE: &str =
        "bind the ClusterRole kpx-host-tunnel of deploy/kubernetes/host: docs/host-mode.md#rights";
    match streams {
        Streams::Everywhere => ok(WHAT, "pods/portforward is granted in all namespaces"),
        Streams::In(namespace) => {
            let found =
                format!("pods/portforward is granted in namespace {namespace}, and not in all");
            warn(
                WHAT,
                found,
                "if Services of other namespaces need the tunnel, grant it there too",
            )
        }
        Streams::Nowhere { namespace, lacks } if *lacks == ["create"] => {
            let found =
                format!("no right to create pods/portforward, in all namespaces or in {namespace}");
            warn(
                WHAT,
                found,
                "if the API server is 1.35 or later, bind the ClusterRole kpx-host-tunnel, which it requires",
            )
        }
        Streams::Nowhere { namespace, lacks } => {
            let verbs = lacks.join(" and ");
            let found = format!(
                "no right to {verbs} pods/portforward, in all namespaces or in {namespace}"
            );
            fail(WHAT, found, ROLE)
        }
        Streams::Unknown(why) => warn(
            WHAT,
            format!("unknown whether pods/portforward is granted: {why}"),
            "see kubectl auth can-i create pods/portforward",
        ),
    }
}

/// Checks the rights. Some are optional.
fn rights(granted: &Granted) -> Finding {
    const WHAT: &str = "rights";
    let Some((resource, why)) = granted.refused.first() else {
        return ok(WHAT, "to list and watch all that kpx reads");
    };
    let found = format!("{resource}: {why}");
    let all = granted
        .refused
        .iter()
        .map(|(resource, _)| resource.as_str());
    let all = all.collect::<Vec<_>>().join(", ");
    let fix = format!(
        "grant list and watch of {all}: the ClusterRole kpx-host, docs/host-mode.md#rights"
    );
    let is_needed = granted
        .refused
        .iter()
        .any(|(resource, _)| matches!(resource.as_str(), "services" | "endpointslices"));
    let level = if is_needed { Level::Fail } else { Level::Warn };
    Finding {
        level,
        what: WHAT,
        found,
        fix: Some(fix),
    }
}

fn service_networks(ranges: &[IpNet], overlaps: &[(IpNet, String)]) -> Finding {
    const WHAT: &str = "service networks";
    match (overlaps, ranges) {
        ([], []) => warn(
            WHAT,
            "unknown: the cluster has no ServiceCIDR objects",
            "name them: --service-cidr",
        ),
        ([], ranges) => ok(
            WHAT,
            format!("{} are free here", proxy_view::output::list(ranges)),
        ),
        ([(range, what), ..], _) => {
            let found = format!("{range} overlaps with {what}");
            warn(
                WHAT,
                found,
                "renumber that network: while kpx runs, packets to one of the two networks are misrouted",
            )
        }
    }
}

#[cfg(test)]
mod tests;
