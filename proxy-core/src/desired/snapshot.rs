//! The state that others are shown, handed out without a copy of the objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use proxy_common::addr::{Addr4, Addr6};
use proxy_common::frontend::FrontendKey;

use super::Desired;
use crate::compact::{EndpointSlice, Service};
use crate::model::{FamilyModel, NodeModel, Skipped};

/// All Services that are served, as of the last sync.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub node: NodeModel,
    pub services: Vec<ServiceSnapshot>,
    pub conflicts4: BTreeMap<FrontendKey<Addr4>, Vec<Skipped>>,
    pub conflicts6: BTreeMap<FrontendKey<Addr6>, Vec<Skipped>>,
}

#[derive(Clone, Debug)]
pub struct ServiceSnapshot {
    pub object: Arc<Service>,
    pub slices: Vec<Arc<EndpointSlice>>,
    pub v4: Option<Arc<FamilyModel<Addr4>>>,
    pub v6: Option<Arc<FamilyModel<Addr6>>>,
    pub health_check_node_port: Option<u16>,
}

impl Desired {
    /// All that is served, for those who want to look at it without holding up the agent.
    pub fn snapshot(&self) -> Snapshot {
        let services = self.store.services().filter_map(|(name, object)| {
            let (v4, v6) = (self.v4.model(name).cloned(), self.v6.model(name).cloned());
            (v4.is_some() || v6.is_some()).then(|| ServiceSnapshot {
                object: Arc::clone(object),
                slices: self.store.slices_of(name).cloned().collect(),
                v4,
                v6,
                health_check_node_port: self.health_checks.get(name).map(|check| check.port),
            })
        });
        Snapshot {
            node: self.node.clone(),
            services: services.collect(),
            conflicts4: self.v4.conflicts_by_frontend(),
            conflicts6: self.v6.conflicts_by_frontend(),
        }
    }
}
