//! The traffic of each Service port, of both families, without the parts of a view that cost more.

use std::collections::BTreeMap;

use proxy_common::addr::{Addr, Proto};
use proxy_core::desired::Snapshot;
use proxy_core::input::ObjectName;
use proxy_core::model::FamilyModel;
use proxy_datapath::{Counts, FamilyCounts};

use crate::PortCounts;
use crate::build::count;

/// The traffic of one port of a Service.
#[derive(Clone, Debug)]
pub struct PortSums {
    pub service: ObjectName,
    pub port: u16,
    pub proto: Proto,
    pub counts: PortCounts,
}

/// Returns the traffic of all Service ports, by namespace and name.
pub fn port_sums(snapshot: &Snapshot, counts: &Counts) -> Vec<PortSums> {
    let sums = snapshot.services.iter().flat_map(|service| {
        let mut ports = BTreeMap::new();
        service.v4.iter().for_each(|model| add(model, &counts.v4, &mut ports));
        service.v6.iter().for_each(|model| add(model, &counts.v6, &mut ports));
        ports.into_iter().map(|((port, proto), counts)| PortSums {
            service: service.object.name.clone(),
            port,
            proto: Proto(proto),
            counts,
        })
    });
    sums.collect()
}

fn add<A: Addr>(model: &FamilyModel<A>, counts: &FamilyCounts<A>, ports: &mut BTreeMap<(u16, u8), PortCounts>) {
    for key in model.ports.keys() {
        count(counts, key, ports.entry((key.port.get(), key.proto.0)).or_default());
    }
}
