//! A kubeconfig that changes to another cluster under a running kpx. kube-proxy reads it only at
//! its start.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{Agent, DEADLINE, Service, api_server_at, wait_until};
use testbed::apiserver::ApiServer;
use testbed::echo::{Connection, Dial, Protocol};
use testbed::kernel_tables;
use testbed::lab::{Family, Lab};
use testbed::watched_lab::WatchedLab;

use crate::faults::fixture::PORT;

/// The port of the other clusters' API servers.
const OTHER: u16 = 6444;
/// The timeout of an answer that should not come.
const SOON: Duration = Duration::from_millis(300);

/// The second cluster has another URL, the third the same URL with another CA. Both have a Service
/// of the same name with other backends, and one of their own. Their versions are higher, so that
/// they would accept a watch from an old version.
#[test]
fn agent_ends_where_its_credentials_lead_to_another_cluster() -> Result<()> {
    let fixture = WatchedLab::start(PORT)?;
    let clusters = [
        (Service::new("one", 21, &["p1b"], PORT), "p1b"),
        (Service::new("two", 22, &["p2a"], PORT), "p2a"),
    ];
    let clusters = clusters
        .into_iter()
        .chain([(Service::new("three", 23, &["p2b"], PORT), "p2b")]);
    let mut clusters =
        clusters.map(|(own, backend)| [own, Service::new("web", 10, &[backend], PORT)]);
    let mut now = clusters.next().context("a cluster")?;
    now.iter()
        .try_for_each(|service| fixture.put_service(service))?;
    let mut agent = Agent::start(&fixture.lab, &fixture.lab.n1, fixture.source())?;
    let mut kept = Family::ALL
        .into_iter()
        .map(|family| open(&fixture.lab, &now[1], family))
        .collect::<Result<Vec<_>>>()?;
    for next in clusters {
        let before = kernel_tables::of(agent.pid())?;
        let version = fixture.api().version();
        fixture.api_mut().stop()?;
        let other = cluster(&fixture, version, &next)?;
        *fixture.api_mut() = other;
        fixture.api().kubeconfig(&fixture.kubeconfig)?;
        let mut changed = false;
        wait_until(DEADLINE, "kpx ends", || {
            changed |= kernel_tables::of(agent.pid())
                .is_ok_and(|tables| !tables.v4.services.is_empty() && tables != before);
            Ok(agent.exited()?.is_some())
        })
        .with_context(|| agent.log())?;
        ensure!(!changed, "the agent mixed two clusters");
        ensure!(
            agent.exited()?.and_then(|status| status.code()) == Some(1),
            "{}",
            agent.log()
        );
        ensure!(
            agent
                .log()
                .contains("kpx exits and must be restarted there"),
            "{}",
            agent.log()
        );
        are_served(&fixture.lab, &now).context("without an agent")?;

        agent = Agent::start(&fixture.lab, &fixture.lab.n1, fixture.source())?;
        let tables = kernel_tables::of(agent.pid())?;
        let wanted = fixture.wanted("n1")?;
        ensure!(tables == wanted, "wants\n{wanted}\nand has\n{tables}");
        are_served(&fixture.lab, &next).context("the other cluster")?;
        let gone = Dial::new(Protocol::Tcp, now[0].frontend(Family::V4)).deadline(SOON);
        ensure!(
            gone.exchange(&fixture.lab.host("p1a").ns, b"hello")
                .is_err(),
            "the old cluster's Service is still served"
        );
        for connection in &mut kept {
            connection
                .exchange(b"still there")
                .context("a connection of the first cluster")?;
        }
        now = next;
    }
    agent.stop()
}

/// Returns the API server of another cluster with these Services, whose versions are beyond
/// `version`.
fn cluster(fixture: &WatchedLab, version: u64, services: &[Service]) -> Result<ApiServer> {
    let api = api_server_at(&fixture.lab, OTHER, Vec::new())?;
    while api.version() <= version {
        api.apply(
            &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "counted" } }),
        )?;
        api.delete("Namespace", "", "counted")?;
    }
    for object in services
        .iter()
        .flat_map(|service| service.objects(&fixture.lab))
    {
        api.apply(&object.0)?;
    }
    Ok(api)
}

fn open(lab: &Lab, service: &Service, family: Family) -> Result<Connection> {
    let connection =
        Dial::new(Protocol::Tcp, service.frontend(family)).connect(&lab.host("p1a").ns);
    connection.with_context(|| format!("a connection by {family}"))
}

/// Checks that each Service reaches its one backend.
fn are_served(lab: &Lab, services: &[Service]) -> Result<()> {
    for (service, family) in services
        .iter()
        .flat_map(|service| Family::ALL.map(|family| (service, family)))
    {
        let to: SocketAddr = service.frontend(family);
        let answer = Dial::new(Protocol::Tcp, to).exchange(&lab.host("p1a").ns, b"hello");
        let backend = answer.with_context(|| format!("{to}"))?.backend;
        ensure!(
            service.backends == [backend.as_str()],
            "{to} leads to {backend}"
        );
    }
    Ok(())
}
