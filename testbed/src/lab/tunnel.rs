//! The tunnel of a layout: tun devices, whose packets have no Ethernet header, as those of WireGuard and IPIP have none.
//!
//! A process on each node carries the packets in UDP datagrams to the other node, as a tunnel in user space does.

use std::process::{Child, Command};

use anyhow::Result;

use super::Node;
use super::address::Family;
use crate::agent::{DEADLINE, wait_until};

pub(super) const DEVICE: &str = "tun0";
/// An IP packet in UDP and IPv4 is so many bytes longer.
pub(super) const OVERHEAD: u32 = 28;
/// The UDP port of both ends.
const PORT: u16 = 7_777;

/// One end, which ends with this value.
#[derive(Debug)]
pub(super) struct TunnelEnd(Child);

impl TunnelEnd {
    /// Starts the end of `node`, with a device that leads to the pods of `other`.
    pub(super) fn start(node: &Node, other: &Node, mtu: u32) -> Result<Self> {
        let (ns, own) = (&node.host.ns, node.pod_net.host(0));
        let device = format!("TUN,tun-type=tun,tun-name={DEVICE},iff-no-pi,iff-up");
        // SOL_SOCKET, SO_RCVBUFFORCE and its value in bytes: the rows of a table dial all at once, and nothing may be lost.
        let buffer = "setsockopt=1:33:i16777216";
        let link = format!("UDP-DATAGRAM:{}:{PORT},bind={}:{PORT},{buffer}", other.host.addrs.v4, node.host.addrs.v4);
        let end = Self(ns.spawn(Command::new("socat").args([device, link]))?);
        wait_until(DEADLINE, "the tunnel has a device", || Ok(ns.ip(&format!("link show {DEVICE} up")).is_ok()))?;
        let [to4, to6] = Family::ALL.map(|family| other.pod_net.cidr(family));
        ns.ip(&format!(
            "link set {DEVICE} mtu {mtu} txqueuelen 10000
             addr add {}/32 dev {DEVICE}
             addr add {}/128 dev {DEVICE} nodad
             route add {to4} dev {DEVICE}
             route add {to6} dev {DEVICE}",
            own.v4, own.v6,
        ))?;
        Ok(end)
    }
}

impl Drop for TunnelEnd {
    fn drop(&mut self) {
        // It may have ended with its namespace.
        let _killed = self.0.kill();
        let _ended = self.0.wait();
    }
}
