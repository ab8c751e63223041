//! Packets that are rejected, dropped or left alone.

use crate::packets::packet_tests;

packet_tests! {
    verdicts:
    missing_backend_is_reported_at_once,
    local_policy_without_local_backend_drops,
    frame_for_macvlan_is_left_to_its_hook,
    foreign_packets_pass_untouched,
    draining_node_leaves_openers_to_others_and_follows_its_flows,
    packets_of_flows_that_bypassed_ingress_are_not_refused,
    received_packet_opens_nothing_at_anchor,
}
