//! kpx and the kernel in network namespaces.

/// Dereferences a fixture to the lab in its field `base`.
macro_rules! is_its_lab {
    ($fixture:ty) => {
        impl std::ops::Deref for $fixture {
            type Target = ServedLab;

            fn deref(&self) -> &ServedLab {
                &self.base
            }
        }
    };
}

mod backend_health;
mod causes;
mod churn;
mod devices;
mod fast;
mod faults;
mod flood;
mod host;
mod latency;
mod monitor;
mod monitoring;
mod namespaces;
mod net;
mod node;
mod pins;
mod redirect;
mod rest;
mod socket;
mod tables;
mod trace;
mod ui;

/// Adds a table `netpol` to a node, like a policy plugin: these rules for forwarded packets.
fn forbid(node: &testbed::netns::NetNs, rules: &str) -> anyhow::Result<()> {
    let chain = "type filter hook forward priority filter; policy accept";
    node.nft(&format!(
        "table inet netpol {{\nchain forward {{\n{chain}\n{rules}\n}}\n}}"
    ))
}
