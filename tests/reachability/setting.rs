//! The set-up of nodes and network while the table runs.

use std::fmt;

use anyhow::Result;
use testbed::lab::{Lab, Layout, PodRoute, Ways};

#[derive(Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) layout: Layout,
    pub(crate) compat: bool,
    pub(crate) rp_filter: u8,
    pub(crate) default_route: bool,
    pub(crate) pod_route: PodRoute,
    pub(crate) ways: Ways,
    pub(crate) firewall: bool,
    pub(crate) offload: bool,
}

impl Setting {
    /// Returns a node's default setting.
    pub(crate) fn plain(layout: Layout, compat: bool) -> Self {
        let pod_route = PodRoute::Eth0;
        let ways = Ways::Eth0;
        // Packets of pods on ipvlan devices come in by the uplink, although no route leads to their
        // addresses there.
        let rp_filter = if layout == Layout::Ipvlan { 2 } else { 1 };
        Self {
            layout,
            compat,
            rp_filter,
            default_route: true,
            pod_route,
            ways,
            firewall: false,
            offload: true,
        }
    }

    pub(crate) fn apply(&self, lab: &Lab) -> Result<()> {
        lab.set_rp_filter(self.rp_filter)?;
        lab.set_default_route(self.default_route)?;
        lab.set_pod_route(self.pod_route)?;
        lab.set_ways(self.ways)?;
        lab.set_firewall(self.firewall)?;
        lab.set_offload(self.offload)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            layout,
            compat,
            rp_filter,
            default_route,
            pod_route,
            ways,
            firewall,
            offload,
        } = self;
        write!(
            f,
            "{layout:?}, {}, rp_filter={rp_filter} default_route={default_route} ",
            mode(*compat)
        )?;
        write!(
            f,
            "pods by {pod_route:?} outside by {ways:?} firewall={firewall} offload={offload}"
        )
    }
}

/// Returns the masquerade mode, in the flag's words.
pub(crate) fn mode(compat: bool) -> &'static str {
    if compat { "compat" } else { "default" }
}
