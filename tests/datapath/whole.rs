//! Connections between pods of this node that skip the stack from their first packet on.

use crate::packets::packet_tests;

packet_tests! {
    whole:
    whole_connection_skips_stack,
    whole_flow_lives_on_when_other_flows_take_stack,
    datagram_opens_another_flow_when_its_backend_moves,
    stack_sees_flows_that_are_not_between_pods_of_this_node,
    odd_openers_take_stack,
}
