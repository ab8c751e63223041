//! Chains for forwarded packets, in the form of CNI plugins' chains for NetworkPolicies. Each rule
//! has a counter, like theirs. All are in one nftables table, which is easy to remove. Both plugins
//! pass packets of established connections early.

use std::fmt::Write;

use anyhow::Result;
use testbed::lab::{Host, Lab};

use super::Path;
use super::services::TARGET_PORT;

const TABLE: &str = "table ip policies";

/// Loads a path's chains on n1, and removes those of another path.
pub(super) fn set(lab: &Lab, path: Path) -> Result<()> {
    let chains = match path {
        Path::Calico => calico(&lab.n1.pods),
        Path::KubeRouter => kube_router(&lab.n1.pods),
        _ => String::new(),
    };
    // Declaring the table first makes its deletion succeed in any case.
    let table = if chains.is_empty() {
        String::new()
    } else {
        format!("{TABLE} {{\n{chains}}}")
    };
    lab.n1
        .host
        .ns
        .nft(&format!("{TABLE}\ndelete {TABLE}\n{table}"))
}

/// A chain per direction and pod, selected by the pod's device; accepted packets are marked.
fn calico(pods: &[Host]) -> String {
    let mut text = format!(
        "chain allow {{
            meta l4proto {{ tcp, udp }} th dport {{ {TARGET_PORT}, 30000-65535 }} counter meta mark set meta mark | 0x10000
            meta mark & 0x10000 == 0x10000 counter return
        }}\n"
    );
    for pod in pods {
        for direction in ["from", "to"] {
            let _ = write!(
                text,
                "chain {direction}-{} {{
                    ct state established,related counter accept
                    ct state invalid counter drop
                    counter meta mark set meta mark & 0xfffeffff
                    udp dport 4789 counter drop
                    ip protocol 4 counter drop
                    counter meta mark set meta mark & 0xfffdffff
                    meta mark & 0x20000 == 0 counter jump allow
                    meta mark & 0x10000 == 0x10000 counter return
                    meta mark & 0x20000 == 0 counter drop
                }}\n",
                pod.name
            );
        }
    }
    for (direction, device) in [("from", "iifname"), ("to", "oifname")] {
        let _ = writeln!(text, "chain {direction}-workload {{");
        for Host { name, .. } in pods {
            let _ = writeln!(text, "{device} {name} counter goto {direction}-{name}");
        }
        let _ = writeln!(text, "counter drop\n}}");
    }
    text + "chain from-host {
        }
        chain to-host {
        }
        chain cidr-block {
        }
        chain dispatch {
            counter meta mark set meta mark & 0xfff1ffff
            meta mark & 0x10000 == 0 counter jump from-host
            iifname \"p1*\" counter jump from-workload
            oifname \"p1*\" counter jump to-workload
            counter jump to-host
            counter jump cidr-block
        }
        chain forward {
            type filter hook forward priority filter; policy accept;
            counter jump dispatch
            meta mark & 0x10000 == 0x10000 counter accept
        }\n"
}

/// A chain per pod, selected by the pod's address as source and as destination.
fn kube_router(pods: &[Host]) -> String {
    let addrs: Vec<_> = pods.iter().map(|pod| pod.addrs.v4.to_string()).collect();
    let mut text = format!(
        "set pods {{
            type ipv4_addr
            elements = {{ {} }}
        }}
        chain allow {{
            ip saddr @pods ip daddr @pods meta l4proto {{ tcp, udp }} counter meta mark set meta mark | 0x10000
            meta mark & 0x10000 == 0x10000 counter return
        }}\n",
        addrs.join(", ")
    );
    for Host { name, addrs, .. } in pods {
        let pod = addrs.v4;
        let _ = write!(
            text,
            "chain pod-{name} {{
                ct state invalid counter drop
                ct state established,related counter accept
                ip daddr {pod} fib saddr type local counter accept
                ip saddr {pod} counter jump allow
                ip daddr {pod} counter jump allow
                meta mark & 0x10000 != 0x10000 counter reject
                counter meta mark set meta mark & 0xfffeffff
                counter meta mark set meta mark | 0x20000
            }}\n"
        );
    }
    let _ = writeln!(text, "chain dispatch {{");
    for Host { name, addrs, .. } in pods {
        let _ = writeln!(
            text,
            "ip daddr {0} counter jump pod-{name}\nip saddr {0} counter jump pod-{name}",
            addrs.v4
        );
    }
    text + "meta mark & 0x20000 == 0x20000 counter accept
        }
        chain forward {
            type filter hook forward priority filter; policy accept;
            counter jump dispatch
        }\n"
}
