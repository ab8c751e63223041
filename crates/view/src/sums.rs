//! The traffic of each Service port over both address families: cheaper than a full view.

use std::collections::BTreeMap;

use proxy_common::addr::{Addr, Proto};
use proxy_common::connect::Connects;
use proxy_core::desired::Snapshot;
use proxy_core::input::ObjectName;
use proxy_core::model::FamilyModel;
use proxy_core::udp::UdpOutcomes;
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
    pub connects: Connects,
    /// The outcomes of UDP flows; zero for other protocols.
    pub udp: UdpOutcomes,
}

/// Returns the traffic of all Service ports, by namespace and name.
pub fn port_sums(snapshot: &Snapshot, counts: &Counts) -> Vec<PortSums> {
    let sums = snapshot.services.iter().flat_map(|service| {
        let mut ports = Ports::new();
        service
            .v4
            .iter()
            .for_each(|model| add(model, &counts.v4, &mut ports));
        service
            .v6
            .iter()
            .for_each(|model| add(model, &counts.v6, &mut ports));
        ports
            .into_iter()
            .map(|((port, proto), (counts, connects, udp))| PortSums {
                service: service.object.name.clone(),
                port,
                proto: Proto(proto),
                counts,
                connects,
                udp,
            })
    });
    sums.collect()
}

/// The sums by port and protocol number.
type Ports = BTreeMap<(u16, u8), (PortCounts, Connects, UdpOutcomes)>;

fn add<A: Addr>(model: &FamilyModel<A>, counts: &FamilyCounts<A>, ports: &mut Ports) {
    for key in model.ports.keys() {
        let (sums, connects, udp) = ports.entry((key.port.get(), key.proto.0)).or_default();
        count(counts, key, sums);
        *connects += counts.connects_of(key);
        *udp = udp.plus(counts.datagrams_of(key));
    }
}
