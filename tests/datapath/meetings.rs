//! Flows that meet in one tuple, or outlive what they were opened for.

use anyhow::{Context, Result, ensure};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::device::Node;
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey,
};
use proxy_common::names::{EGRESS, INGRESS, LO};
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::Maps;
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::Lab;
use crate::policy::{outside, pods};

fn apply4or6(
    lab: &mut Lab,
    v4: impl Fn(&Lab) -> Result<Vec<FamilyChange<Addr4>>>,
    v6: impl Fn(&Lab) -> Result<Vec<FamilyChange<Addr6>>>,
) -> Result<()> {
    let changes: Vec<Change> = if lab.names.addr("web")?.is_ipv4() {
        v4(lab)?.into_iter().map(Change::V4).collect()
    } else {
        v6(lab)?.into_iter().map(Change::V6).collect()
    };
    changes.iter().try_for_each(|change| lab.bench.datapath.tables.apply(change))
}

fn pair<A: Addr>(lab: &Lab) -> Result<FrontendKey<A>> {
    Ok(FrontendKey::new(A::from_ip(lab.names.addr("pair")?).context("family")?, Port::new(53), Proto::UDP))
}

fn at<A: Addr>(lab: &Lab, name: &str) -> Result<SockAddr<A>> {
    Ok(SockAddr::new(A::from_ip(lab.names.addr(name)?).context("family")?, Port::new(5353)))
}

/// The only endpoint leaves.
fn emptied<A: Addr>(lab: &Lab) -> Result<Vec<FamilyChange<A>>> {
    let key = pair(lab)?;
    Ok(vec![
        FamilyChange::PutService(key, Service::new(0, 0, 0)),
        FamilyChange::DelSlot(SlotKey::new(key, Set::CLUSTER, 0)),
        FamilyChange::DelEndpoint(EndpointKey::new(key, at(lab, "pod")?)),
    ])
}

/// Another one comes.
fn refilled<A: Addr>(lab: &Lab) -> Result<Vec<FamilyChange<A>>> {
    let (key, far) = (pair(lab)?, at::<A>(lab, "far")?);
    Ok(vec![
        FamilyChange::PutEndpoint(EndpointKey::new(key, far), Endpoint::new(Endpoint::IN_CLUSTER_SET)),
        FamilyChange::PutSlot(SlotKey::new(key, Set::CLUSTER, 0), Backend::new(far.addr, far.port, 0)),
        FamilyChange::PutService(key, Service::new(1, 0, Service::HAS_ENDPOINTS)),
    ])
}

#[test]
fn a_udp_flow_leaves_a_dead_backend_when_the_next_endpoint_comes() -> Result<()> {
    for mut lab in pods()? {
        lab.check(&[(
            INGRESS,
            "udp client:1000 > pair:53",
            Pass,
            "udp client:1000 > pod:5353",
            "flow_opened forwarded",
        )])?;
        apply4or6(&mut lab, emptied, emptied)?;
        lab.check(&[(INGRESS, "udp client:1000 > pair:53", Pass, "udp client:1000 > pod:5353", "forwarded")])
            .context("nobody serves: it stays")?;
        apply4or6(&mut lab, refilled, refilled)?;
        lab.check(&[(
            INGRESS,
            "udp client:1000 > pair:53",
            Pass,
            "udp client:1000 > far:5353",
            "flow_moved flow_opened forwarded",
        )])
        .context("somebody serves again")?;
    }
    Ok(())
}

fn node_port_to_lost<A: Addr>(lab: &Lab) -> Result<Vec<FamilyChange<A>>> {
    let service =
        FrontendKey::new(A::from_ip(lab.names.addr("nowhere")?).context("family")?, Port::new(80), Proto::TCP);
    let key = FrontendKey::node_port(Port::new(30099), Proto::TCP);
    Ok(vec![FamilyChange::PutFrontend(key, Frontend::new(service, FrontendKind::NODE_PORT))])
}

#[test]
fn a_masqueraded_flow_that_is_over_makes_room_for_another_client() -> Result<()> {
    for mut lab in outside()? {
        apply4or6(&mut lab, node_port_to_lost, node_port_to_lost)?;
        let dial = |lab: &Lab, client: &str, port: u16| -> Result<()> {
            for flags in ["S", "R"] {
                let frame = lab.names.frame(&format!("tcp {flags} {client}:{port} > node:30099"))?;
                let verdict = lab.run(INGRESS, &frame)?.verdict;
                ensure!(verdict == Pass, "{flags} {client}:{port}: {verdict:?} {:?}", lab.counts()?);
            }
            Ok(())
        };
        // One has twice as many connections as there are ports for them, one after the other; then another comes.
        lab.netns.run(|| (1_000..10_000).try_for_each(|port| dial(&lab, "stranger", port)))?;
        lab.netns.run(|| (1_000..1_200).try_for_each(|port| dial(&lab, "burglar", port)))?;
    }
    Ok(())
}

#[test]
fn a_direct_connection_of_the_host_to_itself_stays_apart_from_its_flows() -> Result<()> {
    for mut lab in pods()? {
        lab.check(&[
            (LO, "tcp S node:1001 > node:6443", Pass, "same", "not_ours"),
            (LO, "tcp SA node:6443 > node:1001", Pass, "same", "no_flow"),
            (LO, "tcp S node:1001 > node:30443", Redirect, "tcp S node:$p > node:6443", "flow_opened forwarded"),
            // Of the direct one.
            (LO, "tcp A node:6443 > node:1001 +9", Pass, "same", "no_flow"),
        ])?;
    }
    Ok(())
}

#[test]
fn a_pod_of_another_node_hears_back_from_a_third_one() -> Result<()> {
    for mut lab in outside()? {
        lab.set_flags(Node::DETECTS4 | Node::DETECTS6)?;
        let pods = if lab.names.addr("web")?.is_ipv4() { "192.0.2.0/24" } else { "2001:db8::/64" };
        lab.bench.datapath.node.set_pods(&[pods.parse()?], &[])?;
        lab.check(&[
            (INGRESS, "udp stranger:1000 > node:30053", Pass, "udp stranger:$p > far:5353", "flow_opened forwarded"),
            (EGRESS, "udp stranger:$p > far:5353", Pass, "udp uplink:$p > far:5353", ""),
        ])?;
    }
    Ok(())
}

#[test]
fn a_packet_from_outside_in_a_pods_name_opens_nothing() -> Result<()> {
    for mut lab in outside()? {
        lab.check(&[
            // The way back to this client leads to a pod's device, or to the node itself.
            (INGRESS, "tcp S pod:1000 > node:30099", Pass, "same", "not_ours"),
            (INGRESS, "tcp S pod:1000 > vip:80", Drop, "-", "forged"),
            (INGRESS, "tcp S uplink:1000 > vip:80", Drop, "-", "forged"),
            // Nor is it answered.
            (INGRESS, "tcp S pod:1000 > empty:80", Drop, "-", "forged"),
            (EGRESS, "tcp A pod:8080 > pod:1000", Pass, "same", "not_ours"),
        ])?;
    }
    Ok(())
}
