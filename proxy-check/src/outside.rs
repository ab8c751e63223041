//! The needs of a machine outside of the cluster (`kpx check --mode host`): the way to the API server and the rights there, room for the
//! cluster's Services among this machine's networks, and the names.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use ipnet::IpNet;

use crate::finding::{Finding, Level, fail, ok, warn};
use crate::processes::holds_lock;
use proxy_net::fib::{self, RouteClass};
use proxy_net::link::Link;
use proxy_net::{self as net, anchor};
use proxy_source::kubernetes::{self, Granted};
use proxy_view::DNS_ADDRESS;

/// The addresses of a range whose routes are looked at, evenly spread.
const SAMPLES: u128 = 64;

/// The facts about a machine outside of the cluster.
#[derive(Debug, Default)]
pub(crate) struct Outside {
    /// The rights that the API server grants; an error says why it was not asked.
    pub(crate) granted: Option<Result<Granted, String>>,
    /// The networks and addresses of this machine that lie in ranges of ClusterIPs, each with the range.
    pub(crate) overlaps: Vec<(IpNet, String)>,
    pub(crate) names: Names,
}

/// The way of names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Names {
    #[default]
    Resolved,
    /// No systemd-resolved answers.
    NoResolved,
    /// The address of kpx's server is taken.
    Taken,
}

pub(crate) async fn gather(kubeconfig: Option<PathBuf>, links: &BTreeMap<u32, Link>) -> Result<Outside> {
    let options = kubernetes::Options { kubeconfig, ..Default::default() };
    let granted = options.granted().await.map_err(|error| format!("{error:#}"));
    let ranges = granted.as_ref().map(|granted| granted.service_cidrs.clone()).unwrap_or_default();
    Ok(Outside { overlaps: overlaps(&ranges, links).await?, granted: Some(granted), names: names() })
}

/// Returns what of this machine lies in the ranges. kpx's own devices and routes do not count.
async fn overlaps(ranges: &[IpNet], links: &BTreeMap<u32, Link>) -> Result<Vec<(IpNet, String)>> {
    let mut found = Vec::new();
    for range in ranges {
        for link in links.values().filter(|link| ![anchor::NAME, anchor::PEER].contains(&link.name.as_str())) {
            let nets =
                link.addrs.iter().filter(|net| range.contains(&net.addr()) || net.trunc().contains(&range.addr()));
            found.extend(nets.map(|net| (*range, format!("{net} of device {}", link.name))));
        }
        if !found.iter().any(|(of, _)| of == range)
            && let Some(ip) = routed(range, links).await?
        {
            found.push((*range, format!("a route for {ip}, perhaps a VPN's or a container network's")));
        }
    }
    Ok(found)
}

/// Returns an address of the range that a route other than the default one leads to.
async fn routed(range: &IpNet, links: &BTreeMap<u32, Link>) -> Result<Option<IpAddr>> {
    let ours = links.values().find(|link| link.name == anchor::NAME).map_or(0, |link| link.index);
    let (driver, handle) = net::connect()?;
    let ask = async {
        let classes = fib::route_classes(&handle, &samples(range), ours).await?;
        let is_taken =
            |class: &RouteClass| matches!(class, RouteClass::Own | RouteClass::OnLink(_) | RouteClass::Routed);
        anyhow::Ok(classes.into_iter().find(|(_, class)| is_taken(class)).map(|(ip, _)| ip))
    };
    tokio::select! {
        found = ask => found,
        () = driver => bail!("the netlink socket has failed"),
    }
}

/// Returns addresses of a range, from its second on.
fn samples(range: &IpNet) -> BTreeSet<IpAddr> {
    let bits = range.max_prefix_len() - range.prefix_len();
    let size = if bits >= 127 { u128::MAX } else { 1 << bits };
    let step = (size / SAMPLES).max(1);
    let nth = |n: u128| match range.network() {
        IpAddr::V4(first) => IpAddr::from((u32::from(first) + n as u32).to_be_bytes()),
        IpAddr::V6(first) => IpAddr::from((u128::from(first) + n).to_be_bytes()),
    };
    (0..SAMPLES.min(size)).map(|n| nth((n * step + 1).min(size - 1))).collect()
}

fn names() -> Names {
    // A kpx that runs has it.
    if UdpSocket::bind(DNS_ADDRESS).is_err() && !holds_lock().unwrap_or(false) {
        return Names::Taken;
    }
    let status = Command::new("resolvectl").arg("dns").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if status.is_ok_and(|status| status.success()) { Names::Resolved } else { Names::NoResolved }
}

/// Returns the findings in the order in which they are shown.
pub(crate) fn judge(facts: &Outside) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &facts.granted {
        None => {}
        Some(Err(why)) => {
            let fix = "name a kubeconfig with an address of the control plane that this machine reaches: --kubeconfig";
            findings.push(fail("API server", why, fix));
        }
        Some(Ok(granted)) => {
            findings.push(ok("API server", format!("{} answers", granted.server)));
            findings.push(rights(granted));
            findings.push(service_networks(granted, &facts.overlaps));
        }
    }
    findings.push(match facts.names {
        Names::Resolved => ok("names", "systemd-resolved is there, and kpx has it ask for the cluster's"),
        Names::NoResolved => warn(
            "names",
            "no systemd-resolved answers",
            "have your resolver ask 127.0.0.153 for cluster.local: docs/host-mode.md#names",
        ),
        Names::Taken => {
            warn("names", format!("{DNS_ADDRESS} is taken by another program"), "give kpx another --dns-address")
        }
    });
    findings
}

/// Judges the rights. kpx does without some.
fn rights(granted: &Granted) -> Finding {
    const WHAT: &str = "rights";
    let Some((resource, why)) = granted.refused.first() else { return ok(WHAT, "to list all that kpx reads") };
    let (found, all) = (format!("{resource}: {why}"), granted.refused.iter().map(|(resource, _)| resource.as_str()));
    let fix = format!("grant get, list and watch of {}", all.collect::<Vec<_>>().join(", "));
    let is_needed =
        granted.refused.iter().any(|(resource, _)| matches!(resource.as_str(), "services" | "endpointslices"));
    let level = if is_needed { Level::Fail } else { Level::Warn };
    Finding { level, what: WHAT, found, fix: Some(fix) }
}

fn service_networks(granted: &Granted, overlaps: &[(IpNet, String)]) -> Finding {
    const WHAT: &str = "service networks";
    match (overlaps, granted.service_cidrs.as_slice()) {
        ([], []) => warn(WHAT, "not known: the cluster tells no ServiceCIDRs", "name them: --service-cidr"),
        ([], ranges) => ok(WHAT, format!("{} are free here", proxy_view::output::list(ranges))),
        ([(range, what), ..], _) => {
            let found = format!("{range} overlaps with {what}");
            warn(WHAT, found, "move that network: packets to one of the two go astray while kpx runs")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels(facts: &Outside) -> Vec<String> {
        let shown = judge(facts).into_iter().map(|finding| format!("{:?} {}", finding.level, finding.what));
        shown.collect()
    }

    #[test]
    fn findings_tell_what_keeps_a_laptop_from_services() {
        let granted = |refused: &[&str], cidrs: &[&str]| Granted {
            server: "https://192.0.2.1:6443/".to_owned(),
            refused: refused.iter().map(|resource| ((*resource).to_owned(), "403".to_owned())).collect(),
            service_cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
        };
        let cidr = "10.96.0.0/16";
        let facts = |granted| Outside { granted: Some(granted), ..Outside::default() };
        assert_eq!(levels(&facts(Err("refused".to_owned()))), ["Fail API server", "Ok names"]);
        let well = ["Ok API server", "Ok rights", "Ok service networks", "Ok names"];
        assert_eq!(levels(&facts(Ok(granted(&[], &[cidr])))), well);
        assert_eq!(levels(&facts(Ok(granted(&["nodes"], &[cidr]))))[1], "Warn rights");
        assert_eq!(levels(&facts(Ok(granted(&["services"], &[]))))[1..3], ["Fail rights", "Warn service networks"]);
        let overlaps = vec![(cidr.parse().unwrap(), "10.96.3.1/24 of device docker0".to_owned())];
        let taken = Outside { overlaps, names: Names::Taken, ..facts(Ok(granted(&[], &[cidr]))) };
        assert_eq!(levels(&taken)[2..], ["Warn service networks", "Warn names"]);
    }

    #[test]
    fn samples_are_in_their_range() {
        for range in ["10.96.0.0/12", "10.96.0.0/31", "10.96.0.1/32", "fd00:96::/112", "fd00::/8", "::/0"] {
            let range: IpNet = range.parse().unwrap();
            let samples = samples(&range);
            assert!(!samples.is_empty() && samples.iter().all(|ip| range.contains(ip)), "{range}: {samples:?}");
        }
    }
}
