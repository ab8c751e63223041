//! All that decides about a packet but the packet itself.

use std::collections::BTreeMap;

use aya::Pod;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::device::{Device, Node, OwnAddr};
use proxy_common::frontend::FrontendKey;
use proxy_common::names::{FamilyMaps, IPV4, IPV6};

use crate::model::{FamilyModel, ServiceModel};
use crate::tables::FamilyTables;

/// What the maps of one family hold, and where the packet comes in.
#[derive(Clone, Debug)]
pub(super) struct Scene<A: Addr> {
    pub(super) node_name: String,
    pub(super) tables: FamilyTables<A>,
    pub(super) node: Node,
    pub(super) devices: BTreeMap<u32, Device>,
    pub(super) addrs: BTreeMap<A, OwnAddr>,
    pub(super) pods: Vec<Net<A>>,
    pub(super) service_cidrs: Vec<Net<A>>,
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
pub(super) trait Family: Addr + Pod {
    const MAPS: FamilyMaps;
    fn model(service: ServiceModel) -> Option<FamilyModel<Self>>;
}

impl Family for Addr4 {
    const MAPS: FamilyMaps = IPV4;

    fn model(service: ServiceModel) -> Option<FamilyModel<Self>> {
        service.v4
    }
}

impl Family for Addr6 {
    const MAPS: FamilyMaps = IPV6;

    fn model(service: ServiceModel) -> Option<FamilyModel<Self>> {
        service.v6
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

/// The hook at which a packet meets the programs first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) program: &'static str,
    pub(super) device: String,
    pub(super) ifindex: u32,
}
