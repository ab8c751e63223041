//! The state that decides about a packet, without the packet itself.

use std::collections::BTreeMap;

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::device::{Device, Node, OwnAddr};
use proxy_common::frontend::FrontendKey;
use proxy_common::share;

use crate::outside_reach::Outside;
use proxy_core::desired::Snapshot;
use proxy_core::model::Skipped;
use proxy_core::tables::{FamilyTables, Tables};
use proxy_datapath::FamilyNames;
use proxy_view::Names;

/// The rows of one family's maps, and the packet's entry.
#[derive(Clone, Debug)]
pub(crate) struct TraceInput<A: Addr> {
    pub(crate) node_name: String,
    pub(crate) tables: FamilyTables<A>,
    pub(crate) node: Node,
    pub(crate) devices: BTreeMap<u32, Device>,
    pub(crate) addrs: BTreeMap<A, OwnAddr>,
    pub(crate) pods: Vec<Net<A>>,
    /// The service networks and their kinds: see [`proxy_common::frontend::service_net`].
    pub(crate) service_nets: Vec<(Net<A>, u32)>,
    pub(crate) generation: u32,
    /// The affinity that the programs remember of the client.
    pub(crate) affinity: BTreeMap<AffinityKey<A>, Affinity<A>>,
    pub(crate) connections: BTreeMap<FrontendKey<A>, u32>,
    /// The shares of the agent's flow table; None without an agent.
    pub(crate) shares: Option<Shares<A>>,
    /// The names of service ports, as far as known: the maps have no names.
    pub(crate) names: BTreeMap<FrontendKey<A>, PortName>,
    pub(crate) entry: Entry,
    /// The notes for the reader.
    pub(crate) notes: Vec<String>,
    /// The note for the reader if the client counts as outside.
    pub(crate) external_client_note: Option<String>,
    /// What a machine outside of the cluster cannot reach; None on a node.
    pub(crate) outside: Option<Outside>,
}

/// The entries of the flow table that clients and namespaces hold: see [`proxy_common::share`].
#[derive(Clone, Debug)]
pub(crate) struct Shares<A: Addr> {
    /// The entries of the table.
    pub(crate) room: u32,
    /// The entries of all flows beyond half-open.
    pub(crate) lasting: u32,
    /// The holders; empty while no holder can have used up its share.
    pub(crate) held: BTreeMap<A, u32>,
}

impl<A: Addr> Shares<A> {
    /// Returns the number that a client of the Services of a namespace meets, in words.
    pub(crate) fn note(&self, client: A) -> String {
        let room = self.room;
        let of = |holder| self.held.get(&holder).copied().unwrap_or_default();
        let held = of(client).max(of(client.site_if(true)));
        let free = room.saturating_sub(self.lasting);
        let (holder, what) = match share::is_used_up(held, self.lasting, room) {
            true => (
                format!("{} holds {held}", client.ip()),
                "no client may hold more than are free".to_owned(),
            ),
            false => (
                "the Services of this namespace hold their share".to_owned(),
                format!(
                    "they may hold no more than {} times the free entries",
                    share::NAMESPACE
                ),
            ),
        };
        format!("{holder} of the flow table's {room} entries, and {free} are free: {what}")
    }
}

/// A family and its part of the tables.
pub(crate) trait Family: FamilyNames {
    fn tables(tables: &Tables) -> &FamilyTables<Self>;
    fn conflicts(snapshot: &Snapshot) -> &BTreeMap<FrontendKey<Self>, Vec<Skipped>>;
}

impl Family for Addr4 {
    fn tables(tables: &Tables) -> &FamilyTables<Self> {
        &tables.v4
    }

    fn conflicts(snapshot: &Snapshot) -> &BTreeMap<FrontendKey<Self>, Vec<Skipped>> {
        &snapshot.conflicts4
    }
}

impl Family for Addr6 {
    fn tables(tables: &Tables) -> &FamilyTables<Self> {
        &tables.v6
    }

    fn conflicts(snapshot: &Snapshot) -> &BTreeMap<FrontendKey<Self>, Vec<Skipped>> {
        &snapshot.conflicts6
    }
}

/// A network, in the form of a key of a longest-prefix map.
pub(crate) type Net<A> = (u32, A);

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortName {
    pub(crate) namespace: String,
    pub(crate) service: String,
    /// The name of the port; empty if the port has none.
    pub(crate) port: String,
}

/// Returns the names of service ports by their keys, which are their ClusterIP frontends.
pub(crate) fn port_names<A: Family>(
    names: &Names,
    tables: &FamilyTables<A>,
) -> BTreeMap<FrontendKey<A>, PortName> {
    let named = tables.services.keys().filter_map(|key| {
        let name = names.find(key.socket_addr(), &key.proto.to_string())?;
        let namespace = name.namespace.clone();
        let service = name.name.clone();
        Some((
            *key,
            PortName {
                namespace,
                service,
                port: name.port_name.clone(),
            },
        ))
    });
    named.collect()
}

/// The hook at which a packet meets the programs first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) program: &'static str,
    pub(crate) device: String,
    pub(crate) ifindex: u32,
}
