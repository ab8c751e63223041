//! A network device as the kernel describes it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use futures::StreamExt;
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{
    InfoKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::netlink::Handle;
use super::role::Behind;

/// A device and its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// None if the device has none, or one of another length than Ethernet's.
    pub mac: Option<[u8; 6]>,
    /// Bytes, without the link header.
    pub mtu: u32,
    pub kind: LinkKind,
    /// Its packets start with an Ethernet header (`ARPHRD_ETHER`).
    pub ethernet: bool,
    /// Interface index of the bridge, bond, ... that it is enslaved to.
    pub master: Option<u32>,
    /// The device it is tied to (a veth's other end, a VLAN's parent) lies in another network namespace.
    pub peer_netns: bool,
    /// What leaves waits in a queue, or is shaped (any queueing discipline but `noqueue`).
    pub queues: bool,
    /// Administratively up (`IFF_UP`), with or without carrier.
    pub up: bool,
    /// Those of global scope that may be used: neither under duplicate address detection nor found to be duplicates.
    pub addrs: BTreeSet<IpNet>,
    /// As far as they decide what it is to kpx, see [`Link::is_told_by_routes`].
    pub behind: Behind,
}

/// What is behind a device, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    Loopback,
    /// A network card, or what a hypervisor shows as one.
    Physical,
    Veth,
    /// A pair as veth is, made for containers.
    Netkit,
    /// Also a device of Open vSwitch.
    Bridge,
    /// Also the team driver's.
    Bond,
    Vlan,
    /// VXLAN and GENEVE.
    Overlay,
    Dummy,
    Ifb,
    Nlmon,
    Other,
}

impl Link {
    /// Without addresses: they come in messages of their own. None if the message is not about a device as such but,
    /// for instance, about its being a port of a bridge.
    pub(super) fn from_message(message: &LinkMessage) -> Option<Self> {
        if message.header.interface_family != AddressFamily::Unspec {
            return None;
        }
        let ethernet = message.header.link_layer_type == LinkLayerType::Ether;
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
            ethernet,
            master: None,
            peer_netns: false,
            queues: false,
            up: message.header.flags.contains(LinkFlags::Up),
            addrs: BTreeSet::new(),
            behind: Behind::Nothing,
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::Controller(master) => link.master = Some(*master).filter(|&master| master != 0),
                LinkAttribute::LinkNetNsId(_) => link.peer_netns = true,
                LinkAttribute::Qdisc(name) => link.queues = name != "noqueue",
                LinkAttribute::LinkInfo(infos) => link.kind = infos.iter().find_map(kind).unwrap_or(link.kind),
                _ => {}
            }
        }
        Some(link).filter(|link| !link.name.is_empty())
    }

    /// One end of a pair whose other end is in another namespace.
    pub fn leads_elsewhere(&self) -> bool {
        matches!(self.kind, LinkKind::Veth | LinkKind::Netkit) && self.peer_netns
    }

    /// Only routes say whether a pod is at its other end, or a router.
    pub fn is_told_by_routes(&self) -> bool {
        self.leads_elsewhere() && !self.addrs.is_empty()
    }

    /// One end of a pair whose other end is in another namespace, and nothing is done to packets on their way there.
    pub fn is_plain_pair(&self) -> bool {
        self.kind == LinkKind::Veth && self.peer_netns && !self.queues
    }

    pub fn has(&self, addr: IpAddr) -> bool {
        self.addrs.iter().any(|net| net.addr() == addr)
    }
}

fn kind(info: &LinkInfo) -> Option<LinkKind> {
    let LinkInfo::Kind(kind) = info else { return None };
    Some(match kind {
        InfoKind::Veth => LinkKind::Veth,
        InfoKind::Netkit => LinkKind::Netkit,
        InfoKind::Bridge => LinkKind::Bridge,
        InfoKind::Bond | InfoKind::Team => LinkKind::Bond,
        InfoKind::Vlan => LinkKind::Vlan,
        InfoKind::Vxlan | InfoKind::Geneve => LinkKind::Overlay,
        InfoKind::Dummy => LinkKind::Dummy,
        InfoKind::Ifb => LinkKind::Ifb,
        InfoKind::Nlmon => LinkKind::Nlmon,
        InfoKind::Other(kind) if kind == "openvswitch" => LinkKind::Bridge,
        _ => LinkKind::Other,
    })
}

/// The device and the address of global scope that a message is about, and whether that address may be used.
pub(super) fn address(message: &AddressMessage) -> Option<(u32, IpNet, bool)> {
    if message.header.scope != AddressScope::Universe {
        return None;
    }
    // On a point-to-point device IFA_ADDRESS is the far end's; elsewhere IPv6 has no IFA_LOCAL.
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(addr) => Some(*addr),
        _ => None,
    });
    let addr = local.or_else(|| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(addr) => Some(*addr),
            _ => None,
        })
    })?;
    let flags = message.header.flags;
    let waits = flags.contains(AddressHeaderFlags::Tentative) && !flags.contains(AddressHeaderFlags::Optimistic);
    let usable = !waits && !flags.contains(AddressHeaderFlags::Dadfailed);
    Some((message.header.index, IpNet::new(addr, message.header.prefix_len).ok()?, usable))
}

/// The request for all devices, without their statistics.
pub(super) fn get_all() -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    RouteNetlinkMessage::GetLink(message)
}

/// The kernel's message about one device; None if there is no such device.
pub(super) async fn get(handle: &Handle, mut which: LinkMessage) -> anyhow::Result<Option<LinkMessage>> {
    which.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetLink(which));
    request.header.flags = NLM_F_REQUEST;
    match handle.clone().request(request)?.next().await.map(|answer| answer.payload) {
        Some(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message))) => Ok(Some(message)),
        Some(NetlinkPayload::Error(error)) if error.raw_code() == -nix::libc::ENODEV => Ok(None),
        Some(NetlinkPayload::Error(error)) => Err(error.to_io().into()),
        answer => anyhow::bail!("unexpected answer to a request for a device: {answer:?}"),
    }
}
