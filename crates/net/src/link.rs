//! Reads a network device from the kernel's description.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::LazyLock;

use anyhow::Context;
use futures::StreamExt;
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{
    InfoKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::ifaddrs::getifaddrs;
use nix::sys::utsname::uname;

use super::kernel;
use super::netlink::Handle;
use super::role::FarEnd;

/// The device to which kube-proxy's mode ipvs assigns all ClusterIPs.
pub const KUBE_IPVS0: &str = "kube-ipvs0";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// The MAC address; `None` if there is none of Ethernet's length.
    pub mac: Option<[u8; 6]>,
    /// The MTU in bytes, without the link header.
    pub mtu: u32,
    pub kind: LinkKind,
    pub header: LinkHeader,
    /// The interface index of the bridge, bond or other master.
    pub master: Option<u32>,
    /// True if the linked device (a veth's other end, a VLAN's parent) is in another network
    /// namespace.
    pub peer_netns: bool,
    /// True if outgoing packets are queued or shaped (any qdisc except `noqueue`).
    pub queues: bool,
    /// True if the device is administratively up (`IFF_UP`), with or without carrier.
    pub up: bool,
    /// The usable global addresses: duplicate address detection has passed or does not apply.
    pub addrs: BTreeSet<IpNet>,
    /// The hosts behind the device, if routes decide the device's role: see
    /// [`Link::is_told_by_routes`].
    pub far_end: FarEnd,
    /// True if another program may have a filter at the ingress hook.
    pub filtered: bool,
    /// True if another program may have a clsact filter at the egress hook.
    pub filtered_out: bool,
    /// True if another program's qdisc without an egress hook is in the place of clsact.
    pub lacks_egress: bool,
}

/// The link header of a device's packets, by hardware type (linux/if_arp.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkHeader {
    Ethernet,
    /// Packets start with the IP header: tun, WireGuard, IPIP, SIT, PPP, raw IP.
    None,
    /// Any other link header.
    Other,
}

impl LinkHeader {
    fn of(kind: LinkLayerType) -> Self {
        match kind {
            LinkLayerType::Ether => Self::Ethernet,
            LinkLayerType::None | LinkLayerType::Ppp | LinkLayerType::Rawip => Self::None,
            LinkLayerType::Tunnel | LinkLayerType::Tunnel6 | LinkLayerType::Sit
                if tunnels_hide_outer_headers() =>
            {
                Self::None
            }
            // Includes GRE, whose packets have another header if no remote address is configured.
            _ => Self::Other,
        }
    }
}

/// Returns true if packets from an IP tunnel start with the inner header: from Linux 5.14 on.
pub fn tunnels_hide_outer_headers() -> bool {
    static FROM_5_14: LazyLock<bool> = LazyLock::new(|| {
        let release = uname()
            .map(|uname| uname.release().to_string_lossy().into_owned())
            .unwrap_or_default();
        kernel::version(&release).is_none_or(|version| version >= (5, 14))
    });
    *FROM_5_14
}

/// Returns the names of this network namespace's devices without a link header.
///
/// Includes devices without a link address (a CAN bus), which getifaddrs does not distinguish.
pub fn headerless() -> anyhow::Result<HashSet<String>> {
    let mut names = HashSet::new();
    let mut others = HashSet::new();
    for entry in getifaddrs().context("list the devices and their addresses")? {
        let address = entry
            .address
            .as_ref()
            .and_then(|address| address.as_link_addr());
        if address
            .is_some_and(|address| LinkHeader::of(address.hatype().into()) != LinkHeader::None)
        {
            others.insert(entry.interface_name.clone());
        }
        names.insert(entry.interface_name);
    }
    Ok(names.difference(&others).cloned().collect())
}

/// The kind of a device. kpx distinguishes only these kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    Loopback,
    /// A network card, real or emulated.
    Physical,
    Veth,
    /// A pair like veth, designed for containers.
    Netkit,
    /// A bridge or an Open vSwitch device.
    Bridge,
    /// A bond or a team device.
    Bond,
    Vlan,
    /// A VXLAN or GENEVE device.
    Overlay,
    /// A macvlan: it has its own link address, and its parent receives its frames first.
    Macvlan,
    /// An IPsec interface (xfrm, VTI). The kernel puts the outer link header in front of decrypted
    /// packets.
    Ipsec,
    Dummy,
    Ifb,
    Nlmon,
    Other,
}

impl Link {
    /// Reads a device. Its addresses come in separate messages. Returns `None` if the message
    /// concerns another aspect, such as a bridge port.
    pub(super) fn from_message(message: &LinkMessage) -> Option<Self> {
        if message.header.interface_family != AddressFamily::Unspec {
            return None;
        }
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            mac: None,
            mtu: 0,
            kind: match message.header.link_layer_type {
                LinkLayerType::Loopback => LinkKind::Loopback,
                LinkLayerType::Ether => LinkKind::Physical,
                _ => LinkKind::Other,
            },
            header: LinkHeader::of(message.header.link_layer_type),
            master: None,
            peer_netns: false,
            queues: false,
            up: message.header.flags.contains(LinkFlags::Up),
            addrs: BTreeSet::new(),
            far_end: FarEnd::Nothing,
            filtered: false,
            filtered_out: false,
            lacks_egress: false,
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::Controller(master) => {
                    link.master = Some(*master).filter(|&master| master != 0)
                }
                LinkAttribute::LinkNetNsId(_) => link.peer_netns = true,
                LinkAttribute::Qdisc(name) => link.queues = name != "noqueue",
                LinkAttribute::LinkInfo(infos) => {
                    link.kind = infos.iter().find_map(kind).unwrap_or(link.kind)
                }
                _ => {}
            }
        }
        Some(link).filter(|link| !link.name.is_empty())
    }

    /// Returns true for a pair with its other end in another namespace.
    pub fn leads_elsewhere(&self) -> bool {
        matches!(self.kind, LinkKind::Veth | LinkKind::Netkit) && self.peer_netns
    }

    /// Returns true if only routes show whether pods or a router are behind the device.
    pub fn is_told_by_routes(&self) -> bool {
        let may_be_pods = self.leads_elsewhere() || self.kind == LinkKind::Macvlan;
        may_be_pods && !self.addrs.is_empty() || self.kind == LinkKind::Bridge
    }

    /// Returns true for a veth with its other end in another network namespace, if no qdisc delays
    /// or changes packets.
    pub fn is_plain_pair(&self) -> bool {
        self.kind == LinkKind::Veth && self.peer_netns && !self.queues
    }

    pub fn has(&self, addr: IpAddr) -> bool {
        self.addrs.iter().any(|net| net.addr() == addr)
    }
}

fn kind(info: &LinkInfo) -> Option<LinkKind> {
    let LinkInfo::Kind(kind) = info else {
        return None;
    };
    Some(match kind {
        InfoKind::Veth => LinkKind::Veth,
        InfoKind::Netkit => LinkKind::Netkit,
        InfoKind::Bridge => LinkKind::Bridge,
        InfoKind::Bond | InfoKind::Team => LinkKind::Bond,
        InfoKind::Vlan => LinkKind::Vlan,
        InfoKind::MacVlan => LinkKind::Macvlan,
        InfoKind::Vxlan | InfoKind::Geneve => LinkKind::Overlay,
        InfoKind::Xfrm | InfoKind::Vti | InfoKind::Vti6 => LinkKind::Ipsec,
        InfoKind::Dummy => LinkKind::Dummy,
        InfoKind::Ifb => LinkKind::Ifb,
        InfoKind::Nlmon => LinkKind::Nlmon,
        InfoKind::Other(kind) if kind == "openvswitch" => LinkKind::Bridge,
        _ => LinkKind::Other,
    })
}

/// Returns the interface index and the global address in a message, and whether the address is
/// usable.
pub(super) fn address(message: &AddressMessage) -> Option<(u32, IpNet, bool)> {
    if message.header.scope != AddressScope::Universe {
        return None;
    }
    // On a point-to-point device IFA_ADDRESS is the peer's address; on other devices IPv6 has no
    // IFA_LOCAL.
    let local = message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            AddressAttribute::Local(addr) => Some(*addr),
            _ => None,
        });
    let addr = local.or_else(|| {
        message
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                AddressAttribute::Address(addr) => Some(*addr),
                _ => None,
            })
    })?;
    let flags = message.header.flags;
    let waits = flags.contains(AddressHeaderFlags::Tentative)
        && !flags.contains(AddressHeaderFlags::Optimistic);
    let usable = !waits && !flags.contains(AddressHeaderFlags::Dadfailed);
    Some((
        message.header.index,
        IpNet::new(addr, message.header.prefix_len).ok()?,
        usable,
    ))
}

/// Returns the request for all devices, without statistics.
pub(super) fn get_all() -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message
        .attributes
        .push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    RouteNetlinkMessage::GetLink(message)
}

/// Returns the kernel's message about a device; `None` if there is no such device.
pub(super) async fn get(
    handle: &Handle,
    mut which: LinkMessage,
) -> anyhow::Result<Option<LinkMessage>> {
    which
        .attributes
        .push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetLink(which));
    request.header.flags = NLM_F_REQUEST;
    match handle
        .clone()
        .request(request)?
        .next()
        .await
        .map(|answer| answer.payload)
    {
        Some(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message))) => {
            Ok(Some(message))
        }
        Some(NetlinkPayload::Error(error)) if error.raw_code() == -nix::libc::ENODEV => Ok(None),
        Some(NetlinkPayload::Error(error)) => Err(error.to_io().into()),
        answer => anyhow::bail!("unexpected answer to a request for a device: {answer:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_differ_in_their_link_headers() {
        let of = |kind: u16| LinkHeader::of(kind.into());
        // linux/if_arp.h: Ethernet, none, PPP, GRE, InfiniBand, CAN.
        let kinds = [1, 0xfffe, 512, 778, 32, 280].map(of);
        let [ethernet, none, other] = [LinkHeader::Ethernet, LinkHeader::None, LinkHeader::Other];
        assert_eq!(kinds, [ethernet, none, none, other, other, other]);
    }
}
