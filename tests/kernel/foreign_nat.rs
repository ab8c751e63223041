//! Foreign NAT ports: connections of other programs, above all netfilter's masquerading, from ports
//! of the node's own addresses.

use anyhow::{Result, ensure};
use proxy_common::device::Node;
use proxy_common::flow::{CLIENT_PORT_FIRST, CLIENT_PORT_LAST};
use proxy_common::names::{EGRESS, INGRESS};
use testbed::test_run::Verdict::Pass;

use crate::fixture::Fixture;
use crate::packets::packet_tests;
use crate::policy::external;

packet_tests! {
    foreign_nat:
    connection_beside_flow_with_its_tuple_gets_another_port,
    packet_of_moved_connection_stays_as_it_is_on_lo,
    datagram_beside_flow_with_its_tuple_gets_another_port,
    ended_flow_takes_no_packet_of_another_connection,
    flows_own_packet_is_not_anothers_at_bridge_port,
    answer_to_what_left_from_node_port_is_no_client,
}

fn fixtures() -> Result<Vec<Fixture>> {
    let mut fixtures = external()?;
    fixtures
        .iter_mut()
        .try_for_each(|fixture| fixture.set_flags(Node::CLUSTER_IP_EXTERNAL))?;
    Ok(fixtures)
}

#[test]
fn no_flow_draws_port_of_another_connection() -> Result<()> {
    for mut fixture in fixtures()? {
        // Other programs use every fourth port. In this range the programs track only the opener of
        // a connection.
        for port in (CLIENT_PORT_FIRST..=CLIENT_PORT_LAST).step_by(4) {
            for flags in ["S", "A"] {
                let frame = fixture
                    .names
                    .frame(&format!("tcp {flags} uplink:{port} > far:8080"))?;
                ensure!(fixture.run(EGRESS, &frame)?.packet == frame, "port {port}");
            }
        }
        for client in 1_000..1_400_u16 {
            let port = drawn(&mut fixture, client)?;
            ensure!(
                port % 4 != CLIENT_PORT_FIRST % 4,
                "client {client} got port {port}"
            );
        }
    }
    Ok(())
}

/// A pod that chooses its ports must not receive an answer meant for another client.
#[test]
fn masqueraded_connection_takes_port_of_silent_flow_alone() -> Result<()> {
    for mut fixture in fixtures()? {
        fixture.rows("foreign_nat::masqueraded_connection_takes_port_of_silent_flow_alone/open")?;
        shows_port(&fixture)?;
        fixture
            .rows("foreign_nat::masqueraded_connection_takes_port_of_silent_flow_alone/fresh")?;
        fixture
            .rows("foreign_nat::masqueraded_connection_takes_port_of_silent_flow_alone/silence")?;
        shows_port(&fixture)?;
        fixture.rows("foreign_nat::masqueraded_connection_takes_port_of_silent_flow_alone/gone")?;
    }
    Ok(())
}

/// Sends another client's SYN from the drawn port, as netfilter masquerades it.
fn shows_port(fixture: &Fixture) -> Result<()> {
    let frame = fixture.names.frame("tcp S uplink:$p > far:8080")?;
    let left = fixture
        .netns
        .run(|| fixture.bench.run_marked(EGRESS, &frame, LO, PORT_SHOWS))?;
    ensure!(left.packet == frame, "the connection keeps its port");
    Ok(())
}

/// The mark of a packet that an ingress hook has rewritten, and whose port netfilter may have
/// changed.
const PORT_SHOWS: u32 = 0xa000;
/// The interface index of lo.
const LO: u32 = 1;

/// Opens a flow and returns its port.
fn drawn(fixture: &mut Fixture, client: u16) -> Result<u16> {
    let frame = fixture
        .names
        .frame(&format!("tcp S stranger:{client} > remote:80"))?;
    let outcome = fixture.run(INGRESS, &frame)?;
    ensure!(outcome.verdict == Pass, "{:?}", outcome.verdict);
    let at = if frame[12] == 0x08 { 34 } else { 54 };
    Ok(u16::from_be_bytes([
        outcome.packet[at],
        outcome.packet[at + 1],
    ]))
}
