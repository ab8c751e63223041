//! Snapshots of the state for readers, which share the objects instead of copying them.

use std::collections::BTreeMap;
use std::sync::Arc;

use proxy_common::addr::{Addr4, Addr6};
use proxy_common::frontend::FrontendKey;

use super::Desired;
use crate::compact::{EndpointSlice, Service};
use crate::input::ObjectName;
use crate::model::{FamilyModel, NodeModel, Skipped};

/// All served Services, each as of the time of its part: see [`Desired::snapshot_part`]. All other
/// fields are as of the last part.
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

/// A range of the Services, by name.
#[derive(Clone, Debug)]
pub struct Part {
    services: Vec<ServiceSnapshot>,
    rest: Rest,
}

#[derive(Clone, Debug)]
enum Rest {
    /// More Services follow after this name.
    After(ObjectName),
    /// The last part. Holds all other fields.
    End(Box<Snapshot>),
}

impl Snapshot {
    /// Adds a part. Returns the name after which the next part begins. `None` after the last part.
    pub fn take(&mut self, part: Part) -> Option<ObjectName> {
        self.services.extend(part.services);
        match part.rest {
            Rest::After(name) => Some(name),
            Rest::End(rest) => {
                let services = std::mem::take(&mut self.services);
                *self = Self { services, ..*rest };
                None
            }
        }
    }
}

impl Desired {
    /// Returns the whole state. For large clusters use [`Self::snapshot_part`].
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        let rest = snapshot.take(self.snapshot_part(None, usize::MAX));
        debug_assert!(rest.is_none(), "one part has all");
        snapshot
    }

    /// Returns the Services after `after`, or the first Services if it is `None`. `limit` is the
    /// approximate number of Services and slices.
    ///
    /// The state may change between parts. A Service that exists throughout is in exactly one part,
    /// as of that part. Before the first sync the only part has no Services.
    pub fn snapshot_part(&self, after: Option<&ObjectName>, limit: usize) -> Part {
        let mut services = Vec::new();
        let mut left = limit;
        let mut last = None;
        let is_synced = self.passes > 0;
        for (name, object) in self.store.services_after(after).filter(|_| is_synced) {
            let service = self.served(name, object);
            left =
                left.saturating_sub(1 + service.as_ref().map_or(0, |service| service.slices.len()));
            services.extend(service);
            if left == 0 {
                last = Some(name);
                break;
            }
        }
        let rest = match last {
            Some(name) => Rest::After(name.clone()),
            None => Rest::End(Box::new(Snapshot {
                node: self.node.clone(),
                services: Vec::new(),
                conflicts4: self.v4.conflicts_by_frontend(),
                conflicts6: self.v6.conflicts_by_frontend(),
            })),
        };
        Part { services, rest }
    }

    fn served(&self, name: &ObjectName, object: &Arc<Service>) -> Option<ServiceSnapshot> {
        let v4 = self.v4.model(name).cloned();
        let v6 = self.v6.model(name).cloned();
        (v4.is_some() || v6.is_some()).then(|| ServiceSnapshot {
            object: Arc::clone(object),
            slices: self.store.slices_of(name).cloned().collect(),
            v4,
            v6,
            health_check_node_port: self.health_checks.get(name).map(|check| check.port),
        })
    }
}
