//! Open connections that skip the stack although conntrack tracks them.

use anyhow::Result;
use proxy_common::device::Node;
use proxy_common::flow::Offer;

use crate::fast_fixture::FastFixture;
use crate::fixture::Fixture;
use crate::packets::{Runner, packet_tests, run_section};

packet_tests! {
    opened:
    tolerated_connection_skips_stack_until_its_end,
    datagrams_skip_stack_once_they_are_tolerated,
    stack_sees_flows_that_conntrack_does_not_tolerate,
    stack_sees_open_flows_by_devices_of_other_programs,
    blind_ends_of_tolerated_connections_are_dropped,
    blind_ends_of_silent_connections_are_dropped,
    hidden_ends_of_tolerated_connections_are_dropped,
    connection_that_is_dialled_again_asks_again,
    flow_that_was_silent_for_long_asks_again,
    datagrams_from_outside_skip_stack_once_they_are_tolerated,
    stack_sees_datagrams_from_outside_where_rules_or_programs_may_matter,
    stack_sees_tcp_from_outside,
}

/// The flows that have requested to skip the stack, and whether the agent has allowed it.
#[derive(Default)]
pub(crate) struct Offers {
    all: Vec<Offer>,
    is_made_liberal: bool,
}

impl Fixture {
    /// Allows all requesting flows to skip the stack although conntrack tracks them, or withdraws
    /// that.
    pub(crate) fn make_liberal(&mut self, is_made_liberal: bool) -> Result<()> {
        let liberal = &mut self.bench.datapath.liberal;
        while let Some(offer) = liberal.offered()? {
            if liberal.open_flow(&offer.key)?.is_some() {
                // The next row may have to wait for its second.
                self.offers.all.push(Offer::new(offer.key, offer.secs + 5));
            }
        }
        self.offers.is_made_liberal = is_made_liberal;
        for offer in &self.offers.all {
            if is_made_liberal {
                liberal.make_liberal(offer)?;
            } else {
                liberal.forget(&offer.key)?;
            }
        }
        Ok(())
    }

    /// Ages the agent's permissions.
    pub(crate) fn age_answers(&mut self, secs: u32) -> Result<()> {
        for offer in &mut self.offers.all {
            *offer = Offer::new(offer.key, offer.secs.saturating_sub(secs));
            if self.offers.is_made_liberal {
                self.bench.datapath.liberal.make_liberal(offer)?;
            }
        }
        Ok(())
    }
}

/// The agent withdraws the permission to bypass the stack when a rule appears that must see the
/// packets. Without an agent the permission expires.
#[test]
fn liberal_flows_return_to_stack_at_once() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        fixture.fixture().set_flags(Node::FAST_OPENED)?;
        run_section(&mut fixture, "opened::tolerated")?;
        fixture.fixture().bench.datapath.ways.open_for(None)?;
        run_section(&mut fixture, "opened::goes_on_through_stack")?;
    }
    Ok(())
}
