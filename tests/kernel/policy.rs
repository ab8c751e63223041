//! Frontends of every kind: the clients that they serve, the set of backends, the source that a
//! backend sees.

use anyhow::{Context, Result};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::Device;
use proxy_common::names::INGRESS;
use proxy_core::diff::Change;
use proxy_datapath::Maps;

use crate::fixture::{Fixture, fixtures_with_room};
use crate::frontends::frontends;
use crate::packets::packet_tests;

packet_tests! {
    policy:
    external_client_keeps_its_address_where_backend_is_local,
    external_client_is_masqueraded_where_backend_is_remote,
    pod_is_masqueraded_only_by_its_own_service,
    node_ports_are_served_at_accepted_addresses_only,
    external_address_serves_offered_ports_only,
    restricted_cluster_ip_answers_no_external_client,
    cluster_ips_serve_the_cluster,
    local_policy_serves_external_clients_locally_and_others_everywhere,
    redirect_answers_clients_of_the_node_but_its_own_pods,
    redirected_address_serves_pods_of_the_node_and_all_others_pass,
    source_ranges_come_before_everything_else,
    every_unicast_address_is_served,
    host_reaches_its_own_node_ports_through_lo,
    host_reaches_node_ports_at_loopback_addresses_through_lo,
    compat_masquerades_where_kube_proxy_does,
    masquerade_all_masquerades_cluster_ips_only,
    udp_flow_leaves_removed_backend,
}

#[test]
fn client_with_affinity_keeps_its_backend() -> Result<()> {
    for fixture in services()? {
        let dial = |client: &str, port: u16| -> Result<String> {
            let frame = fixture
                .names
                .frame(&format!("tcp S {client}:{port} > sticky:80"))?;
            let text = fixture.names.text(
                &fixture
                    .netns
                    .run(|| fixture.bench.run(INGRESS, &frame))?
                    .packet,
            )?;
            Ok(text.split_once("> ").context("a destination")?.1.to_owned())
        };
        for client in ["client", "stranger", "burglar"] {
            let first = dial(client, 1)?;
            for port in 2..60 {
                assert_eq!(dial(client, port)?, first, "{client}");
            }
        }
    }
    Ok(())
}

#[test]
fn round_robin_takes_turns_and_least_connections_idle_backend() -> Result<()> {
    for mut fixture in services()? {
        fixture.rows("policy::round_robin_takes_turns_and_least_connections_idle_backend")?;
        // The backend with fewer flows gets the next flow.
        let mut served = Vec::new();
        for port in 1..9 {
            let frame = fixture
                .names
                .frame(&format!("tcp S client:{port} > least:80"))?;
            served.push(
                fixture
                    .names
                    .text(&fixture.run(INGRESS, &frame)?.packet)?
                    .contains("> pod:"),
            );
        }
        assert_eq!(served.iter().filter(|pod| **pod).count(), 4, "{served:?}");
        // All flows to one backend end; the next flows go there.
        for (nth, _) in served.iter().enumerate().filter(|(_, pod)| **pod) {
            let frame = fixture
                .names
                .frame(&format!("tcp R client:{} > least:80", nth + 1))?;
            fixture.run(INGRESS, &frame)?;
        }
        for port in 20..24 {
            let packet = format!("tcp S client:{port} > least:80");
            let out = format!("tcp S client:{port} > pod:8080");
            let frame = fixture.names.frame(&packet)?;
            assert_eq!(
                fixture.names.text(&fixture.run(INGRESS, &frame)?.packet)?,
                out
            );
        }
    }
    Ok(())
}

/// Makes fixtures with Services of every kind, whose packets come in by a device that belongs to no
/// pod.
pub(crate) fn external() -> Result<Vec<Fixture>> {
    external_with_room(None)
}

pub(crate) fn external_with_room(flow_entries: Option<u32>) -> Result<Vec<Fixture>> {
    let mut fixtures = services_with_room(flow_entries)?;
    for fixture in &mut fixtures {
        fixture.set_device(Device::new(0, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED))?;
    }
    Ok(fixtures)
}

/// Makes fixtures with Services of every kind, whose packets come in by a pod's device.
pub(crate) fn services() -> Result<Vec<Fixture>> {
    services_with_room(None)
}

pub(crate) fn services_with_room(flow_entries: Option<u32>) -> Result<Vec<Fixture>> {
    let mut fixtures = fixtures_with_room("policy", flow_entries)?;
    fixtures.iter_mut().try_for_each(Fixture::add_frontends)?;
    Ok(fixtures)
}

impl Fixture {
    /// Adds Services of every kind.
    pub(crate) fn add_frontends(&mut self) -> Result<()> {
        self.bench
            .datapath
            .node
            .set_service_cidrs(&["10.96.0.0/16".parse()?, "fd00:10:96::/112".parse()?])?;
        let changes = if self.names.addr("web")?.is_ipv4() {
            frontends::<Addr4>(self)?
                .into_iter()
                .map(Change::V4)
                .collect::<Vec<_>>()
        } else {
            frontends::<Addr6>(self)?
                .into_iter()
                .map(Change::V6)
                .collect()
        };
        changes
            .iter()
            .try_for_each(|change| self.bench.datapath.tables.apply(change))
    }
}
