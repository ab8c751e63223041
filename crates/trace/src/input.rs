//! The state that determines the decision about a packet, without the packet.

use std::collections::BTreeMap;

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::device::{Device, Node, OwnAddr};
use proxy_common::frontend::{FrontendKey, Service};
use proxy_common::{names, share};

use crate::outside_reach::Outside;
use proxy_core::desired::Snapshot;
use proxy_core::model::Skipped;
use proxy_core::tables::{FamilyTables, Tables};
use proxy_datapath::FamilyNames;
use proxy_view::Names;

/// The map rows of an address family, and the packet's entry point.
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
    /// The client's session affinity, from the maps.
    pub(crate) affinity: BTreeMap<AffinityKey<A>, Affinity<A>>,
    pub(crate) connections: BTreeMap<FrontendKey<A>, u32>,
    /// The shares of the agent's flow table; `None` if no agent runs.
    pub(crate) shares: Option<Shares<A>>,
    /// The known names of service ports; the maps have no names.
    pub(crate) names: BTreeMap<FrontendKey<A>, PortName>,
    pub(crate) entry: Entry,
    /// The packet's mark.
    pub(crate) mark: u32,
    pub(crate) notes: Notes,
    /// The note if the client counts as outside the cluster.
    pub(crate) external_client_note: Option<String>,
    /// What a machine outside the cluster cannot reach; `None` on a node.
    pub(crate) outside: Option<Outside>,
}

impl<A: Addr> TraceInput<A> {
    /// Returns true if the agent runs with `--external-forwarding dsr`, as far as the tables show.
    pub(crate) fn hands_over(&self) -> bool {
        let mut services = self.tables.services.values();
        services.any(|service| service.has(Service::HANDS_OVER))
    }

    /// Returns true if packets that other nodes hand over can enter where the packet does.
    pub(crate) fn takes_handed_over(&self) -> bool {
        let device = self.devices.get(&self.entry.ifindex);
        let is_uplink = device.is_some_and(|device| !device.is_pod());
        self.hands_over() && is_uplink && self.entry.program == names::INGRESS
    }

    /// Returns the link address of the device at which the packet enters.
    pub(crate) fn mac(&self) -> [u8; 6] {
        let device = self.devices.get(&self.entry.ifindex);
        device.map_or([0; 6], |device| device.mac)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    pub(crate) all: Vec<String>,
    /// The notes that report a fault.
    pub(crate) warnings: Vec<String>,
}

impl Notes {
    pub(crate) fn warn(&mut self, warnings: impl IntoIterator<Item = String>) {
        let known = self.warnings.len();
        self.warnings.extend(warnings);
        self.all.extend_from_slice(&self.warnings[known..]);
    }
}

/// The flow table's entries held by clients and namespaces: see [`proxy_common::share`].
#[derive(Clone, Debug)]
pub(crate) struct Shares<A: Addr> {
    /// The table's maximum number of entries.
    pub(crate) room: u32,
    /// The number of entries of flows beyond half-open.
    pub(crate) lasting: u32,
    /// The number of entries by holder; empty while no holder can have used up its share.
    pub(crate) held: BTreeMap<A, u32>,
}

impl<A: Addr> Shares<A> {
    /// Describes the share that applies to a client of the Services of a namespace.
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

/// An address family and its part of the tables.
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

/// A network (prefix length, address), as the key of a longest-prefix map.
pub(crate) type Net<A> = (u32, A);

/// The name of a Service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortName {
    pub(crate) namespace: String,
    pub(crate) service: String,
    /// The name of the port; empty for a port without a name.
    pub(crate) port: String,
}

/// Returns the names of service ports, by their ClusterIP frontends.
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

/// The hook at which a packet enters the programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) program: &'static str,
    pub(crate) device: String,
    pub(crate) ifindex: u32,
}
