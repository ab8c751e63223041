//! Frontends of every kind: who may dial them, which set serves, whom the backend sees.

use anyhow::{Context, Result};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS, LO};
use proxy_core::diff::Change;
use proxy_datapath::Maps;
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::frontends::frontends;
use crate::lab::{Lab, Row, labs_with_room};

#[test]
fn a_client_outside_keeps_its_address_where_the_backend_is_here() -> Result<()> {
    from_outside(&[
        (INGRESS, "tcp S stranger:1000 > node:30080", Pass, "tcp S stranger:1000 > pod:8080", "flow_opened forwarded"),
        (EGRESS, "tcp S stranger:1000 > pod:8080", Pass, "same", "not_ours"),
        (EGRESS, "tcp SA pod:8080 > stranger:1000", Pass, "tcp SA node:30080 > stranger:1000", "returned"),
        (INGRESS, "tcp S stranger:1001 > vip:80", Pass, "tcp S stranger:1001 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp S stranger:1002 > outer:80", Pass, "tcp S stranger:1002 > pod:8080", "flow_opened forwarded"),
        // A socket of the host.
        (INGRESS, "tcp S stranger:1003 > node:30443", Pass, "tcp S stranger:1003 > node:6443", "flow_opened forwarded"),
        (EGRESS, "tcp SA node:6443 > stranger:1003", Pass, "tcp SA node:30443 > stranger:1003", "returned"),
    ])
}

#[test]
fn a_client_outside_is_masqueraded_where_the_backend_is_elsewhere() -> Result<()> {
    from_outside(&[
        (INGRESS, "udp stranger:1000 > node:30053 +9", Pass, "udp stranger:$p > far:5353 +9", "flow_opened forwarded"),
        (EGRESS, "udp stranger:$p > far:5353 +9", Pass, "udp uplink:$p > far:5353 +9", ""),
        (INGRESS, "udp far:5353 > uplink:$p +2", Pass, "udp far:5353 > stranger:$p +2", ""),
        (EGRESS, "udp far:5353 > stranger:$p +2", Pass, "udp node:30053 > stranger:1000 +2", "returned"),
    ])
}

#[test]
fn a_pod_is_never_masqueraded_but_by_its_own_service() -> Result<()> {
    from_pod(&[
        (INGRESS, "udp client:1000 > node:30053", Pass, "udp client:1000 > far:5353", "flow_opened forwarded"),
        (INGRESS, "tcp S client:1000 > vip:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp S pod:1000 > vip:80", Pass, "tcp S pod:$p > pod:8080", "flow_opened forwarded"),
        (EGRESS, "tcp S pod:$p > pod:8080", Pass, "tcp S node:$p > pod:8080", ""),
    ])
}

#[test]
fn node_ports_are_served_at_accepted_addresses_only() -> Result<()> {
    from_outside(&[
        (INGRESS, "tcp S stranger:1000 > uplink:30080", Pass, "same", "not_ours"),
        (INGRESS, "tcp S stranger:1000 > node:30081", Pass, "same", "not_ours"),
        (INGRESS, "tcp S stranger:1000 > far:30080", Pass, "same", "not_ours"),
        // The protocol is part of it.
        (INGRESS, "udp stranger:1000 > node:30080", Pass, "same", "not_ours"),
    ])
}

#[test]
fn ports_that_an_external_address_does_not_offer_are_not_ours() -> Result<()> {
    from_outside(&[
        (INGRESS, "tcp S stranger:1000 > vip:81", Pass, "same", "not_ours"),
        (INGRESS, "udp stranger:1000 > outer:80", Pass, "same", "not_ours"),
    ])?;
    // But a ClusterIP is nothing else than its service.
    for mut lab in outside()? {
        lab.set_flags(Node::CLUSTER_IP_EXTERNAL)?;
        lab.check(&[(
            INGRESS,
            "tcp S stranger:1000 > web:81",
            Redirect,
            "tcp RA web:81 > stranger:1000",
            "unknown_port rejected",
        )])?;
    }
    Ok(())
}

/// Where ClusterIPs are restricted to the cluster, silence tells no stranger which of them exist.
#[test]
fn a_restricted_cluster_ip_answers_no_stranger() -> Result<()> {
    from_outside(&[
        (INGRESS, "tcp S stranger:1000 > web:80", Drop, "-", "outside"),
        (INGRESS, "tcp S stranger:1000 > web:81", Drop, "-", "outside"),
        (INGRESS, "tcp S stranger:1000 > none:80", Drop, "-", "outside"),
        (INGRESS, "tcp S stranger:1000 > spare:80", Drop, "-", "unallocated"),
    ])
}

#[test]
fn cluster_ips_are_for_the_cluster() -> Result<()> {
    from_outside(&[
        (INGRESS, "tcp S stranger:1000 > web:80", Drop, "-", "outside"),
        (INGRESS, "tcp S stranger:1000 > spare:80", Drop, "-", "unallocated"),
    ])?;
    from_pod(&[(INGRESS, "tcp S client:1000 > spare:80", Drop, "-", "unallocated")])?;
    for mut lab in outside()? {
        lab.set_flags(Node::CLUSTER_IP_EXTERNAL)?;
        lab.check(&[
            (INGRESS, "tcp S stranger:1000 > web:80", Pass, "tcp S stranger:1000 > pod:8080", "flow_opened forwarded"),
            (INGRESS, "udp stranger:1000 > remote:53", Pass, "udp stranger:$p > far:5353", "flow_opened forwarded"),
            (EGRESS, "udp stranger:$p > far:5353", Pass, "udp uplink:$p > far:5353", ""),
        ])?;
    }
    Ok(())
}

#[test]
fn a_local_policy_serves_clients_outside_from_here_and_others_from_everywhere() -> Result<()> {
    from_outside(&[
        (INGRESS, "tcp S stranger:1000 > near:80", Pass, "tcp S stranger:1000 > pod:8080", "flow_opened forwarded"),
        // All its backends are elsewhere.
        (INGRESS, "tcp S stranger:1000 > distant:80", Drop, "-", "no_local_endpoints"),
        (
            INGRESS,
            "tcp S stranger:1000 > empty:80",
            Redirect,
            "tcp RA empty:80 > stranger:1000",
            "no_endpoints rejected",
        ),
    ])?;
    from_pod(&[
        (INGRESS, "tcp S client:1000 > distant:80", Pass, "tcp S client:1000 > far:8080", "flow_opened forwarded"),
        (ANCHOR, "tcp S node:1000 > distant:80", Redirect, "tcp S uplink:$p > far:8080", "flow_opened forwarded"),
    ])
}

#[test]
fn source_ranges_come_before_everything_else() -> Result<()> {
    from_outside(&[
        (INGRESS, "tcp S stranger:1000 > fenced:80", Pass, "tcp S stranger:1000 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp S burglar:1000 > fenced:80", Drop, "-", "source_range"),
        // Even before the lack of endpoints.
        (INGRESS, "tcp S burglar:1000 > fenced:81", Drop, "-", "source_range"),
        (
            INGRESS,
            "tcp S stranger:1000 > fenced:81",
            Redirect,
            "tcp RA fenced:81 > stranger:1000",
            "no_endpoints rejected",
        ),
        // Only that frontend: the same service's node port is open.
        (INGRESS, "tcp S burglar:1000 > node:30090", Pass, "tcp S burglar:1000 > pod:8080", "flow_opened forwarded"),
    ])?;
    from_pod(&[
        (INGRESS, "tcp S client:1000 > fenced:80", Drop, "-", "source_range"),
        (ANCHOR, "tcp S node:1000 > fenced:80", Drop, "-", "source_range"),
    ])
}

#[test]
fn the_host_reaches_its_own_node_ports_through_lo() -> Result<()> {
    from_pod(&[
        (LO, "tcp S node:1000 > node:30080", Redirect, "tcp S node:$p > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp SA pod:8080 > node:$p", Redirect, "tcp SA node:30080 > node:1000", "returned"),
        (LO, "tcp A node:1000 > node:30080 +7", Redirect, "tcp A node:$p > pod:8080 +7", "forwarded"),
        // Elsewhere: with the address of the way there.
        (LO, "udp node:1000 > node:30053", Redirect, "udp uplink:$q > far:5353", "flow_opened forwarded"),
        (INGRESS, "udp far:5353 > uplink:$q", Redirect, "udp node:30053 > node:1000", "returned"),
        // To itself: on lo all the way.
        (LO, "tcp S node:1001 > node:30443", Redirect, "tcp S node:$s > node:6443", "flow_opened forwarded"),
        (LO, "tcp SA node:6443 > node:$s", Redirect, "tcp SA node:30443 > node:1001", "returned"),
        (LO, "tcp A node:1001 > node:30443", Redirect, "tcp A node:$s > node:6443", "forwarded"),
        // A service address that a device carries: the kernel answers for it with that address, which may move on.
        (LO, "tcp S uplink:1000 > uplink:80", Redirect, "tcp S node:$r > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp SA pod:8080 > node:$r", Redirect, "tcp SA uplink:80 > uplink:1000", "returned"),
        // All else on lo is the host's business.
        (LO, "tcp S node:1000 > node:22", Pass, "same", "not_ours"),
        (LO, "tcp A node:1000 > node:30081", Pass, "same", "no_flow"),
        (LO, "tcp S node:1000 > node:30082", Redirect, "tcp RA node:30082 > node:1000", "no_endpoints rejected"),
    ])
}

#[test]
fn compat_masquerades_where_kube_proxy_does() -> Result<()> {
    for mut lab in outside()? {
        lab.set_flags(Node::COMPAT)?;
        lab.check(&[
            // External frontends under policy Cluster: always.
            (
                INGRESS,
                "tcp S stranger:1000 > node:30080",
                Pass,
                "tcp S stranger:$p > pod:8080",
                "flow_opened forwarded",
            ),
            (EGRESS, "tcp S stranger:$p > pod:8080", Pass, "tcp S node:$p > pod:8080", ""),
            // Not if it goes up to a socket of the host.
            (
                INGRESS,
                "tcp S stranger:1003 > node:30443",
                Pass,
                "tcp S stranger:1003 > node:6443",
                "flow_opened forwarded",
            ),
            // Under policy Local: never from outside.
            (INGRESS, "tcp S stranger:1000 > near:80", Pass, "tcp S stranger:1000 > pod:8080", "flow_opened forwarded"),
            // ClusterIPs serve outsiders, unmasqueraded as long as nobody says what a local pod is ...
            (INGRESS, "tcp S stranger:1004 > web:80", Pass, "tcp S stranger:1004 > pod:8080", "flow_opened forwarded"),
        ])?;
        lab.set_flags(Node::COMPAT | Node::DETECTS4 | Node::DETECTS6)?;
        lab.check(&[
            // ... and else masqueraded.
            (INGRESS, "tcp S stranger:1005 > web:80", Pass, "tcp S stranger:$q > pod:8080", "flow_opened forwarded"),
        ])?;
    }
    for mut lab in pods()? {
        lab.set_flags(Node::COMPAT | Node::DETECTS4 | Node::DETECTS6)?;
        // Behind a pod's device, but not detected as one.
        lab.check(&[(
            INGRESS,
            "tcp S client:1000 > web:80",
            Pass,
            "tcp S client:$p > pod:8080",
            "flow_opened forwarded",
        )])?;
        let detected = Device::new(Device::POD | Device::DETECTED, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        lab.set_device(detected)?;
        lab.check(&[
            (INGRESS, "tcp S client:1001 > web:80", Pass, "tcp S client:1001 > pod:8080", "flow_opened forwarded"),
            (INGRESS, "tcp S client:1001 > node:30080", Pass, "tcp S client:$q > pod:8080", "flow_opened forwarded"),
            // The short-circuit, without masquerading.
            (INGRESS, "tcp S client:1002 > distant:80", Pass, "tcp S client:1002 > far:8080", "flow_opened forwarded"),
        ])?;
    }
    Ok(())
}

#[test]
fn masquerade_all_is_about_cluster_ips() -> Result<()> {
    for mut lab in pods()? {
        lab.set_flags(Node::MASQUERADE_ALL)?;
        lab.check(&[
            (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:$p > pod:8080", "flow_opened forwarded"),
            (EGRESS, "tcp S client:$p > pod:8080", Pass, "tcp S node:$p > pod:8080", ""),
            (INGRESS, "tcp S client:1000 > node:30080", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        ])?;
    }
    Ok(())
}

#[test]
fn a_client_with_affinity_goes_where_it_was() -> Result<()> {
    for lab in pods()? {
        let dial = |client: &str, port: u16| -> Result<String> {
            let frame = lab.names.frame(&format!("tcp S {client}:{port} > sticky:80"))?;
            let text = lab.names.text(&lab.netns.run(|| lab.bench.run(INGRESS, &frame))?.packet)?;
            Ok(text.split_once("> ").context("a destination")?.1.to_owned())
        };
        for client in ["client", "stranger", "burglar"] {
            let first = dial(client, 1)?;
            for port in 2..60 {
                assert_eq!(dial(client, port)?, first, "{client}");
            }
        }
    }
    Ok(())
}

#[test]
fn round_robin_takes_turns_and_least_connections_the_idle_one() -> Result<()> {
    for mut lab in pods()? {
        lab.check(&[
            (INGRESS, "tcp S client:1 > turns:80", Pass, "tcp S client:1 > pod:8080", "flow_opened forwarded"),
            (INGRESS, "tcp S client:2 > turns:80", Pass, "tcp S client:2 > far:8080", "flow_opened forwarded"),
            (INGRESS, "tcp S client:3 > turns:80", Pass, "tcp S client:3 > pod:8080", "flow_opened forwarded"),
            (INGRESS, "tcp S client:4 > turns:80", Pass, "tcp S client:4 > far:8080", "flow_opened forwarded"),
        ])?;
        // Two backends: the one with fewer flows of the two, always.
        let mut served = Vec::new();
        for port in 1..9 {
            let frame = lab.names.frame(&format!("tcp S client:{port} > least:80"))?;
            served.push(lab.names.text(&lab.run(INGRESS, &frame)?.packet)?.contains("> pod:"));
        }
        assert_eq!(served.iter().filter(|pod| **pod).count(), 4, "{served:?}");
        // All flows to one of them end: the next ones go there.
        for (nth, _) in served.iter().enumerate().filter(|(_, pod)| **pod) {
            let frame = lab.names.frame(&format!("tcp R client:{} > least:80", nth + 1))?;
            lab.run(INGRESS, &frame)?;
        }
        for port in 20..24 {
            let (packet, out) = (format!("tcp S client:{port} > least:80"), format!("tcp S client:{port} > pod:8080"));
            let frame = lab.names.frame(&packet)?;
            assert_eq!(lab.names.text(&lab.run(INGRESS, &frame)?.packet)?, out);
        }
    }
    Ok(())
}

#[test]
fn a_udp_flow_leaves_a_backend_that_serves_no_longer() -> Result<()> {
    for mut lab in pods()? {
        lab.check(&[
            (INGRESS, "udp client:1000 > pair:53", Pass, "udp client:1000 > pod:5353", "flow_opened forwarded"),
            (ANCHOR, "udp node:1000 > pair:53", Redirect, "udp node:$p > pod:5353", "flow_opened forwarded"),
        ])?;
        lab.leave("pair", 53, "pod", "far")?;
        lab.check(&[
            (
                INGRESS,
                "udp client:1000 > pair:53",
                Pass,
                "udp client:1000 > far:5353",
                "flow_moved flow_opened forwarded",
            ),
            (
                ANCHOR,
                "udp node:1000 > pair:53",
                Redirect,
                "udp uplink:$q > far:5353",
                "flow_moved flow_opened forwarded",
            ),
            (INGRESS, "udp client:1000 > pair:53", Pass, "udp client:1000 > far:5353", "forwarded"),
            // What the old one still answers belongs to nothing.
            (EGRESS, "udp pod:5353 > client:1000", Pass, "same", "not_ours"),
        ])
        .context("moved")?;
    }
    Ok(())
}

fn from_outside(rows: &[Row]) -> Result<()> {
    outside()?.into_iter().try_for_each(|mut lab| lab.check(rows))
}

fn from_pod(rows: &[Row]) -> Result<()> {
    pods()?.into_iter().try_for_each(|mut lab| lab.check(rows))
}

/// Packets come in through a device that is no pod's.
pub(crate) fn outside() -> Result<Vec<Lab>> {
    outside_with_room(None)
}

pub(crate) fn outside_with_room(flow_entries: Option<u32>) -> Result<Vec<Lab>> {
    let mut labs = pods_with_room(flow_entries)?;
    for lab in &mut labs {
        lab.set_device(Device::new(0, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED))?;
    }
    Ok(labs)
}

/// Packets come in through a pod's device.
pub(crate) fn pods() -> Result<Vec<Lab>> {
    pods_with_room(None)
}

pub(crate) fn pods_with_room(flow_entries: Option<u32>) -> Result<Vec<Lab>> {
    let mut labs = labs_with_room("policy", flow_entries)?;
    labs.iter_mut().try_for_each(Lab::add_frontends)?;
    Ok(labs)
}

impl Lab {
    /// Services of every kind.
    pub(crate) fn add_frontends(&mut self) -> Result<()> {
        self.bench.datapath.node.set_service_cidrs(&["10.96.0.0/16".parse()?, "fd00:10:96::/112".parse()?])?;
        let changes = if self.names.addr("web")?.is_ipv4() {
            frontends::<Addr4>(self)?.into_iter().map(Change::V4).collect::<Vec<_>>()
        } else {
            frontends::<Addr6>(self)?.into_iter().map(Change::V6).collect()
        };
        changes.iter().try_for_each(|change| self.bench.datapath.tables.apply(change))
    }
}
