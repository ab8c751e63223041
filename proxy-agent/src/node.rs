//! Maintains this node: the devices that carry programs, the anchor, the service routes, and the programs' knowledge of
//! the node.

pub mod detect;
mod devices;
mod fast_path;
pub mod lifecycle;
mod mend;
pub mod node_ports;
mod options;
mod outside;
mod wanted;
mod ways;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{self, OwnAddr};
use tracing::info;

use crate::datapath::{Attachments, Hooks, NodeMaps};
use crate::desired::Desired;
use crate::health::Health;
use crate::net::anchor::{self, Anchor, anchor_mtu};
use crate::net::link::Link;
use crate::net::role::Role;
use crate::net::{Handle, LinkEvent, addr, fib, pod_route, rule, sysctl};
use crate::settings::PodRoutes;
use detect::Detection;
use fast_path::FastPathState;
use outside::Outside;
use wanted::Followed;
use ways::Ways;

pub use fast_path::FastPath;
pub use mend::Mended;
pub use options::{Masquerade, NodeOptions};

/// The devices, the anchor and the service routes of this node.
pub struct Node {
    options: NodeOptions,
    detection: Detection,
    handle: Handle,
    attachments: Attachments,
    maps: NodeMaps,
    links: BTreeMap<u32, Link>,
    anchor: Anchor,
    anchor_mtu: u32,
    /// Set if the anchor was up at the last event.
    anchor_up: bool,
    ways: Ways,
    /// The node state that the cluster desired at the last sync.
    followed: Followed,
    /// The node as a predecessor wrote it, in force until the first sync.
    inherited: Option<device::Node>,
    /// Set once the programs can detect local pods, as far as that is possible.
    detects: bool,
    /// Set if some route had several next hops at the last list of devices.
    has_many_ways: bool,
    /// The Node object's podCIDRs, as written for the programs.
    pod_cidrs: Vec<IpNet>,
    /// The ranges of ClusterIPs as written for the programs, and the ClusterIPs that other proxies serve. None until
    /// they are written.
    service_nets: Option<(Vec<IpNet>, BTreeSet<IpAddr>)>,
    /// The addresses in force.
    node_addrs: (Addr4, Addr6),
    /// The names in [`Health`] of devices that could not be attached.
    failing: BTreeSet<String>,
    /// The state of host mode.
    outside: Option<Outside>,
    /// Set if lo carries a program. In host mode lo needs one only if a backend is a socket of this host.
    hooks_lo: bool,
    fast_path: FastPathState,
    /// The repairs since the last query.
    mended: Mended,
}

impl Node {
    /// Makes the anchor. Devices get their programs as soon as [`Node::on_links`] hears of them.
    pub async fn start(
        options: NodeOptions,
        handle: Handle,
        mut attachments: Attachments,
        maps: NodeMaps,
    ) -> Result<Self> {
        let present = anchor::present_mtu(&handle).await.context("look for the anchor")?;
        let anchor_mtu = present.unwrap_or_else(|| anchor_mtu(&BTreeMap::new()));
        let anchor = anchor::ensure(&handle, anchor_mtu).await.context("make the anchor")?;
        attachments.attach(anchor.ifindex, anchor::NAME, Hooks::Anchor)?;
        let ways = Ways::open(&handle, anchor.ifindex).await?;
        if options.outside != Some(PodRoutes::Nodes) {
            pod_route::remove(&handle).await.context("remove the routes to pods of another mode")?;
        }
        // A drained node is in service again.
        let inherited = maps.node()?.map(|node| node.without(device::Node::DRAINING));
        let fast_path = FastPathState::new(options.fast_path);
        let unknown = (Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        let mut node = Self {
            // Host mode does not detect pods, and has no Node object.
            detection: if options.outside.is_none() {
                Detection::new(options.detector.clone())
            } else {
                Detection::default()
            },
            outside: options.outside.map(|routing| Outside::new(handle.clone(), routing)),
            hooks_lo: options.outside.is_none() || attachments.devices().values().any(|device| device.name == "lo"),
            options,
            handle,
            attachments,
            maps,
            links: BTreeMap::new(),
            anchor,
            anchor_mtu,
            anchor_up: false,
            ways,
            followed: Followed::default(),
            inherited,
            detects: false,
            has_many_ways: false,
            pod_cidrs: Vec::new(),
            service_nets: None,
            node_addrs: inherited.map_or(unknown, |node| (node.addr4, node.addr6)),
            failing: BTreeSet::new(),
            mended: Mended::default(),
            fast_path,
        };
        node.write_node()?;
        Ok(node)
    }

    /// Takes the programs off all devices. Otherwise they stay.
    pub fn detach(self) {
        self.attachments.detach_all();
    }

    /// Removes rules, routes and anchor, including those of earlier processes.
    pub async fn clean(handle: &Handle) -> Result<()> {
        let rules = rule::remove(handle).await.context("remove the rules");
        let pod_routes = pod_route::remove(handle).await.context("remove the routes to pods");
        rules.and(pod_routes).and(anchor::remove(handle).await.context("remove the anchor"))
    }

    pub fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    /// Returns true if the devices have been listed. Until then only the anchor has programs.
    pub fn knows_devices(&self) -> bool {
        !self.links.is_empty()
    }

    /// Returns the addresses in force, as far as there are any.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let (v4, v6) = self.node_addrs;
        let known = [(!v4.is_unspecified()).then(|| v4.ip()), (!v6.is_unspecified()).then(|| v6.ip())];
        known.into_iter().flatten().collect()
    }

    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Returns the addresses to listen on for a service that is reachable at the same addresses as node ports. The
    /// unspecified address stands for all of its family.
    pub fn listen_addresses(&self) -> BTreeSet<IpAddr> {
        self.options.node_ports.listen_on(self.own_addresses(), &self.addresses(), sysctl::has_ipv6())
    }

    pub fn anchor(&self) -> Anchor {
        self.anchor
    }

    /// Takes in the kernel's events about devices: a burst costs little more than a single change.
    pub async fn on_links(&mut self, events: impl IntoIterator<Item = LinkEvent>, health: &Health) -> Result<()> {
        let (addrs_before, anchor_before) = (self.addrs_up(), self.anchor);
        self.on_routes(); // With a device or an address the kernel drops routes, without a message.
        let mut listed = false;
        for event in events {
            match event {
                LinkEvent::All(links) => {
                    self.links = links.into_iter().map(|link| (link.index, link)).collect();
                    listed = true;
                }
                LinkEvent::Put(link) => drop(self.links.insert(link.index, *link)),
                LinkEvent::Del(ifindex) => drop(self.links.remove(&ifindex)),
            }
        }
        // The kernel drops the routes that have a lost address as source, without a message.
        let lost = !addrs_before.is_subset(&self.addrs_up());
        if listed {
            self.has_many_ways = fib::has_many_ways(&self.handle).await.unwrap_or(true);
        }
        // The programs' map has a device before the device has programs. A failing part must not keep the others from
        // work.
        let written = self.write_devices();
        self.attach(health);
        let judged = if listed { self.judge_fast_path().await } else { Ok(()) };
        let kept = if listed { self.verify_sysctls() } else { Ok(()) };
        let fitted = self.fit_anchor(listed).await;
        let verified = if listed { self.verify_programs(health).await.and(kept) } else { kept };
        let updated = self.update_addresses().await;
        let fresh = *fitted.as_ref().unwrap_or(&false);
        let led = self.update_ways(listed || lost || fresh, health).await;
        // A change that follows an address or the anchor is not another program's.
        if let Ok(changed) = led
            && listed
            && (addrs_before, anchor_before) == (self.addrs_up(), self.anchor)
        {
            self.mended.ways(changed);
        }
        written.and(judged).and(fitted.map(drop)).and(verified).and(updated).and(led.map(drop))
    }

    /// Takes in the facts that must be known before the node serves. Returns false while they are missing, and an error
    /// if the agent must restart.
    pub fn before_sync(&mut self, desired: &Desired, health: &Health) -> Result<bool> {
        // Without devices no node is a neighbour, so routes that lead to pods would go and come back. The node would
        // also lose the address that it had.
        if (self.is_outside() || self.inherited.is_some()) && !self.knows_devices() {
            return Ok(false);
        }
        self.detection.learn(&desired.pod_cidrs())?;
        if !self.detection.is_known() {
            health.begin(LOCAL_PODS, "the Node object has no podCIDRs yet, and --detect-local-mode needs them");
            return Ok(false);
        }
        if !self.detects {
            self.detects = true;
            self.inherited = None;
            match self.write_pods(desired).and_then(|()| self.write_node()) {
                Ok(()) => health.end(LOCAL_PODS),
                Err(error) => {
                    self.detects = false; // The next sync tries again.
                    health.begin(LOCAL_PODS, format!("{error:#}"));
                }
            }
        } else if self.pod_cidrs != desired.pod_cidrs()
            && let Err(error) = self.write_pods(desired)
        {
            health.begin(LOCAL_PODS, format!("{error:#}"));
        }
        self.spare_other_proxies(desired);
        Ok(true)
    }

    /// Stops dropping packets to Services that pass to another proxy. Until their frontends go, the Services are still
    /// ours. From that moment on, packets to them must pass.
    fn spare_other_proxies(&mut self, desired: &Desired) {
        let others = desired.of_other_proxies();
        let Some((cidrs, known)) = self.service_nets.take_if(|(_, known)| !others.is_subset(known)) else { return };
        let all = &known | others;
        // A failure here repeats after the sync, and is reported then.
        if self.maps.set_service_nets(&cidrs, &all).is_ok() {
            self.service_nets = Some((cidrs, all));
        }
    }

    /// Takes in the cluster's objects after a sync; `written` is set if all frontends are in the maps.
    pub async fn on_sync(&mut self, desired: &Desired, written: bool, health: &Health) -> Result<()> {
        let followed = self.follow(desired, health).await;
        // The programs drop packets to these ranges without a frontend, so the ranges are written after the frontends.
        let told = if written { self.write_service_nets(desired) } else { Ok(()) };
        if let Some(outside) = &mut self.outside {
            outside.report(desired, health);
        }
        followed.and(told)
    }

    fn write_service_nets(&mut self, desired: &Desired) -> Result<()> {
        let given = &self.options.service_cidrs;
        let cidrs = if given.is_empty() { desired.service_cidrs() } else { given };
        let others = desired.of_other_proxies();
        let is_known = |(known_cidrs, known_others): &(Vec<IpNet>, BTreeSet<IpAddr>)| {
            known_cidrs == cidrs && known_others == others
        };
        if !self.service_nets.as_ref().is_some_and(is_known) {
            self.maps.set_service_nets(cidrs, others)?;
            self.service_nets = Some((cidrs.to_vec(), others.clone()));
        }
        Ok(())
    }

    async fn follow(&mut self, desired: &Desired, health: &Health) -> Result<()> {
        if !self.followed.begin(desired) {
            return Ok(());
        }
        let updated = self.update_addresses().await;
        let result = updated.and(self.update_ways(false, health).await.map(drop));
        self.followed.end(result.is_ok());
        result
    }

    /// Returns the addresses of devices that are up.
    fn addrs_up(&self) -> BTreeSet<IpAddr> {
        let up = self.links.values().filter(|link| link.up);
        up.flat_map(|link| link.addrs.iter().map(|net| net.addr())).collect()
    }

    /// Gives every device the programs of its role. The next event tries again after a failure.
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
            Some((link.index, devices::row(link, &self.links, pod, detected, self.has_many_ways)))
        });
        let devices = devices.collect();
        self.maps.set_devices(&devices).and(self.write_addrs()).and(self.note_stacked())
    }

    fn write_addrs(&mut self) -> Result<()> {
        let primary = self.addresses();
        let own = self.links.values().flat_map(|link| link.addrs.iter().map(|net| (link.index, net.addr())));
        let addrs = own.map(|(ifindex, addr)| {
            let serves = self.options.node_ports.accepts(addr, &primary);
            (addr, OwnAddr::new(ifindex, if serves { OwnAddr::NODE_PORTS } else { 0 }))
        });
        let localhost = self.options.localhost(&primary).map(|addr| (addr, OwnAddr::new(LO, OwnAddr::NODE_PORTS)));
        let addrs = addrs.chain(localhost).collect();
        self.maps.set_addrs(&addrs)
    }

    /// Returns the addresses of all devices.
    pub fn own_addresses(&self) -> BTreeSet<IpAddr> {
        self.links.values().flat_map(|link| link.addrs.iter().map(|net| net.addr())).collect()
    }

    async fn update_addresses(&mut self) -> Result<()> {
        if self.inherited.is_some() {
            return Ok(()); // The cluster's view of this node is not known yet.
        }
        let addrs = (self.node_address::<Addr4>().await?, self.node_address::<Addr6>().await?);
        if addrs == self.node_addrs {
            return Ok(());
        }
        info!(ipv4 = ?addrs.0, ipv6 = ?addrs.1, "node addresses");
        let before = std::mem::replace(&mut self.node_addrs, addrs);
        self.write_node().and(self.write_addrs()).inspect_err(|_| self.node_addrs = before) // The next event tries again.
    }

    async fn node_address<A: Addr>(&self) -> Result<A> {
        let mut preferred = self.options.node_ips.clone();
        preferred.extend(self.followed.wanted().into_iter().flat_map(|wanted| &wanted.node_addresses));
        // This lookup lists all routes, so it is left out where an address is named.
        let named = preferred.iter().any(|ip| A::from_ip(*ip).is_some());
        let default_route = if named { None } else { addr::default_route::<A>(&self.handle).await? };
        Ok(addr::node_address(&self.links, &preferred, default_route).unwrap_or(A::UNSPECIFIED))
    }

    fn write_node(&mut self) -> Result<()> {
        if let Some(inherited) = self.inherited {
            let inherited = inherited.without(device::Node::FAST_PATH | device::Node::STACKED);
            let inherited = inherited.with(self.fast_path.flag() | devices::flags(&self.links));
            return self.maps.set_node(inherited.with_anchor(self.anchor.ifindex, self.anchor.mac));
        }
        let (addr4, addr6) = self.node_addrs;
        let detection = if self.detects { self.detection.flags() } else { 0 };
        let flags = self.options.flags() | detection | self.fast_path.flag() | devices::flags(&self.links);
        self.maps.set_node(device::Node::new(addr4, addr6, self.anchor.ifindex, self.anchor.mac, flags))
    }
}

/// The interface index of lo, in every network namespace.
const LO: u32 = 1;

/// The name of the detection of local pods in [`Health`].
const LOCAL_PODS: &str = "local pods";
