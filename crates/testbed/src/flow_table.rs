//! Counts the flows and packets of a running kpx.

use std::collections::BTreeMap;

use anyhow::Result;
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Proto};
use proxy_common::connect::UNIT_NANOS;
use proxy_common::flow::{Flow, FlowKey, Kind, Seen, State};
use proxy_common::names::{IPV4, IPV6};
use proxy_datapath::open;

use crate::agent::Agent;

/// The flows of an IP family.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlowTable {
    pub entries: usize,
    pub half_open: usize,
    /// The flows that are not half-open.
    pub others: usize,
    /// The flows that neither side has ended.
    pub established: usize,
}

/// Reads the tables of both families.
pub fn flow_tables(agent: &Agent<'_>) -> Result<[FlowTable; 2]> {
    Ok([
        read::<Addr4>(agent, IPV4.flows)?,
        read::<Addr6>(agent, IPV6.flows)?,
    ])
}

fn read<A: Addr>(agent: &Agent<'_>, name: &str) -> Result<FlowTable> {
    let map: HashMap<MapData, FlowKey<A>, Flow<A>> = open(&agent.typed_status()?.maps, name)?;
    let mut table = FlowTable::default();
    for entry in &map {
        let (key, flow) = entry?;
        table.entries += 1;
        match flow.kind {
            Kind::DNAT if flow.is_half_open(key.proto()) => table.half_open += 1,
            Kind::DNAT => {
                table.others += 1;
                table.established += usize::from(flow.state() == State::Established);
            }
            _ => {}
        }
    }
    Ok(table)
}

/// Returns an entry as if its packets had passed `secs` seconds earlier; a wrapped negative number
/// makes it later.
#[must_use]
pub fn older<A: Addr>(mut flow: Flow<A>, proto: Proto, secs: u32) -> Flow<A> {
    // No flow is older than the machine.
    let is_younger = (secs as i32) < 0;
    flow.last_secs = if is_younger {
        flow.last_secs.wrapping_sub(secs)
    } else {
        flow.last_secs.saturating_sub(secs)
    };
    // The age of the source validation follows the last packet.
    flow.source.spare = flow.source.spare.wrapping_sub(secs as u16);
    if proto == Proto::TCP && flow.kind == Kind::UNDNAT && !flow.rx.has(Seen::PACKET) {
        // The time of the first SYN.
        let units = i64::from(secs as i32) * 1_000_000_000 / UNIT_NANOS as i64;
        flow.generation = flow.generation.wrapping_sub(units as u32);
    }
    flow
}

/// Returns the programs' counters: events and reasons.
pub fn counters(agent: &Agent<'_>) -> Result<BTreeMap<String, u64>> {
    let status = agent.typed_status()?;
    Ok(status.events.into_iter().chain(status.reasons).collect())
}
