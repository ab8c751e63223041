//! Maintains the tunnel devices by which nodes hand packets of external clients over. The programs
//! choose the addressee of each packet (collect metadata), so one device of a family serves all nodes.

use anyhow::{Context, bail};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoIpTunnel, InfoKind, LinkAttribute,
    LinkInfo,
};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};
use tracing::info;

use super::link::{self, Link, LinkKind};
use super::netlink::Handle;
use super::sysctl;

/// The devices for IPv4 packets in IPv4, and for IPv6 packets in IPv6.
pub const NAMES: [&str; 2] = ["kpx-ipip", "kpx-ip6ip6"];

/// The kernel's own devices of both kinds. While one is up, another program uses it for packets that
/// no other tunnel matches, which a device of kpx would take away.
const FALLBACKS: [&str; 2] = ["tunl0", "ip6tnl0"];

/// The longest packet that fits both headers. The device limits no packet: the route to the other
/// node does.
const MTU: u32 = 65_495;

/// Returns the reason why this host must not have the devices.
pub fn obstacle<'a>(mut links: impl Iterator<Item = &'a Link>) -> Option<String> {
    let other = links.find(|link| link.up && FALLBACKS.contains(&&*link.name))?;
    Some(format!(
        "device {} is up: another program has its tunnels there, and kpx's would take its packets",
        other.name
    ))
}

/// Returns the interface indexes of the devices that exist, as [`ensure`] does; `None` unless all do.
pub fn known<'a>(links: impl Iterator<Item = &'a Link>) -> Option<[u32; 2]> {
    let mut known = [0; 2];
    for link in links.filter(|link| link.kind == LinkKind::Other) {
        if let Some(nth) = NAMES.iter().position(|name| *name == &*link.name) {
            known[nth] = link.index;
        }
    }
    let has_all = known[0] != 0 && (known[1] != 0 || !sysctl::has_ipv6());
    has_all.then_some(known)
}

/// Creates the devices, or corrects them. New devices are down: see [`set_up`]. Returns the interface
/// indexes for IPv4 and IPv6; 0 for IPv6 on a host without it.
pub async fn ensure(handle: &Handle) -> anyhow::Result<[u32; 2]> {
    let v4 = device(handle, NAMES[0], InfoKind::IpIp).await?;
    let v6 = if sysctl::has_ipv6() {
        device(handle, NAMES[1], InfoKind::Ip6Tnl).await?
    } else {
        0
    };
    Ok([v4, v6])
}

/// Brings a device up, or down. A device takes every sender's packets while it is up, so it is up only
/// while it carries the program that checks them.
pub async fn set_up(handle: &Handle, index: u32, is_up: bool) -> anyhow::Result<()> {
    let link = LinkUnspec::new_with_index(index);
    let link = if is_up { link.up() } else { link.down() };
    let set = handle.link().set(link.build()).execute().await;
    set.with_context(|| {
        let word = if is_up { "up" } else { "down" };
        format!("bring the tunnel device {index} {word}")
    })
}

/// Brings the devices of an earlier agent down: without their program they take every sender's
/// packets. Returns true if one of them exists.
pub async fn shut(handle: &Handle) -> anyhow::Result<bool> {
    let mut exists = false;
    for name in NAMES {
        if let Some((link, true)) = find(handle, name).await? {
            exists = true;
            set_up(handle, link.index, false).await?;
        }
    }
    Ok(exists)
}

/// Returns true if one of the devices exists.
pub async fn exists(handle: &Handle) -> anyhow::Result<bool> {
    for name in NAMES {
        if matches!(find(handle, name).await?, Some((_, true))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Deletes the devices. Devices of another kind with the same names stay.
pub async fn remove(handle: &Handle) -> anyhow::Result<()> {
    for name in NAMES {
        if let Some((link, true)) = find(handle, name).await? {
            let deleted = handle.link().del(link.index).execute().await;
            deleted.with_context(|| format!("delete {name}"))?;
            info!(device = name, "tunnel device deleted");
        }
    }
    Ok(())
}

async fn device(handle: &Handle, name: &str, kind: InfoKind) -> anyhow::Result<u32> {
    let link = match find(handle, name).await? {
        Some((link, true)) => link,
        Some(_) => bail!("device {name} is not kpx's tunnel: rename or delete it"),
        None => {
            create(handle, name, kind).await?;
            let link = find(handle, name).await?;
            link.with_context(|| format!("{name} vanished as soon as it was created"))?
                .0
        }
    };
    if link.mtu != MTU {
        configure(handle, link.index)
            .await
            .with_context(|| format!("configure {name}"))?;
    }
    refuse(name)?;
    Ok(link.index)
}

/// Makes the stack refuse the device's packets, if the program is gone: the device has no address, and
/// no route leads to it.
fn refuse(name: &str) -> anyhow::Result<()> {
    sysctl::set(&format!("ipv4/conf/{name}/rp_filter"), "1")?;
    if sysctl::has_ipv6() {
        sysctl::set(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
    }
    Ok(())
}

async fn create(handle: &Handle, name: &str, kind: InfoKind) -> anyhow::Result<()> {
    let device = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(kind)
        .name(name)
        .set_info_data(InfoData::IpTunnel(vec![InfoIpTunnel::CollectMetadata]));
    handle
        .link()
        .add(device.build())
        .execute()
        .await
        .with_context(|| format!("create {name}: the kernel needs its modules ipip and ip6_tunnel, and permits one such device in a network namespace"))?;
    info!(device = name, "tunnel device created");
    Ok(())
}

async fn configure(handle: &Handle, index: u32) -> anyhow::Result<()> {
    let mut link = LinkUnspec::new_with_index(index).mtu(MTU);
    if sysctl::has_ipv6() {
        let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        link = link.append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(
            vec![mode],
        )]));
    }
    Ok(handle.link().set(link.build()).execute().await?)
}

/// Returns the device with this name, and whether it is a tunnel like kpx's.
async fn find(handle: &Handle, name: &str) -> anyhow::Result<Option<(Link, bool)>> {
    let which = LinkUnspec::new_with_name(name).build();
    let message = link::get(handle, which)
        .await
        .with_context(|| format!("look for device {name}"))?;
    let Some(message) = message else {
        return Ok(None);
    };
    let collects = message.attributes.iter().any(|attribute| {
        matches!(attribute, LinkAttribute::LinkInfo(infos) if infos.iter().any(|info| {
            matches!(info, LinkInfo::Data(InfoData::IpTunnel(data)) if data.contains(&InfoIpTunnel::CollectMetadata))
        }))
    });
    Ok(Link::from_message(&message).map(|link| (link, collects)))
}
