//! Maintains the anchor, kpx's own veth pair: the near end [`NAME`] and the far end [`PEER`]. A
//! program there handles packets of this host's sockets to Services before they are routed.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, bail};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, CacheInfo};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoVeth, LinkAttribute, LinkMessage,
};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVeth};
use tracing::info;

use super::link::{self, Link, LinkKind};
use super::netlink::Handle;
use super::role::{Role, role};
use super::sysctl;

/// The name of the near end, through which the service routes go.
pub const NAME: &str = "kpx0";
/// The name of the far end. No packet may ever leave it.
pub const PEER: &str = "kpx1";

/// Locally administered addresses: "kpx". All hosts may share these addresses, because no packet
/// leaves the host with them. kpx sets them explicitly: udev later replaces an address that the
/// kernel chose.
const MAC: [u8; 6] = *b"\x02kpx\x00\x00";
const PEER_MAC: [u8; 6] = *b"\x02kpx\x00\x01";

/// The address of the far end: link-local (RFC 3927), so no router forwards it.
const FAR_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 153, 53);

/// The addresses at which kpx listens for packets that it sent to itself. No router forwards the
/// IPv4 dummy address (RFC 7600); the IPv6 address is kpx's own unique local address (RFC 4193).
pub const LISTEN4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
pub const LISTEN6: Ipv6Addr = Ipv6Addr::new(0xfd6b, 0x7078, 0x6b70, 0x7830, 0, 0, 0, 1);

/// The smallest MTU for IPv6 (RFC 8200 section 5).
const MIN_MTU: u32 = 1280;
const DEFAULT_MTU: u32 = 1500;

/// The sysctl that accepts packets with a local source address through lo: the host's packets to
/// backends that are sockets of the host.
const ACCEPT_LOCAL: &str = "ipv4/conf/lo/accept_local";
/// The anchor's alias, followed by the value of [`ACCEPT_LOCAL`] before kpx. The alias lives
/// exactly as long as the anchor, across restarts of the agent, and any user can read it.
const ALIAS: &str = "kpx anchor; before it, net.ipv4.conf.lo.accept_local was ";

/// The sysctl that accepts the host's packets from and to loopback addresses when they return
/// through lo. On any other device it would accept such packets from other machines.
const ROUTE_LOCALNET: &str = "ipv4/conf/lo/route_localnet";
/// The alias of the far end, followed by the value of [`ROUTE_LOCALNET`] before kpx.
const FAR_ALIAS: &str = "kpx anchor; before it, net.ipv4.conf.lo.route_localnet was ";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    pub ifindex: u32,
    pub mac: [u8; 6],
}

/// Returns the smallest MTU of the node's uplinks, in bytes; pods' devices do not count.
pub fn anchor_mtu(links: &BTreeMap<u32, Link>) -> u32 {
    let ways_out = links
        .values()
        .filter(|link| link.up && role(link, links) == Role::Device { pod: false });
    ways_out
        .map(|link| link.mtu)
        .min()
        .unwrap_or(DEFAULT_MTU)
        .max(MIN_MTU)
}

/// Returns true if both ends exist and are up.
pub fn is_up(links: &BTreeMap<u32, Link>) -> bool {
    let ends = links
        .values()
        .filter(|link| link.up && (link.name == NAME || link.name == PEER));
    ends.count() == 2
}

/// What [`ensure`] found and did.
#[derive(Clone, Copy, Debug)]
pub struct Ensured {
    pub anchor: Anchor,
    /// Set if the pair existed before and both ends were up.
    pub was_up: bool,
    /// The number of corrected sysctls.
    pub sysctls: u64,
}

/// Creates the pair, or corrects the existing pair. `mtu` is in bytes. A pair that was up is not set
/// up again: an end that goes down meanwhile stays down until its own event.
pub async fn ensure(handle: &Handle, mtu: u32) -> anyhow::Result<Ensured> {
    let pair = match find(handle).await? {
        Some(pair) => pair,
        None => create(handle).await?,
    };
    if pair.accept_local.is_none() {
        let accept_local = sysctl::read(ACCEPT_LOCAL)?.context("the kernel has no IPv4")?;
        let alias = LinkUnspec::new_with_index(pair.near).alias(format!("{ALIAS}{accept_local}"));
        set(handle, alias)
            .await
            .with_context(|| format!("set the alias of {NAME}"))?;
    }
    let sysctls = set_sysctls()?;
    for (name, index) in [(PEER, pair.far), (NAME, pair.near)] {
        configure(handle, index, mtu, pair.up)
            .await
            .with_context(|| format!("configure {name}"))?;
    }
    Ok(Ensured {
        anchor: Anchor {
            ifindex: pair.near,
            mac: pair.mac,
        },
        was_up: pair.up,
        sysctls,
    })
}

/// Deletes the pair and the routes through it. Does nothing if there is no pair.
pub async fn remove(handle: &Handle) -> anyhow::Result<()> {
    let Some(pair) = find(handle).await? else {
        return Ok(());
    };
    if let Some(accept_local) = &pair.accept_local {
        sysctl::write(ACCEPT_LOCAL, accept_local)?;
    }
    if let Some(route_localnet) = &pair.route_localnet {
        sysctl::write(ROUTE_LOCALNET, route_localnet)?;
    }
    handle
        .link()
        .del(pair.near)
        .execute()
        .await
        .with_context(|| format!("delete {NAME}"))
}

/// Makes lo accept or refuse the host's packets to loopback addresses. Does nothing if there is no
/// pair. Returns the number of sysctls that another program had reset.
pub async fn set_localhost(handle: &Handle, serves: bool) -> anyhow::Result<u64> {
    let Some(pair) = find(handle).await? else {
        return Ok(0);
    };
    let alias = match (serves, &pair.route_localnet) {
        (true, Some(_)) => {
            let old = sysctl::set(ROUTE_LOCALNET, "1")?;
            old.iter()
                .for_each(|old| info!(old, "sysctl {ROUTE_LOCALNET}=1 set"));
            return Ok(old.into_iter().count() as u64);
        }
        (true, None) => format!(
            "{FAR_ALIAS}{}",
            sysctl::read(ROUTE_LOCALNET)?.context("the kernel has no IPv4")?
        ),
        (false, Some(before)) => {
            sysctl::write(ROUTE_LOCALNET, before)?;
            String::new()
        }
        (false, None) => return Ok(0),
    };
    let link = LinkUnspec::new_with_index(pair.far).alias(alias);
    set(handle, link)
        .await
        .with_context(|| format!("set the alias of {PEER}"))?;
    if serves {
        sysctl::write(ROUTE_LOCALNET, "1")?;
    }
    Ok(0)
}

/// Returns the MTU of the pair in bytes; `None` if there is no pair.
pub async fn present_mtu(handle: &Handle) -> anyhow::Result<Option<u32>> {
    Ok(find(handle).await?.map(|pair| pair.mtu))
}

pub async fn exists(handle: &Handle) -> anyhow::Result<bool> {
    Ok(find(handle).await?.is_some())
}

/// Returns the interface index of the far end; `None` if there is no pair.
pub async fn far_end(handle: &Handle) -> anyhow::Result<Option<u32>> {
    Ok(find(handle).await?.map(|pair| pair.far))
}

/// Gives the far end an unreachable address, which the kernel removes together with the pair.
pub async fn address_far_end(handle: &Handle, far_end: u32) -> anyhow::Result<()> {
    match handle
        .address()
        .add(far_end, FAR_ADDRESS.into(), 32)
        .execute()
        .await
    {
        Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -nix::libc::EEXIST => {
            Ok(())
        }
        result => result.with_context(|| format!("add the address {FAR_ADDRESS} to {PEER}")),
    }
}

/// Gives the near end the addresses at which kpx listens, if the pair exists. The kernel uses
/// neither address as the source of other packets, unless no other device has an address.
pub async fn address_listeners(handle: &Handle) -> anyhow::Result<()> {
    let Some(pair) = find(handle).await? else {
        return Ok(());
    };
    let v6 = sysctl::has_ipv6().then_some(IpAddr::from(LISTEN6));
    for ip in [IpAddr::from(LISTEN4)].into_iter().chain(v6) {
        let mut request = handle
            .address()
            .add(pair.near, ip, if ip.is_ipv4() { 32 } else { 128 });
        let message = request.message_mut();
        message.attributes.push(AddressAttribute::Flags(
            AddressFlags::Noprefixroute | AddressFlags::Nodad,
        ));
        if ip.is_ipv6() {
            let mut lifetimes = CacheInfo::default();
            (lifetimes.ifa_preferred, lifetimes.ifa_valid) = (0, u32::MAX);
            message
                .attributes
                .push(AddressAttribute::CacheInfo(lifetimes));
        }
        match request.execute().await {
            Err(rtnetlink::Error::NetlinkError(error))
                if error.raw_code() == -nix::libc::EEXIST => {}
            result => result.with_context(|| format!("add the address {ip} to {NAME}"))?,
        }
    }
    Ok(())
}

struct Pair {
    near: u32,
    far: u32,
    mac: [u8; 6],
    mtu: u32,
    up: bool,
    /// The value of [`ACCEPT_LOCAL`] before the pair; `None` until it is in the alias.
    accept_local: Option<String>,
    /// The value of [`ROUTE_LOCALNET`] before node ports were served at a loopback address; `None`
    /// if no loopback address serves them.
    route_localnet: Option<String>,
}

/// Returns the existing pair, or an error if another device has its name.
async fn find(handle: &Handle) -> anyhow::Result<Option<Pair>> {
    let Some(message) = get(handle, NAME).await? else {
        return Ok(None);
    };
    let near = Link::from_message(&message)
        .with_context(|| format!("{NAME} is not described as a device"))?;
    let mut far = None;
    let mut accept_local = None;
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::Link(peer) => far = Some(*peer),
            LinkAttribute::IfAlias(alias) => {
                accept_local = alias.strip_prefix(ALIAS).map(str::to_owned)
            }
            _ => {}
        }
    }
    let far_message = get(handle, PEER).await?;
    let far_attributes = far_message.iter().flat_map(|message| &message.attributes);
    let route_localnet = far_attributes
        .into_iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::IfAlias(alias) => alias.strip_prefix(FAR_ALIAS).map(str::to_owned),
            _ => None,
        });
    let peer = far_message.as_ref().and_then(Link::from_message);
    if near.kind != LinkKind::Veth
        || near.peer_netns
        || far.is_none()
        || far != peer.as_ref().map(|peer| peer.index)
    {
        bail!(
            "device {NAME} is not the near end of a veth pair {NAME}/{PEER}: rename or delete it"
        );
    }
    let far = far.with_context(|| format!("{NAME} has no peer"))?;
    let mac = near
        .mac
        .with_context(|| format!("{NAME} has no MAC address"))?;
    let up = near.up && peer.is_some_and(|peer| peer.up);
    Ok(Some(Pair {
        near: near.index,
        far,
        mac,
        mtu: near.mtu,
        up,
        accept_local,
        route_localnet,
    }))
}

async fn create(handle: &Handle) -> anyhow::Result<Pair> {
    let far = LinkUnspec::new_with_name(PEER)
        .address(PEER_MAC.to_vec())
        .build();
    let near = LinkVeth::new(NAME, PEER)
        .address(MAC.to_vec())
        .set_info_data(InfoData::Veth(InfoVeth::Peer(far)));
    handle
        .link()
        .add(near.build())
        .execute()
        .await
        .with_context(|| format!("create veth pair {NAME}/{PEER}"))?;
    info!(near = NAME, far = PEER, "anchor created");
    find(handle)
        .await?
        .with_context(|| format!("{NAME} vanished as soon as it was created"))
}

async fn get(handle: &Handle, name: &str) -> anyhow::Result<Option<LinkMessage>> {
    let which = LinkUnspec::new_with_name(name).build();
    link::get(handle, which)
        .await
        .with_context(|| format!("look for device {name}"))
}

/// Configures an end without ARP and IPv6 link-local addresses: the kernel sends nothing through
/// the pair by itself, and every packet in it was routed there.
async fn configure(handle: &Handle, index: u32, mtu: u32, is_up: bool) -> anyhow::Result<()> {
    let mut link = LinkUnspec::new_with_index(index).mtu(mtu).arp(false);
    if sysctl::has_ipv6() {
        let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        link = link.append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(
            vec![mode],
        )]));
    }
    set(handle, link).await?;
    if is_up {
        return Ok(());
    }
    // The device goes up in a second request: in one request, the kernel would bring it up before
    // it reads the address mode.
    set(handle, LinkUnspec::new_with_index(index).up()).await
}

async fn set(handle: &Handle, link: LinkMessageBuilder<LinkUnspec>) -> anyhow::Result<()> {
    Ok(handle.link().set(link.build()).execute().await?)
}

/// Sets the sysctls. Returns the number of corrected sysctls.
fn set_sysctls() -> anyhow::Result<u64> {
    let near4 = |key| (format!("ipv4/conf/{NAME}/{key}"), "1");
    let mut wanted = vec![
        (ACCEPT_LOCAL.to_owned(), "1"),
        near4("forwarding"),
        // With this value rp_filter uses the mark of injected packets: see `rule::Rule::Back`.
        near4("src_valid_mark"),
        // No program handles packets that arrive at the far end. Without forwarding they cannot
        // loop.
        (format!("ipv4/conf/{PEER}/forwarding"), "0"),
    ];
    if sysctl::has_ipv6() {
        let near6 = [
            ("disable_ipv6", "0"),
            ("forwarding", "1"),
            ("accept_ra", "0"),
        ];
        wanted.extend(near6.map(|(key, value)| (format!("ipv6/conf/{NAME}/{key}"), value)));
        wanted.push((format!("ipv6/conf/{PEER}/disable_ipv6"), "1"));
    }
    let mut changed = Vec::new();
    for (key, value) in &wanted {
        changed.extend(sysctl::set(key, value)?.map(|old| format!("{key}={value} (was {old})")));
    }
    if !changed.is_empty() {
        info!(sysctls = changed.join(", "), "sysctls of the anchor set");
    }
    Ok(changed.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::super::role::FarEnd;
    use super::*;
    use crate::link::LinkHeader;

    #[test]
    fn the_narrowest_way_out_sets_the_mtu() {
        let eth = link(1, LinkKind::Physical, 9000);
        let vxlan = link(2, LinkKind::Overlay, 1450);
        let pod = Link {
            peer_netns: true,
            ..link(3, LinkKind::Veth, 1400)
        };
        let down = Link {
            up: false,
            ..link(4, LinkKind::Bridge, 1300)
        };
        let lo = link(5, LinkKind::Loopback, 65536);
        let tiny = link(6, LinkKind::Overlay, 576);
        let cases: [(&str, &[&Link], u32); 5] = [
            ("no device", &[], 1500),
            ("only lo", &[&lo], 1500),
            ("jumbo frames", &[&lo, &eth], 9000),
            (
                "an overlay; pods and devices that are down do not count",
                &[&eth, &vxlan, &pod, &down],
                1450,
            ),
            ("never below what IPv6 needs", &[&eth, &tiny], 1280),
        ];
        for (name, links, mtu) in cases {
            let links = links
                .iter()
                .map(|&link| (link.index, link.clone()))
                .collect();
            assert_eq!(anchor_mtu(&links), mtu, "{name}");
        }
    }

    fn link(index: u32, kind: LinkKind, mtu: u32) -> Link {
        let name = format!("dev{index}");
        let addrs = [].into();
        Link {
            index,
            name,
            mac: None,
            mtu,
            kind,
            header: LinkHeader::Ethernet,
            master: None,
            peer_netns: false,
            queues: false,
            up: true,
            addrs,
            far_end: FarEnd::Nothing,
            filtered: false,
            filtered_out: false,
            lacks_egress: false,
        }
    }
}
