//! The web page in a browser, served by a kpx on a node of the lab.

mod browser;
mod hostile;
mod page;
mod webdriver;

use anyhow::Result;
use testbed::agent::{Agent, Cluster, Service};
use testbed::lab::{Family, Lab, Layout};
use testbed::netns::NetNs;

/// Where a kpx serves it if the operator names no other address.
const ORIGIN: &str = "http://127.0.0.1:10249";
/// Where the lab's servers listen.
const TARGET: u16 = 8080;

/// A lab with services that n1's kpx serves and shows: `web` in both zones, `local` on n1 alone, `empty` nowhere.
struct Site {
    lab: Lab,
    cluster: Cluster,
}

impl Site {
    fn build() -> Result<Self> {
        let lab = Lab::start(Layout::Routed)?;
        let cluster = Cluster::with_manifests(&lab)?;
        let site = Self { lab, cluster };
        for service in [web(), Service::new("local", 12, &["p1a"], TARGET), Service::new("empty", 13, &[], TARGET)] {
            site.put(&service)?;
        }
        Ok(site)
    }

    fn put(&self, service: &Service) -> Result<()> {
        service.objects(&self.lab).iter().try_for_each(|object| self.cluster.put(object))
    }

    fn serve(&self) -> Result<Agent<'_>> {
        Agent::start_with(&self.lab, &self.lab.n1, self.cluster.source(), &["--ui".to_owned()])
    }

    /// Where the browsers are.
    fn ns(&self) -> &NetNs {
        &self.lab.n1.host.ns
    }
}

/// As the page names it: `default/web`.
fn web() -> Service {
    Service::new("web", 11, &["p1a", "p1b", "p2a"], TARGET).node_port(30_080)
}

fn url(place: &str) -> String {
    format!("{ORIGIN}/ui/?every=0.2{place}")
}

fn address(service: &Service) -> String {
    service.cluster_ip().ip(Family::V4).to_string()
}
