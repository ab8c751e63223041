//! This node: which devices carry programs, the anchor and the ways to it, and what the programs know of all that.

pub mod detect;
pub mod lifecycle;
pub mod node_ports;
mod options;
mod outside;
mod ways;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_common::addr::{Addr, Addr4, Addr6, Proto};
use proxy_common::device::{self, Device, OwnAddr};
use tracing::{debug, info};

use crate::datapath::{Attachments, Hooks, NodeMaps};
use crate::desired::Desired;
use crate::health::Health;
use crate::net::anchor::{self, Anchor, anchor_mtu};
use crate::net::link::Link;
use crate::net::role::Role;
use crate::net::{Handle, LinkEvent, addr, pod_route, rule, sysctl};
use crate::settings::PodRoutes;
use detect::Detection;
use outside::Outside;
use ways::{Surroundings, Want, Ways};

pub use options::{Masquerade, NodeOptions};

/// This node's devices, anchor, and ways to it.
pub struct Node {
    options: NodeOptions,
    detection: Detection,
    handle: Handle,
    attachments: Attachments,
    maps: NodeMaps,
    links: BTreeMap<u32, Link>,
    anchor: Anchor,
    anchor_mtu: u32,
    ways: Ways,
    /// What the cluster wants of this node, as of the last sync.
    wanted: Option<Wanted>,
    /// The programs can tell local pods, as far as anybody can.
    detects: bool,
    /// The ranges of which the programs know.
    service_cidrs: Vec<IpNet>,
    /// The addresses in force.
    node_addrs: (Addr4, Addr6),
    /// What [`Health`] was told of devices that could not be attached.
    failing: BTreeSet<String>,
    /// This is no node.
    outside: Option<Outside>,
    /// lo carries a program: on a host outside only if a backend is one of its own sockets.
    hooks_lo: bool,
}

/// What the cluster's objects say that concerns addresses and ways.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    node_addresses: Vec<IpAddr>,
    service_cidrs: Vec<IpNet>,
    service_addresses: BTreeSet<IpAddr>,
    external_frontends: BTreeSet<(IpAddr, Proto, u16)>,
}

impl Node {
    /// Makes the anchor. Devices get their programs as soon as [`Node::on_link`] hears of them.
    pub async fn start(
        options: NodeOptions,
        handle: Handle,
        mut attachments: Attachments,
        maps: NodeMaps,
    ) -> Result<Self> {
        let anchor_mtu = anchor_mtu(&BTreeMap::new());
        let anchor = anchor::ensure(&handle, anchor_mtu).await.context("make the anchor")?;
        attachments.attach(anchor.ifindex, anchor::NAME, Hooks::Anchor)?;
        let ways = Ways::open(&handle, anchor.ifindex).await?;
        if options.outside != Some(PodRoutes::Nodes) {
            pod_route::remove(&handle).await.context("remove the routes to pods of another mode")?;
        }
        let mut node = Self {
            // Outside nobody's pods are told apart, nor is there a Node to learn from.
            detection: if options.outside.is_none() {
                Detection::new(options.detector.clone())
            } else {
                Detection::default()
            },
            outside: options.outside.map(|routing| Outside::new(handle.clone(), routing)),
            hooks_lo: options.outside.is_none(),
            options,
            handle,
            attachments,
            maps,
            links: BTreeMap::new(),
            anchor,
            anchor_mtu,
            ways,
            wanted: None,
            detects: false,
            service_cidrs: Vec::new(),
            node_addrs: (Addr4::UNSPECIFIED, Addr6::UNSPECIFIED),
            failing: BTreeSet::new(),
        };
        node.write_node()?;
        Ok(node)
    }

    /// Removes everything that was put onto this node: rules, programs, anchor, routes.
    pub async fn stop(self) -> Result<()> {
        drop(self.attachments);
        Self::clean(&self.handle).await
    }

    /// Removes what outlives a process, whichever left it.
    pub async fn clean(handle: &Handle) -> Result<()> {
        let rules = rule::remove(handle).await.context("remove the rules");
        let pod_routes = pod_route::remove(handle).await.context("remove the routes to pods");
        rules.and(pod_routes).and(anchor::remove(handle).await.context("remove the anchor"))
    }

    pub fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    /// Whether the devices have been listed. Until then none has programs but the anchor.
    pub fn knows_devices(&self) -> bool {
        !self.links.is_empty()
    }

    pub fn role(&self, ifindex: u32) -> Option<Role> {
        self.links.get(&ifindex).map(|link| self.role_of(link))
    }

    /// The addresses in force, as far as there are any.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let (v4, v6) = self.node_addrs;
        let known = [(!v4.is_unspecified()).then(|| v4.ip()), (!v6.is_unspecified()).then(|| v6.ip())];
        known.into_iter().flatten().collect()
    }

    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Where something listens that is to be reached at the same addresses as node ports: the unspecified address
    /// stands for all of its family.
    pub fn listen_addresses(&self) -> BTreeSet<IpAddr> {
        self.options.node_ports.listen_on(self.own_addresses(), &self.addresses(), sysctl::has_ipv6())
    }

    pub fn anchor(&self) -> Anchor {
        self.anchor
    }

    /// Takes in what the kernel says of devices.
    pub async fn on_link(&mut self, event: LinkEvent, health: &Health) -> Result<()> {
        let addrs_before = self.addrs_up();
        self.on_routes(); // With a device or an address the kernel drops routes, and says nothing.
        let listed = matches!(event, LinkEvent::All(_));
        match event {
            LinkEvent::All(links) => self.links = links.into_iter().map(|link| (link.index, link)).collect(),
            LinkEvent::Put(link) => drop(self.links.insert(link.index, *link)),
            LinkEvent::Del(ifindex) => drop(self.links.remove(&ifindex)),
        }
        // The kernel drops routes with the address that they have as source, and says nothing.
        let lost = !addrs_before.is_subset(&self.addrs_up());
        // The programs know a device before it carries them. One part that fails must not keep the others from work.
        let written = self.write_devices();
        self.attach(health);
        let fitted = self.fit_anchor(listed).await;
        let updated = self.update_addresses().await;
        let fresh = *fitted.as_ref().unwrap_or(&false);
        let led = self.update_ways(listed || lost || fresh, health).await;
        written.and(fitted.map(drop)).and(updated).and(led)
    }

    /// Takes in what has to be known before anything is served. False if it is not known yet; an error if the agent
    /// must begin anew.
    pub fn before_sync(&mut self, desired: &Desired, health: &Health) -> Result<bool> {
        // Without devices nothing is beside: routes that lead to pods would go, and come back.
        if self.is_outside() && !self.knows_devices() {
            return Ok(false);
        }
        self.detection.learn(&desired.pod_cidrs())?;
        if !self.detection.is_known() {
            health.begin(LOCAL_PODS, "the Node object has no podCIDRs yet, and --detect-local-mode goes by them");
            return Ok(false);
        }
        if !self.detects {
            self.detects = true;
            match self.maps.set_pods(&self.detection.nets()).and_then(|()| self.write_node()) {
                Ok(()) => health.end(LOCAL_PODS),
                Err(error) => {
                    self.detects = false; // So that the next sync tries again.
                    health.begin(LOCAL_PODS, format!("{error:#}"));
                }
            }
        }
        Ok(true)
    }

    /// Takes in what the cluster's objects say, after a sync; `written` if all frontends are in the maps.
    pub async fn on_sync(&mut self, desired: &Desired, written: bool, health: &Health) -> Result<()> {
        let followed = self.follow(desired, health).await;
        // What is in one of these ranges and no frontend is dropped: so not before the frontends are there.
        let told = if written { self.write_service_cidrs(desired) } else { Ok(()) };
        if let Some(outside) = &mut self.outside {
            outside.report(desired, health);
        }
        followed.and(told)
    }

    fn write_service_cidrs(&mut self, desired: &Desired) -> Result<()> {
        let given = &self.options.service_cidrs;
        let cidrs = if given.is_empty() { desired.service_cidrs() } else { given };
        if self.service_cidrs != cidrs {
            self.maps.set_service_cidrs(cidrs)?;
            self.service_cidrs = cidrs.to_vec();
        }
        Ok(())
    }

    async fn follow(&mut self, desired: &Desired, health: &Health) -> Result<()> {
        let wanted = Wanted {
            node_addresses: desired.node_addresses(),
            service_cidrs: desired.service_cidrs().to_vec(),
            service_addresses: desired.service_addresses(),
            external_frontends: desired.external_frontends().collect(),
        };
        if self.wanted.as_ref() == Some(&wanted) {
            return Ok(());
        }
        let before = self.wanted.replace(wanted);
        let updated = self.update_addresses().await;
        let result = updated.and(self.update_ways(false, health).await);
        if result.is_err() {
            self.wanted = before; // So that the next sync tries again.
        }
        result
    }

    /// The addresses of devices that are up.
    fn addrs_up(&self) -> BTreeSet<IpAddr> {
        let up = self.links.values().filter(|link| link.up);
        up.flat_map(|link| link.addrs.iter().map(|net| net.addr())).collect()
    }

    /// Gives every device the programs that its role asks for. What fails is tried again with the next event.
    fn attach(&mut self, health: &Health) {
        let mut carried = BTreeSet::from([self.anchor.ifindex]);
        let mut failing = BTreeSet::new();
        for link in self.links.values() {
            let hooks = match self.role_of(link) {
                Role::Loopback if self.hooks_lo => Hooks::Loopback,
                Role::Device { .. } => Hooks::Both,
                Role::Loopback | Role::Anchor | Role::Ignored(_) => continue,
            };
            let what = format!("device {}", link.name);
            carried.insert(link.index);
            let known = self.attachments.devices().contains_key(&link.index);
            if let Err(error) = self.attachments.attach(link.index, &link.name, hooks) {
                health.begin(&what, format!("{error:#}"));
                failing.insert(what);
            }
            if !known && let Some(attached) = self.attachments.devices().get(&link.index) {
                info!(device = link.name, ifindex = link.index, by = %attached.mechanism, "attached");
            }
        }
        let gone = self.attachments.devices().keys().filter(|ifindex| !carried.contains(ifindex)).copied();
        for ifindex in gone.collect::<Vec<_>>() {
            if let Some(attached) = self.attachments.detach(ifindex) {
                info!(device = attached.name, ifindex, "detached");
            }
        }
        self.failing.difference(&failing).for_each(|what| health.end(what));
        self.failing = failing;
    }

    fn write_devices(&mut self) -> Result<()> {
        let devices = self.links.values().filter_map(|link| {
            let Role::Device { pod } = self.role_of(link) else { return None };
            let detected = self.detection.finds(link, &self.links);
            let flags = if pod { Device::POD } else { 0 } | if detected { Device::DETECTED } else { 0 };
            let addr4 = addr::device_address(link).unwrap_or(Addr4::UNSPECIFIED);
            let addr6 = addr::device_address(link).unwrap_or(Addr6::UNSPECIFIED);
            Some((link.index, Device::new(flags, addr4, addr6)))
        });
        let devices = devices.collect();
        self.maps.set_devices(&devices).and(self.write_addrs())
    }

    fn write_addrs(&mut self) -> Result<()> {
        let primary = self.addresses();
        let own = self.links.values().flat_map(|link| link.addrs.iter().map(|net| (link.index, net.addr())));
        let addrs = own.map(|(ifindex, addr)| {
            let serves = self.options.node_ports.accepts(addr, &primary);
            (addr, OwnAddr::new(ifindex, if serves { OwnAddr::NODE_PORTS } else { 0 }))
        });
        let addrs = addrs.collect();
        self.maps.set_addrs(&addrs)
    }

    /// Those of all devices.
    pub fn own_addresses(&self) -> BTreeSet<IpAddr> {
        self.links.values().flat_map(|link| link.addrs.iter().map(|net| net.addr())).collect()
    }

    /// Makes the anchor as it should be, if it is not there, not up, or of another MTU than the ways out; and now and
    /// then, for what does not show. True if anything was done: then routes may have been lost.
    async fn fit_anchor(&mut self, listed: bool) -> Result<bool> {
        let mtu = anchor_mtu(&self.links);
        let up = self.links.get(&self.anchor.ifindex).is_some_and(|link| link.up);
        if mtu == self.anchor_mtu && up && !listed {
            return Ok(false);
        }
        let anchor = anchor::ensure(&self.handle, mtu).await.context("fit the anchor")?;
        if anchor != self.anchor {
            info!(ifindex = anchor.ifindex, "the anchor was gone and is made anew");
            self.attachments.detach(self.anchor.ifindex);
            self.attachments.attach(anchor.ifindex, anchor::NAME, Hooks::Anchor)?;
            self.ways = Ways::open(&self.handle, anchor.ifindex).await?;
            self.anchor = anchor;
            self.write_node()?;
        }
        debug!(mtu, "anchor fitted");
        self.anchor_mtu = mtu;
        Ok(true)
    }

    async fn update_addresses(&mut self) -> Result<()> {
        let addrs = (self.node_address::<Addr4>().await?, self.node_address::<Addr6>().await?);
        if addrs == self.node_addrs {
            return Ok(());
        }
        info!(ipv4 = ?addrs.0, ipv6 = ?addrs.1, "node addresses");
        self.node_addrs = addrs;
        self.write_node().and(self.write_addrs())
    }

    async fn node_address<A: Addr>(&self) -> Result<A> {
        let mut preferred = self.options.node_ips.clone();
        preferred.extend(self.wanted.iter().flat_map(|wanted| &wanted.node_addresses));
        // Which is a list of all routes, so only where nobody names an address.
        let named = preferred.iter().any(|ip| A::from_ip(*ip).is_some());
        let default_route = if named { None } else { addr::default_route::<A>(&self.handle).await? };
        Ok(addr::node_address(&self.links, &preferred, default_route).unwrap_or(A::UNSPECIFIED))
    }

    fn write_node(&mut self) -> Result<()> {
        let (addr4, addr6) = self.node_addrs;
        let flags = self.options.flags() | if self.detects { self.detection.flags() } else { 0 };
        self.maps.set_node(device::Node::new(addr4, addr6, self.anchor.ifindex, self.anchor.mac, flags))
    }

    /// Makes the ways to the anchor what they should be. `verify` asks the kernel first what there is.
    async fn update_ways(&mut self, verify: bool, health: &Health) -> Result<()> {
        // Not before the first sync: nothing must lead to the anchor before there is anything behind it, and what a
        // predecessor left leads to services that will be there again.
        let Some(wanted) = &self.wanted else { return Ok(()) };
        let given = &self.options.service_cidrs;
        let want = Want::of(&Surroundings {
            service_cidrs: if given.is_empty() { &wanted.service_cidrs } else { given },
            service_addresses: &wanted.service_addresses,
            external_frontends: &wanted.external_frontends,
            own: &self.own_addresses(),
            primary: &self.addresses(),
            has_ipv6: sysctl::has_ipv6(),
        });
        self.ways.update(&want, verify, health).await
    }
}

/// What [`Health`] calls the detection of local pods.
const LOCAL_PODS: &str = "local pods";
