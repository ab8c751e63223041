//! Packets of open connections that skip the stack, and their rewritten form.

use crate::packets::packet_tests;

packet_tests! {
    fast:
    assured_packets_skip_stack_to_pod_and_back,
    masqueraded_packets_skip_stack_to_pod,
    fast_packets_to_another_node_are_translated_at_egress,
    fast_path_follows_node_flag,
    routes_may_depend_on_ports,
}
