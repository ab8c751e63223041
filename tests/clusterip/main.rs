//! Who reaches what by a ClusterIP, who answers, and whom the backend sees: with real sockets, in every setting.
//!
//! Both nodes run kpx. The cells' names are those of the reachability matrix of kpx's design: client and backend on one
//! node, on two, outside, and the same host; nothing to reach; two flows that meet in one tuple.

mod cells;
mod special;
mod tally;

use std::fmt;

use anyhow::{Context, Result, anyhow, bail};
use kpx_tests::agent::{Agent, Cluster, Service};
use kpx_tests::capture::{Capture, Checksums, Packet};
use kpx_tests::echo::Servers;
use kpx_tests::lab::{Family, Lab, Layout, PodRoute};

use crate::tally::Tally;

/// Of every server of the lab.
const PORT: u16 = 8080;

#[test]
fn clusterips_with_routed_pods() {
    check(Layout::Routed, Cluster::with_api_server).unwrap();
}

#[test]
fn clusterips_with_bridged_pods() {
    check(Layout::Bridge, Cluster::with_manifests).unwrap();
}

/// How nodes and network are set up while the table runs.
#[derive(Clone, Copy)]
struct Setting {
    layout: Layout,
    rp_filter: u8,
    default_route: bool,
    pod_route: PodRoute,
    firewall: bool,
    offload: bool,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layout, rp_filter, default_route, pod_route, firewall, offload } = self;
        write!(f, "{layout:?} rp_filter={rp_filter} default_route={default_route} pods by {pod_route:?} ")?;
        write!(f, "firewall={firewall} offload={offload}")
    }
}

/// Runs everything in one lab, and only then fails, with all that went wrong.
fn check(layout: Layout, cluster: fn(&Lab) -> Result<Cluster>) -> Result<()> {
    let lab = Lab::start(layout)?;
    let servers = Servers::start()?;
    for host in lab.backends() {
        servers.serve(host, PORT)?;
    }
    let cluster = cluster(&lab)?;
    for object in services().iter().flat_map(|service| service.objects(&lab)) {
        cluster.put(&object)?;
    }
    let agents = [Agent::start(&lab, &lab.n1, cluster.source())?, Agent::start(&lab, &lab.n2, cluster.source())?];

    let mut tally = Tally::default();
    let plain = Setting {
        layout,
        rp_filter: 1,
        default_route: true,
        pod_route: PodRoute::Eth0,
        firewall: false,
        offload: true,
    };
    for rp_filter in [0, 1, 2] {
        for default_route in [true, false] {
            let setting = Setting { rp_filter, default_route, ..plain };
            setting.apply(&lab)?;
            cells::run(&lab, &setting, &mut tally);
        }
    }
    let overlay = Setting { pod_route: PodRoute::Eth1, ..plain };
    overlay.apply(&lab)?;
    cells::run(&lab, &overlay, &mut tally);
    plain.apply(&lab)?;
    special::run(&lab, &mut tally);
    run_watched(&lab, Setting { firewall: true, ..plain }, Checksums::MayBePending, &mut tally)?;
    run_watched(&lab, Setting { firewall: true, offload: false, ..plain }, Checksums::Complete, &mut tally)?;

    println!("{layout:?}\n{tally}");
    let logs = agents.each_ref().map(Agent::log).join("\n");
    for agent in agents {
        agent.stop()?;
    }
    tally.into_result().with_context(|| format!("{layout:?}; logs of kpx:\n{logs}"))
}

impl Setting {
    fn apply(&self, lab: &Lab) -> Result<()> {
        lab.set_rp_filter(self.rp_filter)?;
        lab.set_default_route(self.default_route)?;
        lab.set_pod_route(self.pod_route)?;
        lab.set_firewall(self.firewall)?;
        lab.set_offload(self.offload)
    }
}

/// Runs the table while every host's packets are captured and connection tracking is watched.
fn run_watched(lab: &Lab, setting: Setting, checksums: Checksums, tally: &mut Tally) -> Result<()> {
    setting.apply(lab)?;
    let hosts = ["p1a", "p1b", "p2a", "p2b", "n1", "n2", "ext"].map(|name| lab.host(name));
    let captures: Vec<_> = hosts.into_iter().map(|host| Ok((host, Capture::start(host)?))).collect::<Result<_>>()?;
    cells::run(lab, &setting, tally);
    for (host, capture) in captures {
        let captured = capture.stop(checksums);
        let result =
            captured.and_then(|packets| if host.name == "p1a" { only_frontends(lab, &packets) } else { Ok(()) });
        tally.add("packets", &format!("packets at {}, {setting}", host.name), result);
    }
    let invalid = lab.invalid_packets()?;
    let result = if invalid.is_empty() { Ok(()) } else { Err(anyhow!("{}", invalid.join(", "))) };
    tally.add("invalid", &format!("connection tracking finds no packet invalid, {setting}"), result);
    Ok(())
}

/// A client that dials only ClusterIPs must never see a packet from a backend's own address.
fn only_frontends(lab: &Lab, packets: &[Packet]) -> Result<()> {
    for name in ["p1b", "p2a", "n2", "ext"] {
        for family in Family::ALL {
            let backend = lab.host(name).addrs.ip(family);
            if let Some(packet) = packets.iter().find(|packet| packet.src.ip() == backend) {
                bail!("a client sees its backend's own address: {packet}");
            }
        }
    }
    Ok(())
}

/// The cluster's services. Those with one backend are called after it.
fn services() -> Vec<Service> {
    vec![
        Service::new("p1a", 11, &["p1a"], PORT),
        Service::new("p1b", 12, &["p1b"], PORT),
        Service::new("p2a", 13, &["p2a"], PORT),
        Service::new("n1", 14, &["n1"], PORT),
        Service::new("n2", 15, &["n2"], PORT),
        Service::new("ext", 16, &["ext"], PORT),
        Service::new("p1b-too", 17, &["p1b"], PORT),
        Service::new("everywhere", 18, &["p1b", "p2a"], PORT),
        Service::new("local", 19, &["p1b", "p2a"], PORT).local(),
        Service::new("elsewhere", 20, &["p2a"], PORT).local(),
        Service::new("nowhere", 21, &[], PORT),
    ]
}

/// The address at which a service of that name is dialled.
fn frontend(name: &str, family: Family) -> std::net::SocketAddr {
    let services = services();
    let service = services.iter().find(|service| service.name == name);
    service.unwrap_or_else(|| panic!("the cluster has no service {name}")).frontend(family)
}
