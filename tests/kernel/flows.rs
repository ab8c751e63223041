//! Flows open, are followed, close, and stay separate.

use anyhow::{Result, ensure};
use proxy_common::names::EGRESS;

use crate::packets::packet_tests;
use crate::policy::external;

packet_tests! {
    flows:
    pod_reaches_backend_and_hears_back,
    pod_that_is_its_own_backend_sees_node,
    two_services_with_one_backend_and_client_port_stay_apart,
    direct_connection_beside_flow_with_its_tuple_gets_another_port,
    closed_flow_gives_its_port_back,
    every_reset_of_backend_counts,
    peers_dial_each_other_from_the_ports_they_serve,
    lost_route_costs_packets_and_no_connection,
    host_reaches_backends_through_anchor,
    hairpin_without_node_address_is_dropped,
    end_that_other_side_does_not_expect_changes_nothing,
    expected_reset_ends_silent_flow,
    reset_from_outside_counts_once_backend_does_not_go_on,
    spray_in_name_of_client_outside_ends_no_flow,
    syn_on_silent_flow_leaves_it_to_backend_that_answers,
    syn_on_silent_flow_opens_another_where_backend_is_silent_too,
    syn_on_silent_flow_opens_another_where_backend_knows_none,
    early_goodbye_counts_once_backend_ends,
    backend_that_accepts_again_begins_another_connection,
    answer_that_no_opener_asked_for_begins_nothing,
    refusal_of_syn_on_established_flow_ends_it,
}

#[test]
fn masqueraded_flow_takes_no_packet_of_another_conversation() -> Result<()> {
    for mut fixture in external()? {
        fixture.rows("flows::masqueraded_flow_takes_no_packet_of_another_conversation")?;
        // The host's firewall answers with the backend's address. No hook has seen that answer
        // before, and it belongs to the flow.
        let frame = fixture.names.frame("udp far:5353 > stranger:$p +4")?;
        let answer = fixture.bench.run_own(EGRESS, &frame)?.packet;
        let text = fixture.names.text(&answer)?;
        ensure!(text == "udp node:30053 > stranger:1000 +4", "{text}");
        // The host has reassembled and fragmented a packet of another conversation, and so looks
        // like its sender.
        let fragment = fixture
            .names
            .frame("[first=9] udp far:5353 > stranger:$p +64")?;
        ensure!(
            fixture.bench.run_own(EGRESS, &fragment)?.packet == fragment,
            "a fragment of another's answer"
        );
    }
    Ok(())
}
