//! The tunnel of a layout: devices between the two nodes that carry packets without an Ethernet
//! header.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context, Result};

use super::address::Family;
use super::{Host, LINK_MTU, Node};
use crate::agent::{DEADLINE, wait_until};
use crate::netns::check;

/// The type of both tunnel devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelKind {
    /// A tun device with a process that carries its packets in UDP, like user-space tunnels.
    Tun,
    /// The kernel's WireGuard, as in k3s, Calico and flannel. Kernels of build machines often lack
    /// it.
    WireGuard,
    /// The kernel's IP in IPv6, for both families. It belongs to the IPIP drivers; IPIP itself
    /// carries only IPv4.
    Ip6Tnl,
}

pub(super) const DEVICE: &str = "tun0";
/// The bytes that UDP and IPv4 add to an IP packet.
const OVERHEAD: u32 = 28;
/// The MTU of the second link below a kernel tunnel, in bytes; every pod packet fits.
const UNDERLAY_MTU: u32 = 1_600;
/// The UDP port of both ends.
const PORT: u16 = 7_777;

impl TunnelKind {
    /// Returns the MTU of pods behind the tunnel, in bytes.
    pub(super) fn mtu(self) -> u32 {
        match self {
            Self::Tun => LINK_MTU - OVERHEAD,
            Self::WireGuard | Self::Ip6Tnl => LINK_MTU,
        }
    }
}

/// The process of an end, which is killed with this value.
#[derive(Debug)]
pub(super) struct TunnelEnd(Child);

/// Creates a tunnel from each node to the other's pods. Files of the lab go to `dir`.
pub(super) fn make(
    kind: TunnelKind,
    nodes: [&Node; 2],
    fabric: &Host,
    dir: &Path,
) -> Result<Vec<TunnelEnd>> {
    let [first, second] = nodes;
    let mtu = kind.mtu();
    let ends = [(first, second), (second, first)];
    if kind != TunnelKind::Tun {
        for node in nodes {
            node.host
                .ns
                .ip(&format!("link set eth1 mtu {UNDERLAY_MTU}"))?;
            fabric
                .ns
                .ip(&format!("link set {}-1 mtu {UNDERLAY_MTU}", node.host.name))?;
        }
    }
    let mut processes = Vec::new();
    for (node, other) in ends {
        match kind {
            TunnelKind::Tun => processes.push(tun(node, other)?),
            TunnelKind::WireGuard => wireguard(node, other, dir)?,
            TunnelKind::Ip6Tnl => ip6tnl(node, other)?,
        }
        let own = node.pod_net.host(0);
        let [to4, to6] = Family::ALL.map(|family| other.pod_net.cidr(family));
        node.host.ns.ip(&format!(
            "link set {DEVICE} mtu {mtu} txqueuelen 10000 up
             addr add {}/32 dev {DEVICE}
             addr add {}/128 dev {DEVICE} nodad
             route add {to4} dev {DEVICE}
             route add {to6} dev {DEVICE}",
            own.v4, own.v6,
        ))?;
    }
    Ok(processes)
}

fn tun(node: &Node, other: &Node) -> Result<TunnelEnd> {
    let ns = &node.host.ns;
    let device = format!("TUN,tun-type=tun,tun-name={DEVICE},iff-no-pi");
    // SOL_SOCKET, SO_RCVBUFFORCE and its value in bytes: many tests dial at once, and no packet may
    // be lost.
    let buffer = "setsockopt=1:33:i16777216";
    let link = format!(
        "UDP-DATAGRAM:{}:{PORT},bind={}:{PORT},{buffer}",
        other.host.addrs.v4, node.host.addrs.v4
    );
    let end = TunnelEnd(ns.spawn(Command::new("socat").args([device, link]))?);
    wait_until(DEADLINE, "the tunnel has a device", || {
        Ok(ns.ip(&format!("link show {DEVICE}")).is_ok())
    })?;
    Ok(end)
}

fn ip6tnl(node: &Node, other: &Node) -> Result<()> {
    let local = node.second.v6;
    let remote = other.second.v6;
    node.host.ns.ip(&format!(
        "link add {DEVICE} type ip6tnl mode any local {local} remote {remote} encaplimit none"
    ))
}

fn wireguard(node: &Node, other: &Node, dir: &Path) -> Result<()> {
    let [own, peer] = [node, other].map(|node| dir.join(node.host.name));
    let [_, peer] = [public_key(&own)?, public_key(&peer)?];
    node.host
        .ns
        .ip(&format!("link add {DEVICE} type wireguard"))?;
    let mut set = Command::new("wg");
    set.args([
        "set",
        DEVICE,
        "listen-port",
        &PORT.to_string(),
        "private-key",
    ])
    .arg(own);
    let endpoint = format!("{}:{PORT}", other.second.v4);
    set.args([
        "peer",
        &peer,
        "endpoint",
        &endpoint,
        "allowed-ips",
        "0.0.0.0/0,::/0",
    ]);
    node.host.ns.exec(&mut set).map(drop)
}

/// Returns the public key of the private key in a file, which is created if missing.
fn public_key(file: &Path) -> Result<String> {
    if !file.exists() {
        let private = check(Command::new("wg").arg("genkey").output(), "wg genkey")?;
        fs::write(file, private).with_context(|| format!("write {}", file.display()))?;
    }
    let stdin = File::open(file).with_context(|| format!("open {}", file.display()))?;
    Ok(check(
        Command::new("wg").arg("pubkey").stdin(stdin).output(),
        "wg pubkey",
    )?
    .trim()
    .to_owned())
}

impl Drop for TunnelEnd {
    fn drop(&mut self) {
        // It may have ended with its namespace.
        let _killed = self.0.kill();
        let _ended = self.0.wait();
    }
}
