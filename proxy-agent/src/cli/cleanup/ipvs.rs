//! Removes the state of kube-proxy's mode ipvs other than rules: virtual servers, the device,
//! ipsets, sysctls.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use ipnet::IpNet;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::SockaddrStorage;
use proxy_common::addr::Proto;
use proxy_net::ipvs::{self, VirtualServer};
use proxy_net::link::KUBE_IPVS0;
use proxy_net::{Handle, ipset, sysctl};

use super::Removed;

/// The names of kube-proxy's ipsets without the prefix `KUBE-`. IPv6 sets have `6-` after the
/// prefix, and their names are cut to the kernel's maximum length. kube-router and k3s use the
/// prefix for other sets.
const SETS: [&str; 17] = [
    "LOOP-BACK",
    "CLUSTER-IP",
    "EXTERNAL-IP",
    "EXTERNAL-IP-LOCAL",
    "LOAD-BALANCER",
    "LOAD-BALANCER-FW",
    "LOAD-BALANCER-LOCAL",
    "LOAD-BALANCER-SOURCE-IP",
    "LOAD-BALANCER-SOURCE-CIDR",
    NODE_PORT_TCP,
    "NODE-PORT-LOCAL-TCP",
    NODE_PORT_UDP,
    "NODE-PORT-LOCAL-UDP",
    NODE_PORT_SCTP,
    "NODE-PORT-LOCAL-SCTP-HASH",
    "HEALTH-CHECK-NODE-PORT",
    "IPVS-IPS",
];
const NODE_PORT_TCP: &str = "NODE-PORT-TCP";
const NODE_PORT_UDP: &str = "NODE-PORT-UDP";
const NODE_PORT_SCTP: &str = "NODE-PORT-SCTP-HASH";
/// The maximum length of an ipset's name in bytes.
const NAME_MAX: usize = 31;

/// The number of attempts to destroy an ipset, and the pause between them: the kernel releases an
/// ipset shortly after its last rule is removed.
const TRIES: u32 = 40;
const PAUSE: Duration = Duration::from_millis(50);

/// The maximum number of virtual servers in a note.
const NAMED: usize = 4;

/// The sysctls of `strictARP`: key, kube-proxy's value, the kernel's default.
const STRICT_ARP: [(&str, &str, &str); 2] = [
    ("ipv4/conf/all/arp_ignore", "1", "0"),
    ("ipv4/conf/all/arp_announce", "2", "0"),
];
/// The directories with sysctls that are set at boot.
const SYSCTL_FOLDERS: [&str; 4] = [
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
];

/// Removes kube-proxy's virtual servers outside the excluded networks, then the device. Without the
/// servers, kpx translates the host's own packets. The device is last, because its addresses
/// identify kube-proxy's servers.
pub(super) async fn remove_servers(
    handle: &Handle,
    excluded: &[IpNet],
    removed: &mut Removed,
) -> Result<()> {
    let device = if_nametoindex(KUBE_IPVS0).ok();
    let (own, others): (Vec<_>, Vec<_>) = {
        let is_proxys = proxys(device.is_some()).await?;
        let servers = ipvs::virtual_servers().await?.into_iter();
        servers.partition(|one| {
            is_proxys(one) && !excluded.iter().any(|net| net.contains(&one.at.ip()))
        })
    };
    if !own.is_empty() {
        let (deleted, result) = ipvs::delete(&own).await;
        removed.count(deleted, "virtual servers of IPVS");
        result?;
    }
    if !others.is_empty() {
        let why = match device {
            Some(_) => "not at addresses of kube-proxy, or excluded",
            None => "without kube-ipvs0 their owner is unknown",
        };
        removed.note(format!(
            "left as they are: virtual servers of IPVS at {}: {why}",
            places(others)
        ));
    }
    if let Some(ifindex) = device {
        let deleted = handle.link().del(ifindex).execute().await;
        deleted.with_context(|| format!("delete {KUBE_IPVS0}"))?;
        removed.add(format!("the device {KUBE_IPVS0}"));
        relax_arp(removed)?;
    }
    Ok(())
}

/// Lists at most [`NAMED`] virtual servers, and counts the rest.
fn places(mut servers: Vec<VirtualServer>) -> String {
    servers.sort();
    let mut places: Vec<_> = servers
        .iter()
        .take(NAMED)
        .map(ToString::to_string)
        .collect();
    if servers.len() > NAMED {
        places.push(format!("and {} more", servers.len() - NAMED));
    }
    places.join(", ")
}

/// Removes the ipsets. No rule may refer to them.
pub(super) async fn remove_sets(removed: &mut Removed) -> Result<()> {
    let ours: BTreeSet<_> = SETS
        .into_iter()
        .flat_map(|set| [name("", set), name("6-", set)])
        .collect();
    let mut destroyed = 0;
    let mut failure = None;
    for name in ipset::names()
        .await?
        .iter()
        .filter(|name| ours.contains(*name))
    {
        // After a failure, the kernel has had time to release the other ipsets.
        let result = if failure.is_none() {
            destroy(name).await
        } else {
            ipset::destroy(name).await
        };
        match result {
            Ok(is_destroyed) => destroyed += usize::from(is_destroyed),
            // A foreign rule may refer to this ipset. The others are still removed.
            Err(error) => {
                failure = failure.or(Some(
                    anyhow!(error).context(format!("destroy the ipset {name}")),
                ))
            }
        }
    }
    removed.count(destroyed, "ipsets");
    failure.map_or(Ok(()), Err)
}

async fn destroy(name: &str) -> std::io::Result<bool> {
    for _ in 1..TRIES {
        match ipset::destroy(name).await {
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                tokio::time::sleep(PAUSE).await
            }
            result => return result,
        }
    }
    ipset::destroy(name).await
}

fn name(infix: &str, set: &str) -> String {
    format!("KUBE-{infix}{set}")
        .chars()
        .take(NAME_MAX)
        .collect()
}

/// Returns a predicate for virtual servers that kube-proxy made: at an address of its device, or at
/// a node port of a host's address.
async fn proxys(has_device: bool) -> Result<impl Fn(&VirtualServer) -> bool> {
    let mut node_ports = BTreeSet::new();
    for (proto, set) in [
        (Proto::TCP, NODE_PORT_TCP),
        (Proto::UDP, NODE_PORT_UDP),
        (Proto::SCTP, NODE_PORT_SCTP),
    ] {
        for (is_ipv4, infix) in [(true, ""), (false, "6-")] {
            let name = name(infix, set);
            let there = ipset::names().await?;
            if has_device && there.contains(&name) {
                node_ports.extend(
                    ipset::ports(&name)
                        .await?
                        .into_iter()
                        .map(|port| (proto, is_ipv4, port)),
                );
            }
        }
    }
    let addresses: Vec<(String, IpAddr)> = getifaddrs()
        .context("list the addresses")?
        .filter_map(|one| Some((one.interface_name, ip(&one.address?)?)))
        .collect();
    Ok(move |server: &VirtualServer| {
        let ip = server.at.ip();
        let port = server.at.port();
        let mut devices = addresses
            .iter()
            .filter(|(_, address)| *address == ip)
            .map(|(device, _)| device);
        let is_node_port = node_ports.contains(&(server.proto, ip.is_ipv4(), port));
        devices.any(|device| device == KUBE_IPVS0 || is_node_port)
    })
}

fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

/// Restores the sysctls of `strictARP` to the kernel's defaults, if they have kube-proxy's values
/// and no file sets them at boot.
fn relax_arp(removed: &mut Removed) -> Result<()> {
    let has =
        |(key, strict, _): &(&str, &str, &str)| Ok(sysctl::read(key)?.as_deref() == Some(*strict));
    let are_set: Vec<bool> = STRICT_ARP.iter().map(has).collect::<Result<_>>()?;
    if !are_set.iter().all(|is_set| *is_set) {
        return Ok(());
    }
    if are_wanted() {
        removed.note(
            "left as they are: arp_ignore and arp_announce, which a file of this host sets"
                .to_owned(),
        );
        return Ok(());
    }
    for (key, strict, relaxed) in STRICT_ARP {
        sysctl::set(key, relaxed)?;
        removed.add(format!(
            "the setting {} = {strict} of strictARP",
            key.replace('/', ".")
        ));
    }
    Ok(())
}

/// Returns true if a boot file of the host sets one of the sysctls. In a container, the host's
/// files are below the root of process 1.
fn are_wanted() -> bool {
    let roots = ["", "/proc/1/root"];
    let folders = roots
        .iter()
        .flat_map(|root| SYSCTL_FOLDERS.map(|folder| format!("{root}{folder}")));
    let files = folders
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flatten();
    let files = files.filter_map(|file| fs::read_to_string(file.ok()?.path()).ok());
    let files = files.chain(
        roots
            .iter()
            .filter_map(|root| fs::read_to_string(format!("{root}/etc/sysctl.conf")).ok()),
    );
    files
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .any(|line| {
            let line = line.trim_start();
            !line.starts_with(['#', ';'])
                && (line.contains("arp_ignore") || line.contains("arp_announce"))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_names_some_servers_and_counts_the_others() {
        let server = |port| VirtualServer {
            proto: Proto::TCP,
            at: ([192, 0, 2, 1], port).into(),
        };
        assert_eq!(
            places(vec![server(2), server(1)]),
            "192.0.2.1:1/tcp, 192.0.2.1:2/tcp"
        );
        let many = (1..=6).map(server).collect();
        assert!(places(many).ends_with("192.0.2.1:4/tcp, and 2 more"));
    }

    #[test]
    fn names_of_sets_are_those_of_kube_proxy() {
        assert_eq!(name("", NODE_PORT_TCP), "KUBE-NODE-PORT-TCP");
        assert_eq!(
            name("6-", "LOAD-BALANCER-SOURCE-CIDR"),
            "KUBE-6-LOAD-BALANCER-SOURCE-CID"
        );
        assert_eq!(
            name("6-", "NODE-PORT-LOCAL-SCTP-HASH"),
            "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS"
        );
    }
}
