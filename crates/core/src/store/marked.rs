//! Indexes of Services with rare properties.

use std::collections::BTreeSet;

use crate::compact::Service;
use crate::input::ObjectName;

#[derive(Clone, Debug, Default)]
pub(super) struct Marked {
    /// The Services with the local redirect annotation.
    pub(super) redirected: BTreeSet<ObjectName>,
    /// The Services with the annotation `reset-on-node-loss`.
    pub(super) resetting: BTreeSet<ObjectName>,
    pub(super) of_other_proxies: BTreeSet<ObjectName>,
}

impl Marked {
    /// Records the current Service. `None` if it was deleted.
    pub(super) fn take(&mut self, name: &ObjectName, service: Option<&Service>) {
        let has = |mark: fn(&Service) -> bool| service.is_some_and(mark);
        keep(
            &mut self.redirected,
            name,
            has(|service| service.local_redirect.is_some()),
        );
        keep(
            &mut self.resetting,
            name,
            has(|service| service.reset_on_node_loss.is_some()),
        );
        keep(
            &mut self.of_other_proxies,
            name,
            has(|service| service.is_of_other_proxy),
        );
    }
}

fn keep(names: &mut BTreeSet<ObjectName>, name: &ObjectName, is_one: bool) {
    if is_one {
        names.insert(name.clone());
    } else {
        names.remove(name);
    }
}
