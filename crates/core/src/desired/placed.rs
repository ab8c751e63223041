//! The nodes of endpoints whose connections are reset on node loss: see [`crate::loss`].

use proxy_common::addr::Addr;

use super::Desired;
use super::family::Family;
use crate::health::Path;
use crate::input::ObjectName;
use crate::loss::Placements;
use crate::model::ObjectRef;

impl Desired {
    /// Returns the ports and endpoints of Services with `reset-on-node-loss`.
    pub fn placements(&self) -> Placements {
        let mut placements = Placements::default();
        for name in self.store.resetting() {
            let service = ObjectRef {
                kind: "Service",
                name: name.clone(),
            };
            let uid = self.store.uid(&service).map(Into::into);
            self.v4.place(name, &service, &uid, &mut placements);
            self.v6.place(name, &service, &uid, &mut placements);
        }
        placements
    }
}

impl<A: Addr> Family<A> {
    fn place(
        &self,
        name: &ObjectName,
        service: &ObjectRef,
        uid: &Option<Box<str>>,
        placements: &mut Placements,
    ) {
        let Some(model) = self.models.get(name) else {
            return;
        };
        for (key, port) in model.ports.iter() {
            // The flows belong to the Service that holds the ClusterIP.
            let is_holder = || {
                self.holder(key)
                    .is_some_and(|holder| holder.claim == model.claim)
            };
            let Some(placed) = port.placed.as_ref().filter(|_| is_holder()) else {
                continue;
            };
            placements
                .services
                .insert(key.socket_addr(), (service.clone(), uid.clone()));
            placements.endpoints.extend(
                placed
                    .iter()
                    .map(|(at, placed)| (Path::new(key, at), placed.clone())),
            );
        }
    }
}
