//! The web page in a browser, served by kpx on a node of the lab.

mod hostile;
mod page;
mod views;

use anyhow::Result;
use testbed::agent::{Agent, Service};
use testbed::lab::{Family, Layout};
use testbed::netns::NetNs;
use testbed::served_lab::ServedLab;

/// The default origin of the page.
const ORIGIN: &str = "http://127.0.0.1:10249";
/// The port of the lab's servers.
const TARGET: u16 = 8080;

/// A lab with Services that n1's kpx serves and shows: `web` in both zones, `local` on n1 alone,
/// `empty` without endpoints.
struct Fixture {
    base: ServedLab,
}

impl Fixture {
    fn build() -> Result<Self> {
        let base = ServedLab::with_manifests(Layout::Routed)?.serve_all(TARGET)?;
        for service in [
            web(),
            Service::new("local", 12, &["p1a"], TARGET),
            Service::new("empty", 13, &[], TARGET),
        ] {
            base.put(&service)?;
        }
        Ok(Self { base })
    }

    fn put(&self, service: &Service) -> Result<()> {
        self.base.put(service)
    }

    fn serve(&self) -> Result<Agent<'_>> {
        self.base.kpx(&["--ui"])
    }

    /// Returns the browsers' namespace.
    fn ns(&self) -> &NetNs {
        &self.base.lab.n1.host.ns
    }
}

#[test]
fn kpx_serves_its_page() -> Result<()> {
    let fixture = Fixture::build()?;
    let agent = fixture.serve()?;
    testbed::cases!(
        &fixture;
        hostile::page_sends_nothing_and_admits_no_other_origin,
        hostile::page_without_javascript_names_alternatives,
        hostile::text_of_objects_stays_text,
        page::phone_has_services_in_upper_half,
        page::a_service_opens_with_its_backends_by_zone_and_node,
        page::rates_move_when_packets_flow,
        page::services_are_listed_filtered_and_sorted,
        views::choices_survive_reload_and_back,
        views::page_leads_from_problem_to_reason,
    )?;
    agent.stop()
}

/// The Service that the page shows as `default/web`.
fn web() -> Service {
    Service::new("web", 11, &["p1a", "p1b", "p2a"], TARGET).node_port(30_080)
}

fn url(place: &str) -> String {
    format!("{ORIGIN}/ui/?every=0.2{place}")
}

fn address(service: &Service) -> String {
    service.cluster_ip().ip(Family::V4).to_string()
}
