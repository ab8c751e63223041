//! The maps' view of a node, from devices, objects and flags.

mod addresses;
mod bridges;
mod connections;
mod direct;
mod host;
mod localhost;
mod many;
mod maps;
mod ports;
mod published;
mod ranges;
mod reach;
mod rejections;
mod routes;
mod uplinks;
mod ways;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use proxy_common::device::Node;
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::netns::NetNs;

use maps::own_addresses;

/// The operator's choices of addresses for node ports, and the node's own addresses with them.
const OWN_ADDRESSES: [(&str, &str); 8] = [
    ("", "10.1.0.1* 127.0.0.1* 127.9.0.1 192.0.2.1* fd00::1*"),
    (
        "--iptables-localhost-nodeports=false",
        "10.1.0.1* 127.9.0.1 192.0.2.1* fd00::1*",
    ),
    (
        "--nodeport-addresses 192.0.2.0/24",
        "10.1.0.1 127.9.0.1 192.0.2.1* fd00::1*",
    ),
    (
        "--nodeport-addresses 10.0.0.0/8,2001:db8::/32",
        "10.1.0.1* 127.9.0.1 192.0.2.1 fd00::1",
    ),
    (
        "--nodeport-addresses 10.0.0.0/8,0.0.0.0/0,fd00::/64",
        "10.1.0.1* 127.0.0.1* 127.9.0.1 192.0.2.1* fd00::1*",
    ),
    (
        "--nodeport-addresses primary",
        "10.1.0.1 127.9.0.1 192.0.2.1* fd00::1*",
    ),
    (
        "--nodeport-addresses localhost,10.0.0.0/8",
        "10.1.0.1* 127.0.0.1* 127.9.0.1 192.0.2.1 ::1* fd00::1",
    ),
    (
        "--nodeport-addresses primary --node-ip 10.1.0.1",
        "10.1.0.1* 127.9.0.1 192.0.2.1 fd00::1*",
    ),
];

const FLAGS: [u32; 5] = [
    Node::COMPAT,
    Node::MASQUERADE_ALL,
    Node::CLUSTER_IP_EXTERNAL,
    Node::DETECTS4,
    Node::DETECTS6,
];

/// The maps' view of pods and masquerading with some arguments.
struct Flagged {
    arguments: &'static str,
    flags: [bool; 5],
    pods: &'static [&'static str],
    detected: &'static [&'static str],
}

const FLAGGED: [Flagged; 8] = [
    Flagged {
        arguments: "",
        flags: [false, false, true, false, false],
        pods: &[],
        detected: &[],
    },
    Flagged {
        arguments: "--masquerade compat",
        flags: [true, false, true, false, false],
        pods: &[],
        detected: &[],
    },
    Flagged {
        arguments: "--masquerade-all --cluster-ip-external=false",
        flags: [false, true, false, false, false],
        pods: &[],
        detected: &[],
    },
    Flagged {
        arguments: "--cluster-cidr 10.244.7.7/16",
        flags: [false, false, true, true, false],
        pods: &["10.244.0.0/16", "10.244.1.0/24"],
        detected: &[],
    },
    Flagged {
        arguments: "--cluster-cidr fd00:1::/64,10.244.0.0/16",
        flags: [false, false, true, true, true],
        pods: &["10.244.0.0/16", "10.244.1.0/24", "fd00:1::/64"],
        detected: &[],
    },
    Flagged {
        arguments: "--detect-local-mode NodeCIDR",
        flags: [false, false, true, true, false],
        pods: &["10.244.1.0/24"],
        detected: &[],
    },
    Flagged {
        arguments: "--detect-local-mode BridgeInterface --pod-bridge-interface cni0",
        flags: [false, false, true, true, true],
        pods: &[],
        detected: &["cni0", "veth0"],
    },
    Flagged {
        arguments: "--detect-local-mode InterfaceNamePrefix --pod-interface-name-prefix eth",
        flags: [false, false, true, true, true],
        pods: &[],
        detected: &["eth0"],
    },
];

/// Each start has a row of both tables, whose arguments have no effect on each other.
#[test]
fn own_addresses_and_flags_are_those_of_the_arguments() -> Result<()> {
    let node = NetNs::machine("flags")?;
    let pod = NetNs::create(format!("kpx-{}-flags-pod", std::process::id()))?;
    node.ip(&format!(
        "addr add 127.9.0.1/32 dev lo scope global
         link add cni0 type bridge
         addr add 10.1.0.1/16 dev cni0
         link add veth0 type veth peer name eth0 netns {}
         link set veth0 master cni0
         link set veth0 up
         link set cni0 up",
        pod.name()
    ))?;
    // kpx finds the node's primary addresses itself.
    let n1 = N1.replace("{ type: InternalIP, address: 192.0.2.1 }", "");
    for ((of_addresses, own), flagged) in OWN_ADDRESSES.into_iter().zip(FLAGGED) {
        let arguments = format!("{of_addresses} {}", flagged.arguments);
        let kpx = Agent::start_alone(&node, &[("n1", &n1)], &arguments)?.healthy()?;
        let found = own_addresses(&kpx)?.join(" ");
        ensure!(found == own, "{arguments}: {found}, not {own}");
        let found = (
            maps::flags(&kpx, FLAGS)?,
            maps::nets(&kpx, "PODS")?,
            maps::detected(&kpx)?,
        );
        ensure!(
            found.0 == flagged.flags && found.1 == flagged.pods && found.2 == flagged.detected,
            "{arguments}: {found:?}"
        );
        kpx.stop()?;
    }
    Ok(())
}

#[test]
fn maps_follow_devices_and_objects() -> Result<()> {
    let node = &NetNs::machine("follow")?;
    let arguments = "--nodeport-addresses 192.0.2.0/24";
    let agent = Agent::start_alone(node, &[("web", WEB)], arguments)?.healthy()?;
    let running = Running {
        fixture: node,
        agent,
    };
    testbed::cases!(
        &running;
        own_addresses_follow_the_devices,
        ranges_of_cluster_ips_are_those_of_the_objects,
    )?;
    running.agent.stop()
}

fn own_addresses_follow_the_devices(running: &Running<NetNs>) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    let mut delays = Vec::new();
    for _ in 0..3 {
        node.ip("addr add 192.0.2.2/24 dev eth0")?;
        let since = Instant::now();
        wait_until(DEADLINE, "the new address takes node ports", || {
            Ok(own_addresses(kpx)?.contains(&"192.0.2.2*".to_owned()))
        })?;
        delays.push(since.elapsed());
        node.ip("addr del 192.0.2.2/24 dev eth0")?;
        wait_until(DEADLINE, "the address is forgotten", || {
            Ok(!own_addresses(kpx)?.contains(&"192.0.2.2*".to_owned()))
        })?;
    }
    delays.sort();
    // The queries take most of this time.
    ensure!(delays[1] < Duration::from_secs(2), "after {delays:?}");
    Ok(())
}

fn ranges_of_cluster_ips_are_those_of_the_objects(running: &Running<NetNs>) -> Result<()> {
    let kpx = &running.agent;
    ensure!(
        maps::nets(kpx, "SERVICE_CIDRS")?.is_empty(),
        "no object or flag names one"
    );
    let are = |want: &[&str]| {
        wait_until(DEADLINE, &format!("{want:?}"), || {
            Ok(maps::nets(kpx, "SERVICE_CIDRS")? == want)
        })
    };
    kpx.put("cidr", SERVICE_CIDR)?;
    are(&["10.96.0.0/16", "fd00:10::/108"])?;
    kpx.put("cidr", &SERVICE_CIDR.replace(", fd00:10::/108", ""))?;
    are(&["10.96.0.0/16"])?;
    kpx.delete("cidr")?;
    are(&[])
}

#[test]
fn operator_names_the_primary_address_and_the_range_of_cluster_ips() -> Result<()> {
    let node = &NetNs::machine("primary")?;
    let agent = Agent::start_alone(
        node,
        &[("n1", N1), ("web", WEB), ("cidr", SERVICE_CIDR)],
        "--nodeport-addresses primary --service-cidr 10.96.0.0/12",
    )?
    .healthy()?;
    let running = Running {
        fixture: node,
        agent,
    };
    testbed::cases!(
        &running;
        ranges_of_cluster_ips_are_those_of_the_operator,
        the_primary_address_takes_its_node_ports_along,
    )?;
    running.agent.stop()
}

fn ranges_of_cluster_ips_are_those_of_the_operator(running: &Running<NetNs>) -> Result<()> {
    ensure!(maps::nets(&running.agent, "SERVICE_CIDRS")? == ["10.96.0.0/12"]);
    Ok(())
}

fn the_primary_address_takes_its_node_ports_along(running: &Running<NetNs>) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    let are = |want: &str| wait_until(DEADLINE, want, || Ok(own_addresses(kpx)?.join(" ") == want));
    are("192.0.2.1* fd00::1*")?;
    node.ip("addr add 192.0.2.7/24 dev eth0")?;
    are("192.0.2.1* 192.0.2.7 fd00::1*")?;
    kpx.put("n1", &N1.replace("192.0.2.1", "192.0.2.7"))?;
    are("192.0.2.1 192.0.2.7* fd00::1*")?;
    kpx.put("n1", N1)?;
    node.ip("addr del 192.0.2.7/24 dev eth0")?;
    are("192.0.2.1* fd00::1*")
}

#[test]
fn pod_cidrs_are_waited_for_and_their_change_ends_kpx() -> Result<()> {
    let node = NetNs::machine("podcidr")?;
    let without = N1
        .replace("podCIDRs: [10.244.1.0/24]", "{}")
        .replace("spec: { {} }", "spec: {}");
    let mut kpx = Agent::start_alone(
        &node,
        &[("n1", &without), ("web", WEB)],
        "--detect-local-mode NodeCIDR",
    )?;
    wait_until(DEADLINE, "kpx says what it waits for", || {
        Ok(kpx
            .problem("local pods")?
            .is_some_and(|why| why.contains("no podCIDRs yet")))
    })?;
    let status = kpx.typed_status()?;
    ensure!(
        status.complete && !status.healthy && status.syncs == 0,
        "{status:?}"
    );
    ensure!(maps::nets(&kpx, "PODS")?.is_empty() && maps::nets(&kpx, "SERVICE_CIDRS")?.is_empty());

    kpx.put("n1", N1)?;
    wait_until(DEADLINE, "kpx is healthy", || {
        Ok(kpx.typed_status()?.healthy)
    })?;
    ensure!(maps::nets(&kpx, "PODS")? == ["10.244.1.0/24"] && kpx.typed_status()?.syncs == 1);

    kpx.put("n1", &N1.replace("10.244.1.0", "10.244.2.0"))?;
    let end = kpx.ended(DEADLINE)?;
    ensure!(end.code() == Some(1), "{end}");
    ensure!(
        kpx.log()
            .contains("podCIDRs have changed from [10.244.1.0/24] to [10.244.2.0/24]"),
        "{}",
        kpx.log()
    );
    Ok(())
}

const N1: &str = "
apiVersion: v1
kind: Node
metadata: { name: n1 }
spec: { podCIDRs: [10.244.1.0/24] }
status: { addresses: [{ type: InternalIP, address: 192.0.2.1 }] }
";

const WEB: &str = "
apiVersion: v1
kind: Service
metadata: { name: web }
spec:
  clusterIP: 10.96.0.10
  ports: [{ port: 80 }]
";

const SERVICE_CIDR: &str = "
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: { name: kubernetes }
spec: { cidrs: [10.96.0.0/16, fd00:10::/108] }
";
