//! Finds the Services with a mark that few have, without a look at all of them.

use std::collections::BTreeSet;

use crate::compact::Service;
use crate::input::ObjectName;

#[derive(Clone, Debug, Default)]
pub(super) struct Marked {
    /// The Services that have the annotation for a local redirect.
    pub(super) redirected: BTreeSet<ObjectName>,
    /// The Services that have the annotation for an end of connections to lost nodes.
    pub(super) resetting: BTreeSet<ObjectName>,
    /// The Services that other proxies serve.
    pub(super) of_other_proxies: BTreeSet<ObjectName>,
}

impl Marked {
    /// Takes in a Service as it is now; None if it has gone.
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
