//! Takes a node out of service without breaking open flows. The programs serve open flows and leave
//! packets that would open a flow of a Service to the next proxy. No agent runs during a drain,
//! because an agent would put the node back into service.

use std::path::Path;

use anyhow::{Context, Result};
use aya::maps::{Array, HashMap, Map, MapData, MapError};
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::device::Node;
use proxy_common::flow::{Flow, FlowKey, Kind, LINGER_SECS, Timeouts};
use proxy_common::layout::LAYOUT;
use proxy_common::names;

use super::clock::boot_secs;
use super::flow_reader::Times;
use super::flows::is_over;
use super::maps::FamilyNames;
use super::pins::orphans::Orphan;
use super::pressure::Pressure;

type Flows<A> = HashMap<MapData, FlowKey<A>, Flow<A>>;

/// The maps of an agent that has exited.
pub struct Drain {
    node: Array<MapData, Node>,
    v4: Flows<Addr4>,
    v6: Flows<Addr6>,
}

impl Drain {
    /// Opens the maps pinned below the directory `root`. Returns `None` if it contains no pinned
    /// maps of this layout.
    pub fn open(root: &Path) -> Result<Option<Self>> {
        let maps = root.join(format!("v{LAYOUT}")).join("maps");
        if !maps.join(names::NODE).exists() {
            return Ok(None);
        }
        Ok(Some(Self {
            node: pinned(&maps, names::NODE)?,
            v4: flows(&maps)?,
            v6: flows(&maps)?,
        }))
    }

    /// Opens unpinned maps like [`Drain::open`]. Returns `None` if one of the needed maps is
    /// missing.
    pub fn of(mut orphans: Vec<Orphan>) -> Result<Option<Self>> {
        let mut take = |name: &str| {
            let at = orphans.iter().position(|orphan| orphan.name == name)?;
            Some(Map::from_map_data(orphans.swap_remove(at).map))
        };
        let (Some(node), Some(v4), Some(v6)) = (
            take(names::NODE),
            take(Addr4::MAPS.flows),
            take(Addr6::MAPS.flows),
        ) else {
            return Ok(None);
        };
        Ok(Some(Self {
            node: node?.try_into()?,
            v4: v4?.try_into()?,
            v6: v6?.try_into()?,
        }))
    }

    /// Stops the programs from opening flows until the next agent starts.
    pub fn begin(&mut self) -> Result<()> {
        let node = self.node.get(&0, 0).context("read NODE")?;
        self.node
            .set(0, node.with(Node::DRAINING), 0)
            .context("write NODE")
    }

    /// Returns the number of open flows of both families.
    pub fn open_flows(&self) -> Result<usize> {
        let now_secs = boot_secs()?;
        Ok(open(&self.v4, now_secs)? + open(&self.v6, now_secs)?)
    }
}

fn open<A: FamilyNames>(flows: &Flows<A>, now_secs: u32) -> Result<usize> {
    let times = Times {
        now_secs,
        timeouts: Timeouts::DEFAULT,
    };
    let mut open = 0;
    for key in flows.keys() {
        let key = key.with_context(|| format!("read {}", A::MAPS.flows))?;
        let flow = match flows.get(&key, 0) {
            // A client's direct connection has no Service, and needs kpx only while it shares a
            // port with a flow that has one.
            Ok(flow) if flow.kind == Kind::DNAT && !flow.service.addr.is_unspecified() => flow,
            Ok(_) | Err(MapError::KeyNotFound) => continue,
            Err(error) => return Err(error).with_context(|| format!("read {}", A::MAPS.flows)),
        };
        let has_ended = flow.state().is_terminal() && flow.idle_secs(now_secs) > LINGER_SECS;
        open += usize::from(!has_ended && !is_over(&flow, &key, Pressure::None, times));
    }
    Ok(open)
}

fn flows<A: FamilyNames>(maps: &Path) -> Result<Flows<A>> {
    pinned(maps, A::MAPS.flows)
}

fn pinned<M: TryFrom<Map, Error = MapError>>(maps: &Path, name: &str) -> Result<M> {
    let map = MapData::from_pin(maps.join(name)).map_err(anyhow::Error::from);
    let map = map.and_then(|map| Ok(M::try_from(Map::from_map_data(map)?)?));
    map.with_context(|| format!("open the pinned map {}", maps.join(name).display()))
}
