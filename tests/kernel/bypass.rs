//! Bypass: connections between pods that skip the stack from their first packet.

use anyhow::Result;
use ipnet::IpNet;
use proxy_common::device::Node;
use testbed::agent::{DEADLINE, wait_until};

use crate::fast_fixture::{FastFixture, now_secs};
use crate::packets::{Runner, packet_tests, run_section};

packet_tests! {
    bypass:
    bypass_connection_skips_stack,
    ended_bypass_connection_leaves_its_packets_to_the_next_one,
    bypass_flow_lives_on_when_other_flows_take_stack,
    datagram_opens_another_flow_when_its_backend_moves,
    bypass_connection_with_another_node_skips_stack,
    errors_about_bypass_flow_skip_stack,
    errors_about_bypass_flow_count_against_its_backend,
    errors_about_bypass_flow_with_another_node_skip_stack,
    stack_sees_flows_that_are_not_between_pods,
    stack_sees_flows_of_devices_that_are_not_bare,
    odd_openers_take_stack,
    stack_sees_what_could_not_be_opened_any_more,
}

#[test]
fn only_addresses_of_pod_cidrs_open_bypass_flows() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        let base = fixture.fixture();
        base.set_flags(Node::FAST_PATH | Node::FAST_OPEN | Node::FAST_OPEN_PODS)?;
        let [client, pod] = [base.names.addr("client")?, base.names.addr("pod")?].map(IpNet::from);
        for (cidrs, section) in [
            (vec![client, pod], "bypass::opens_bypass"),
            (vec![client], "bypass::opens_through_stack"),
            (vec![pod], "bypass::opens_through_stack"),
        ] {
            fixture
                .fixture()
                .bench
                .datapath
                .node
                .set_pods(&[], &[], &cidrs)?;
            run_section(&mut fixture, section)?;
        }
    }
    Ok(())
}

/// The programs look up the networks when a flow opens, and again at the first answer if they have
/// changed.
#[test]
fn first_answer_rechecks_changed_networks() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        let base = fixture.fixture();
        base.set_flags(Node::FAST_PATH | Node::FAST_OPEN | Node::FAST_OPEN_PODS)?;
        let [client, pod] = [base.names.addr("client")?, base.names.addr("pod")?].map(IpNet::from);
        for (have_changed, answer) in [
            (false, "bypass::answer_skips_stack"),
            (true, "bypass::answer_takes_stack"),
        ] {
            // All of it must happen within one second.
            wait_until(DEADLINE, "the first answer", || {
                fixture
                    .fixture()
                    .bench
                    .datapath
                    .node
                    .set_pods(&[], &[], &[client, pod])?;
                run_section(&mut fixture, "bypass::opens_bypass")?;
                let opened_secs = now_secs()?;
                if have_changed {
                    fixture
                        .fixture()
                        .bench
                        .datapath
                        .node
                        .set_pods(&[], &[], &[client])?;
                }
                let answered = run_section(&mut fixture, answer);
                if now_secs()? != opened_secs {
                    Ok(false)
                } else {
                    answered.map(|()| true)
                }
            })?;
        }
    }
    Ok(())
}

/// The agent's permission lasts for a few seconds at a time.
#[test]
fn flows_open_through_stack_once_the_agent_says_no_more() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        fixture
            .fixture()
            .set_flags(Node::FAST_PATH | Node::FAST_OPEN)?;
        run_section(&mut fixture, "bypass::opens_bypass")?;
        fixture.fixture().bench.datapath.ways.open_for(None)?;
        run_section(&mut fixture, "bypass::opens_through_stack")?;
    }
    Ok(())
}
