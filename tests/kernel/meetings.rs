//! Flows that meet in one tuple, or outlive the backend that they were opened for.

use anyhow::{Context, Result, ensure};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey,
};
use proxy_common::names::INGRESS;
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::Maps;
use testbed::test_run::Verdict::Pass;

use crate::fixture::Fixture;
use crate::packets::packet_tests;
use crate::policy::{external, services};

packet_tests! {
    meetings:
    connection_keeps_its_packets_from_another_one_with_its_port,
    direct_connection_of_host_to_itself_stays_apart_from_its_flows,
    ended_flow_leaves_its_packets_to_the_next_connection,
    pod_of_another_node_hears_back_from_third_node,
    received_packet_in_pods_name_opens_nothing,
    silent_flow_leaves_its_packets_to_the_next_exchange,
}

fn apply4or6(
    fixture: &mut Fixture,
    v4: impl Fn(&Fixture) -> Result<Vec<FamilyChange<Addr4>>>,
    v6: impl Fn(&Fixture) -> Result<Vec<FamilyChange<Addr6>>>,
) -> Result<()> {
    let changes: Vec<Change> = if fixture.names.addr("web")?.is_ipv4() {
        v4(fixture)?.into_iter().map(Change::V4).collect()
    } else {
        v6(fixture)?.into_iter().map(Change::V6).collect()
    };
    changes
        .iter()
        .try_for_each(|change| fixture.bench.datapath.tables.apply(change))
}

fn pair<A: Addr>(fixture: &Fixture) -> Result<FrontendKey<A>> {
    Ok(FrontendKey::new(
        A::from_ip(fixture.names.addr("pair")?).context("family")?,
        Port::new(53),
        Proto::UDP,
    ))
}

fn at<A: Addr>(fixture: &Fixture, name: &str) -> Result<SockAddr<A>> {
    Ok(SockAddr::new(
        A::from_ip(fixture.names.addr(name)?).context("family")?,
        Port::new(5353),
    ))
}

/// Returns the changes that remove the only endpoint.
fn emptied<A: Addr>(fixture: &Fixture) -> Result<Vec<FamilyChange<A>>> {
    let key = pair(fixture)?;
    Ok(vec![
        FamilyChange::PutService(key, Service::new(0, 0, 0)),
        FamilyChange::DelSlot(SlotKey::new(key, Set::CLUSTER, 0)),
        FamilyChange::DelEndpoint(EndpointKey::new(key, at(fixture, "pod")?)),
    ])
}

/// Returns the changes that add another endpoint.
fn refilled<A: Addr>(fixture: &Fixture) -> Result<Vec<FamilyChange<A>>> {
    let key = pair(fixture)?;
    let far = at::<A>(fixture, "far")?;
    Ok(vec![
        FamilyChange::PutEndpoint(
            EndpointKey::new(key, far),
            Endpoint::new(Endpoint::IN_CLUSTER_SET),
        ),
        FamilyChange::PutSlot(
            SlotKey::new(key, Set::CLUSTER, 0),
            Backend::new(far.addr, far.port, 0),
        ),
        FamilyChange::PutService(key, Service::new(1, 0, Service::HAS_ENDPOINTS)),
    ])
}

/// Returns the changes that remove the frontend alone, as when a Service changes its node port.
fn undone<A: Addr>(fixture: &Fixture) -> Result<Vec<FamilyChange<A>>> {
    let service = pair(fixture)?;
    Ok(vec![FamilyChange::DelFrontend(service, service)])
}

#[test]
fn udp_flow_leaves_backend_that_its_frontend_has_no_more() -> Result<()> {
    for mut fixture in services()? {
        fixture.rows("meetings::udp_flow_leaves_backend_that_its_frontend_has_no_more/open")?;
        apply4or6(&mut fixture, emptied, emptied)?;
        fixture.rows("meetings::udp_flow_leaves_backend_that_its_frontend_has_no_more/unserved")?;
        apply4or6(&mut fixture, refilled, refilled)?;
        fixture.rows("meetings::udp_flow_leaves_backend_that_its_frontend_has_no_more/served")?;
        apply4or6(&mut fixture, undone, undone)?;
        fixture.rows("meetings::udp_flow_leaves_backend_that_its_frontend_has_no_more/gone")?;
    }
    Ok(())
}

fn node_port_to_lost<A: Addr>(fixture: &Fixture) -> Result<Vec<FamilyChange<A>>> {
    let service = FrontendKey::new(
        A::from_ip(fixture.names.addr("nowhere")?).context("family")?,
        Port::new(80),
        Proto::TCP,
    );
    let key = FrontendKey::node_port(Port::new(30099), Proto::TCP);
    Ok(vec![FamilyChange::PutFrontend(
        key,
        Frontend::new(service, FrontendKind::NODE_PORT),
    )])
}

#[test]
fn ended_masqueraded_flow_makes_room_for_another_client() -> Result<()> {
    for mut fixture in external()? {
        apply4or6(&mut fixture, node_port_to_lost, node_port_to_lost)?;
        let dial = |fixture: &Fixture, client: &str, port: u16| -> Result<()> {
            for flags in ["S", "R"] {
                let frame = fixture
                    .names
                    .frame(&format!("tcp {flags} {client}:{port} > node:30099"))?;
                let verdict = fixture.run(INGRESS, &frame)?.verdict;
                ensure!(
                    verdict == Pass,
                    "{flags} {client}:{port}: {verdict:?} {:?}",
                    fixture.counts()?
                );
            }
            Ok(())
        };
        // One client opens twice as many connections as there are ports, one after the other; then
        // another client comes.
        fixture
            .netns
            .run(|| (1_000..10_000).try_for_each(|port| dial(&fixture, "stranger", port)))?;
        fixture
            .netns
            .run(|| (1_000..1_200).try_for_each(|port| dial(&fixture, "burglar", port)))?;
    }
    Ok(())
}
