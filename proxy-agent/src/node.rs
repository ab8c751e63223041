//! This node: which devices carry programs, the anchor and the ways to it, and what the programs know of all that.

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
use crate::health::{Health, Problem};
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
    /// As of the last event.
    anchor_up: bool,
    ways: Ways,
    /// What the cluster wants of this node, as of the last sync.
    followed: Followed,
    /// What a predecessor had found out about this node: it stays in force until the first sync.
    inherited: Option<device::Node>,
    /// The programs can tell local pods, as far as anybody can.
    detects: bool,
    /// Some route has several next hops, as of the last list of devices.
    has_many_ways: bool,
    /// The Node object's, of which the programs know.
    pod_cidrs: Vec<IpNet>,
    /// The ranges of ClusterIPs of which the programs know, and those ClusterIPs that other proxies serve; None until they
    /// were told.
    service_nets: Option<(Vec<IpNet>, BTreeSet<IpAddr>)>,
    /// The addresses in force.
    node_addrs: (Addr4, Addr6),
    /// What [`Health`] was told of devices that could not be attached.
    failing: BTreeSet<Problem>,
    /// This is no node.
    outside: Option<Outside>,
    /// lo carries a program: on a host outside only if a backend is one of its own sockets.
    hooks_lo: bool,
    fast_path: FastPathState,
    /// What others have undone and is as it should be again, since it was last asked.
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
        // One that drained is in service again.
        let inherited = maps.node()?.map(|node| node.without(device::Node::DRAINING));
        let fast_path = FastPathState::new(options.fast_path);
        let unknown = (Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        let mut node = Self {
            // Outside nobody's pods are told apart, nor is there a Node to learn from.
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

    /// Takes the programs off all devices. Without this they stay.
    pub fn detach(self) {
        self.attachments.detach_all();
    }

    /// Removes rules, routes and anchor, whichever process left them.
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

    /// Takes in what the kernel says of devices: a burst of it costs little more than a single change.
    pub async fn on_links(&mut self, events: impl IntoIterator<Item = LinkEvent>, health: &Health) -> Result<()> {
        let (addrs_before, anchor_before) = (self.addrs_up(), self.anchor);
        self.on_routes(); // With a device or an address the kernel drops routes, and says nothing.
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
        // The kernel drops routes with the address that they have as source, and says nothing.
        let lost = !addrs_before.is_subset(&self.addrs_up());
        if listed {
            self.has_many_ways = fib::has_many_ways(&self.handle).await.unwrap_or(true);
        }
        // The programs know a device before it carries them. One part that fails must not keep the others from work.
        let written = self.write_devices();
        self.attach(health);
        let judged = if listed { self.judge_fast_path().await } else { Ok(()) };
        let kept = if listed { self.verify_sysctls() } else { Ok(()) };
        let fitted = self.fit_anchor(listed).await;
        let verified = if listed { self.verify_programs(health).await.and(kept) } else { kept };
        let updated = self.update_addresses().await;
        let fresh = *fitted.as_ref().unwrap_or(&false);
        let led = self.update_ways(listed || lost || fresh, health).await;
        // What comes and goes with an address or with the anchor nobody took away.
        if let Ok(changed) = led
            && listed
            && (addrs_before, anchor_before) == (self.addrs_up(), self.anchor)
        {
            self.mended.ways(changed);
        }
        written.and(judged).and(fitted.map(drop)).and(verified).and(updated).and(led.map(drop))
    }

    /// Takes in what has to be known before anything is served. False if it is not known yet; an error if the agent
    /// must begin anew.
    pub fn before_sync(&mut self, desired: &Desired, health: &Health) -> Result<bool> {
        // Without devices nothing is beside, so that routes that lead to pods would go, and come back; and the node has no
        // address, where it had one.
        if (self.is_outside() || self.inherited.is_some()) && !self.knows_devices() {
            return Ok(false);
        }
        self.detection.learn(&desired.pod_cidrs())?;
        if !self.detection.is_known() {
            health.begin(
                &Problem::LocalPods,
                "the Node object has no podCIDRs yet, and --detect-local-mode goes by them",
            );
            return Ok(false);
        }
        if !self.detects {
            self.detects = true;
            self.inherited = None;
            match self.write_pods(desired).and_then(|()| self.write_node()) {
                Ok(()) => health.end(&Problem::LocalPods),
                Err(error) => {
                    self.detects = false; // So that the next sync tries again.
                    health.begin(&Problem::LocalPods, format!("{error:#}"));
                }
            }
        } else if self.pod_cidrs != desired.pod_cidrs()
            && let Err(error) = self.write_pods(desired)
        {
            health.begin(&Problem::LocalPods, format!("{error:#}"));
        }
        self.spare_other_proxies(desired);
        Ok(true)
    }

    /// A Service that another proxy is to serve from now on is still ours, or nobody's: from the moment on in which its
    /// frontends go, packets to it are to pass.
    fn spare_other_proxies(&mut self, desired: &Desired) {
        let others = desired.of_other_proxies();
        let Some((cidrs, known)) = self.service_nets.take_if(|(_, known)| !others.is_subset(known)) else { return };
        let all = &known | others;
        // What fails here fails once more after the sync, and is told then.
        if self.maps.set_service_nets(&cidrs, &all).is_ok() {
            self.service_nets = Some((cidrs, all));
        }
    }

    /// Takes in what the cluster's objects say, after a sync; `written` if all frontends are in the maps.
    pub async fn on_sync(&mut self, desired: &Desired, written: bool, health: &Health) -> Result<()> {
        let followed = self.follow(desired, health).await;
        // What is in one of these ranges and no frontend is dropped: so not before the frontends are there.
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
            carried.insert(link.index);
            let known = self.attachments.devices().contains_key(&link.index);
            if let Err(error) = self.attachments.attach(link.index, &link.name, hooks) {
                let problem = Problem::Device(link.name.clone());
                health.begin(&problem, format!("{error:#}"));
                failing.insert(problem);
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
        self.failing.difference(&failing).for_each(|problem| health.end(problem));
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

    /// Those of all devices.
    pub fn own_addresses(&self) -> BTreeSet<IpAddr> {
        self.links.values().flat_map(|link| link.addrs.iter().map(|net| net.addr())).collect()
    }

    async fn update_addresses(&mut self) -> Result<()> {
        if self.inherited.is_some() {
            return Ok(()); // What the cluster says of this node is not known yet.
        }
        let addrs = (self.node_address::<Addr4>().await?, self.node_address::<Addr6>().await?);
        if addrs == self.node_addrs {
            return Ok(());
        }
        info!(ipv4 = ?addrs.0, ipv6 = ?addrs.1, "node addresses");
        let before = std::mem::replace(&mut self.node_addrs, addrs);
        self.write_node().and(self.write_addrs()).inspect_err(|_| self.node_addrs = before) // To be tried again.
    }

    async fn node_address<A: Addr>(&self) -> Result<A> {
        let mut preferred = self.options.node_ips.clone();
        preferred.extend(self.followed.wanted().into_iter().flat_map(|wanted| &wanted.node_addresses));
        // Which is a list of all routes, so only where nobody names an address.
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

/// Interface index of lo, in every network namespace.
const LO: u32 = 1;
