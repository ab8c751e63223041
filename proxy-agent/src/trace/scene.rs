//! All that decides about a packet but the packet itself.

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

/// What the maps of one family hold, and where the packet comes in.
#[derive(Clone, Debug)]
pub(super) struct Scene<A: Addr> {
    pub(super) node_name: String,
    pub(super) tables: FamilyTables<A>,
    pub(super) node: Node,
    pub(super) devices: BTreeMap<u32, Device>,
    pub(super) addrs: BTreeMap<A, OwnAddr>,
    pub(super) pods: Vec<Net<A>>,
    /// And what they are: see [`proxy_common::frontend::service_net`].
    pub(super) service_nets: Vec<(Net<A>, u32)>,
    pub(super) generation: u32,
    /// What the programs remember of earlier flows, as far as it concerns the client.
    pub(super) affinity: BTreeMap<AffinityKey<A>, Affinity<A>>,
    pub(super) connections: BTreeMap<FrontendKey<A>, u32>,
    /// What service ports are called, as far as that is known: the maps do not say it.
    pub(super) names: BTreeMap<FrontendKey<A>, PortName>,
    pub(super) entry: Entry,
    /// What the reader should know about all this.
    pub(super) notes: Vec<String>,
    /// The same, if the client counts as outside.
    pub(super) note_on_strangers: Option<String>,
}

/// A family and where its part is.
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

/// A network: the key of a map that is searched for the longest prefix.
pub(super) type Net<A> = (u32, A);

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortName {
    pub(super) namespace: String,
    pub(super) service: String,
    /// Empty if it has no name.
    pub(super) port: String,
}

/// Of the service ports, by their keys: their ClusterIP frontends.
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
