//! The state that decides about a packet, without the packet itself.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::device::{Device, Node, OwnAddr};
use proxy_common::frontend::FrontendKey;

use crate::view::Names;
use proxy_core::desired::Snapshot;
use proxy_core::model::Skipped;
use proxy_core::tables::{FamilyTables, Tables};
use proxy_datapath::FamilyNames;

/// The rows of one family's maps, and the packet's entry.
#[derive(Clone, Debug)]
pub(super) struct TraceInput<A: Addr> {
    pub(super) node_name: String,
    pub(super) tables: FamilyTables<A>,
    pub(super) node: Node,
    pub(super) devices: BTreeMap<u32, Device>,
    pub(super) addrs: BTreeMap<A, OwnAddr>,
    pub(super) pods: Vec<Net<A>>,
    /// The service networks and their kinds: see [`proxy_common::frontend::service_net`].
    pub(super) service_nets: Vec<(Net<A>, u32)>,
    pub(super) generation: u32,
    /// The affinity that the programs remember of the client.
    pub(super) affinity: BTreeMap<AffinityKey<A>, Affinity<A>>,
    pub(super) connections: BTreeMap<FrontendKey<A>, u32>,
    /// The names of service ports, as far as known: the maps have no names.
    pub(super) names: BTreeMap<FrontendKey<A>, PortName>,
    pub(super) entry: Entry,
    /// The notes for the reader.
    pub(super) notes: Vec<String>,
    /// The note for the reader if the client counts as outside.
    pub(super) external_client_note: Option<String>,
}

/// A family and its part of the tables.
pub(super) trait Family: FamilyNames {
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
pub(super) type Net<A> = (u32, A);

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortName {
    pub(super) namespace: String,
    pub(super) service: String,
    /// The name of the port; empty if the port has none.
    pub(super) port: String,
}

/// Returns the names of service ports by their keys, which are their ClusterIP frontends.
pub(super) fn port_names<A: Family>(names: &Names, tables: &FamilyTables<A>) -> BTreeMap<FrontendKey<A>, PortName> {
    let named = tables.services.keys().filter_map(|key| {
        let name = names.find(SocketAddr::new(key.addr.ip(), key.port.get()), &key.proto.to_string())?;
        let (namespace, service) = (name.namespace.clone(), name.name.clone());
        Some((*key, PortName { namespace, service, port: name.port_name.clone() }))
    });
    named.collect()
}

/// The hook at which a packet meets the programs first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) program: &'static str,
    pub(super) device: String,
    pub(super) ifindex: u32,
}
