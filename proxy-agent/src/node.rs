//! Maintains this node: devices with programs, the anchor, the service routes, and the node's rows
//! in the maps.

mod anchor;
mod bypass_connections;
mod desired_node;
pub mod detect;
mod device_rows;
mod devices;
mod fast_path;
mod handover;
mod host_mode;
mod leaving;
pub mod lifecycle;
mod node_rows;
mod opened;
mod options;
mod programs;
mod ranges;
mod relapses;
mod service_routes;
mod switch;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context, Result};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_core::desired::Desired;
use proxy_datapath::{Attachments, BypassFlows, NodeMaps};
use proxy_net::anchor::Anchor;
use proxy_net::role::Role;
use proxy_net::route::Routes;
use proxy_net::{Handle, JudgedRules, LinkEvent, WatchedNets, addr, pod_route, rule, sysctl};
use tracing::{info, warn};

use crate::all::all;
use crate::choices::PodRoutes;
use anchor::AnchorDevice;
use desired_node::SyncedNode;
use detect::Detection;
use devices::Devices;
use fast_path::FastPathState;
use handover::Handover;
use host_mode::HostMode;
pub(crate) use host_mode::why_cut_off;
use node_rows::{NodeFlags, NodeRows};
use programs::DevicePrograms;
use proxy_metrics::Repairs;
use proxy_source::health::{Health, Problem};
use ranges::Ranges;
use relapses::Relapses;
use service_routes::{DesiredRoutes, RouteChanges, RouteInputs, ServiceRoutes};

pub use fast_path::FastPath;
pub use options::{Masquerade, NodeOptions};

/// The devices, the anchor and the service routes of this node.
pub struct Node {
    options: NodeOptions,
    handle: Handle,
    devices: Devices,
    anchor: AnchorDevice,
    programs: DevicePrograms,
    routes: ServiceRoutes,
    rows: NodeRows,
    detection: Detection,
    ranges: Ranges,
    /// Set once the programs can detect local pods, as far as possible.
    detects: bool,
    fast_path: FastPathState,
    bypass_flows: BypassFlows,
    /// The rules' state that `fast_path` was evaluated for.
    judged_rules: JudgedRules,
    /// Set while the rules are not yet evaluated for a pod's new device.
    judges_pods: bool,
    /// Set in host mode.
    host_mode: Option<HostMode>,
    /// The desired state of this node as of the last sync.
    synced_node: SyncedNode,
    /// The repairs since the last [`Node::take_repairs`].
    repairs: Repairs,
    relapses: Relapses,
    refusals: Vec<String>,
    handover: Handover,
}

impl Node {
    /// Creates the anchor. [`Node::on_links`] attaches programs to the devices. `watched` receives
    /// the networks for the watch on routes.
    pub async fn start(
        options: NodeOptions,
        handle: Handle,
        attachments: Attachments,
        maps: NodeMaps,
        bypass_flows: BypassFlows,
        watched: WatchedNets,
    ) -> Result<Self> {
        let is_node = options.pod_routing.is_none();
        let serves_localhost = options.localhosts().iter().any(IpAddr::is_ipv4);
        let anchor = AnchorDevice::start(handle.clone(), serves_localhost).await?;
        let programs = DevicePrograms::start(attachments, anchor.ifindex(), is_node)?;
        let routes = ServiceRoutes::open(&handle, anchor.ifindex()).await?;
        if options.pod_routing != Some(PodRoutes::Nodes) {
            pod_route::remove(&handle)
                .await
                .context("remove the routes to pods of another mode")?;
        }
        let rows = NodeRows::new(maps)?;
        let handover = if options.hands_over {
            Handover::new(rows.inherited_handover()?)
        } else {
            // They are deleted after this node's Lease, so that an agent that ends before finds them.
            let are_left = proxy_net::tunnel::shut(&handle).await;
            Handover::off(are_left.context("bring the tunnel devices of another mode down")?)
        };
        let mut node = Self {
            // In host mode the host has no pods to detect, and no Node object with their networks.
            detection: if is_node {
                Detection::new(options.detector.clone())
            } else {
                Detection::default()
            },
            host_mode: options
                .pod_routing
                .map(|routing| HostMode::new(handle.clone(), routing)),
            fast_path: FastPathState::new(options.fast_path, rows.inherits_bypass_flows()),
            bypass_flows,
            judged_rules: JudgedRules::default(),
            judges_pods: false,
            rows,
            devices: Devices::new(is_node),
            ranges: Ranges::of(&options.service_cidrs, is_node.then_some(watched)),
            options,
            handle,
            anchor,
            programs,
            routes,
            detects: false,
            synced_node: SyncedNode::default(),
            repairs: Repairs::default(),
            relapses: Relapses::default(),
            refusals: Vec::new(),
            handover,
        };
        node.write_node()?;
        Ok(node)
    }

    /// Detaches the programs from all devices. Without this call they stay.
    pub async fn detach(self) -> Result<()> {
        // A tunnel device without its program takes anyone's packets.
        let removed = proxy_net::tunnel::remove(&self.handle).await;
        self.programs.attachments.detach_all();
        removed.context("remove the tunnel devices")
    }

    /// Removes rules, routes and anchor, including those of earlier runs.
    pub async fn clean(handle: &Handle) -> Result<()> {
        let rules = rule::remove(handle).await.context("remove the rules");
        let pod_routes = pod_route::remove(handle)
            .await
            .context("remove the routes to pods");
        let throws = async {
            let mut throws = Routes::open_throws(handle.clone(), rule::SERVICES).await?;
            throws.reconcile(&BTreeSet::new()).await.map(drop)
        };
        let throws = throws
            .await
            .context("remove the routes of the services' table");
        all([
            rules,
            pod_routes,
            throws,
            proxy_net::anchor::remove(handle)
                .await
                .context("remove the anchor"),
            proxy_net::tunnel::remove(handle)
                .await
                .context("remove the tunnel devices"),
        ])
    }

    pub fn attachments(&self) -> &Attachments {
        &self.programs.attachments
    }

    /// Returns true once the devices are listed. Until then only the anchor has programs.
    pub fn knows_devices(&self) -> bool {
        self.devices.are_known()
    }

    /// Returns the addresses in use: at most one per family.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.rows.addresses()
    }

    /// Returns the addresses of all devices.
    pub fn own_addresses(&self) -> BTreeSet<IpAddr> {
        self.devices.addresses()
    }

    /// Returns the addresses of devices without a network behind them, with the device of each.
    pub fn kept_addresses(&self) -> BTreeMap<IpAddr, String> {
        self.devices.kept_addresses()
    }

    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Returns the addresses to listen on for a server at the node port addresses. The unspecified
    /// address stands for its whole family.
    pub fn listen_addresses(&self) -> BTreeSet<IpAddr> {
        self.options.node_ports.listen_on(
            self.own_addresses(),
            &self.addresses(),
            sysctl::has_ipv6(),
        )
    }

    pub fn anchor(&self) -> Anchor {
        self.anchor.device()
    }

    pub fn role(&self, ifindex: u32) -> Option<Role> {
        self.devices.role(ifindex)
    }

    /// Returns the reason why a device does not count as a pod's: see
    /// [`proxy_net::role::why_no_pod`].
    pub fn why_no_pod(&self, ifindex: u32) -> Option<String> {
        self.devices.why_no_pod(ifindex)
    }

    /// Returns the state of the fast path: `off`, `on`, or the obstacle.
    pub fn fast_path(&self) -> String {
        self.fast_path.to_string()
    }

    /// Returns true while connections of pods may bypass the stack from their first packet on.
    pub fn opens_bypass_connections(&self) -> bool {
        self.rows.has_bare_pods() && self.fast_path.opens_flows()
    }

    pub fn is_host_mode(&self) -> bool {
        self.host_mode.is_some()
    }

    /// Returns the repairs since the last call.
    pub fn take_repairs(&mut self) -> Repairs {
        std::mem::take(&mut self.repairs)
    }

    /// Notes a change of routes, by kpx or by another program.
    pub fn on_routes(&mut self) {
        self.host_mode.iter_mut().for_each(HostMode::routes_changed);
    }

    /// Processes the kernel's events about devices. A burst costs little more than a single event.
    pub async fn on_links(
        &mut self,
        events: impl IntoIterator<Item = LinkEvent>,
        health: &Health,
    ) -> Result<()> {
        let before = (self.devices.addresses_up(), self.anchor());
        let repaired = self.repairs;
        let judged_names = self.judged_names();
        self.on_routes(); // The kernel silently drops routes with their device or address.
        let listed = self.devices.take(events);
        // The kernel silently drops routes together with their source address.
        let lost = !before.0.is_subset(&self.devices.addresses_up());
        if listed {
            self.devices.ask_for_routes(&self.handle).await;
        }
        let tunnelled = if listed || self.misfits_tunnels() {
            self.fit_tunnels().await
        } else {
            Ok(())
        };
        let judged_again = self.judge_for_devices(&judged_names).await;
        // A device enters the programs' map before it gets programs. A failed part must not stop
        // the other parts.
        let written = self.write_devices();
        self.programs.attach(&self.devices, health);
        let settled = self.settle_tunnels().await;
        let judged = if listed {
            self.judge_fast_path().await
        } else {
            Ok(())
        };
        let inherited = self.end_inheritance();
        let read = if listed {
            self.ranges.read(&self.handle, health).await
        } else {
            Ok(())
        };
        let kept = if listed {
            self.verify_changes()
        } else {
            Ok(())
        };
        let anchor_state = self.fit_anchor(listed).await;
        let verified = if listed {
            self.programs
                .verify(
                    &self.handle,
                    &self.devices,
                    &mut self.repairs,
                    &self.relapses,
                    health,
                )
                .await
        } else {
            Ok(BTreeSet::new())
        };
        let settled_again = self.settle_tunnels().await;
        let updated = self.update_addresses().await;
        let is_new_anchor = *anchor_state.as_ref().unwrap_or(&false);
        let routed = self
            .update_routes(listed || lost || is_new_anchor, health)
            .await;
        // After a change of an address or of the anchor, kpx itself changes routes.
        if let Ok(changed) = routed
            && listed
            && before == (self.devices.addresses_up(), self.anchor())
        {
            self.count_route_repairs(changed);
        }
        if listed {
            let gone = verified.as_ref().map(BTreeSet::clone).unwrap_or_default();
            self.relapses.looked(self.repairs, repaired, gone, health);
        }
        let verified = verified.map(drop);
        all([
            judged_again,
            tunnelled,
            written,
            settled,
            judged,
            inherited,
            read,
            anchor_state.map(drop),
            verified,
            settled_again,
            kept,
            updated,
            routed.map(drop),
        ])
    }

    /// Looks up which backends this host reaches, in host mode.
    pub async fn query_routes(&mut self, desired: &mut Desired, health: &Health) -> Result<()> {
        let Some(host_mode) = self.host_mode.as_mut().filter(|_| self.devices.are_known()) else {
            return Ok(());
        };
        host_mode
            .query_routes(desired, self.devices.links(), self.anchor.ifindex(), health)
            .await?;
        let hooks_lo = desired.has_own_backend();
        if self.programs.hooks_lo != hooks_lo {
            self.programs.hooks_lo = hooks_lo;
            self.programs.attach(&self.devices, health);
        }
        Ok(())
    }

    /// Reads the facts that the node needs before it serves. Returns false while facts are missing,
    /// and an error if the agent must restart.
    pub fn before_sync(&mut self, desired: &Desired, health: &Health) -> Result<bool> {
        // While devices are unknown, no node counts as a neighbour and this node has no address:
        // routes to pods would be removed and made again.
        if (self.is_host_mode() || self.rows.is_inherited()) && !self.knows_devices() {
            return Ok(false);
        }
        // The first pass would remove the tables of handed-over clients.
        if !self.knows_handover() {
            return Ok(false);
        }
        self.detection.learn(&desired.pod_cidrs())?;
        if !self.detection.is_known() {
            health.begin(
                &Problem::LocalPods,
                "the Node object has no podCIDRs yet, and --detect-local-mode needs them",
            );
            return Ok(false);
        }
        if !self.detects {
            self.detects = true;
            self.rows.disinherit();
            match self.write_pods(desired).and_then(|()| self.write_node()) {
                Ok(()) => health.end(&Problem::LocalPods),
                Err(error) => {
                    self.detects = false; // The next sync retries.
                    health.begin(&Problem::LocalPods, format!("{error:#}"));
                }
            }
        } else if !self.rows.knows_pods(&desired.pod_cidrs())
            && let Err(error) = self.write_pods(desired)
        {
            health.begin(&Problem::LocalPods, format!("{error:#}"));
        }
        self.rows.spare_other_proxies(desired);
        Ok(true)
    }

    /// Takes over the cluster's objects after a sync; `written` is set if all frontends are in the
    /// maps. Returns true if [`Node::follow`] has work, and the result of the work done here.
    pub fn on_sync(&mut self, desired: &Desired, written: bool) -> (bool, Result<()>) {
        let given = &self.options.service_cidrs;
        let cidrs = if given.is_empty() {
            desired.service_cidrs()
        } else {
            given
        };
        let is_due = self
            .synced_node
            .begin(desired, cidrs, self.ranges.known_shared())
            || self.ranges.routes.is_none();
        if let Some(host_mode) = &mut self.host_mode {
            host_mode.log(desired);
        }
        // The programs drop packets to addresses in these ranges that have no frontend. So the
        // frontends and the shared networks are written first.
        (
            is_due,
            if written && self.ranges.routes.is_some() {
                self.rows
                    .write_service_nets(cidrs, self.ranges.shared(), desired)
            } else {
                Ok(())
            },
        )
    }

    /// Updates addresses, routes and rules to the state of the last sync. May wait for RTNL.
    pub async fn follow(&mut self, health: &Health) -> Result<()> {
        let updated = self.update_addresses().await;
        let read = if self.ranges.routes.is_some() {
            Ok(())
        } else {
            self.ranges.read(&self.handle, health).await
        };
        let routed = self.update_routes(false, health).await.map(drop);
        let result = all([updated, read, routed]);
        self.synced_node.end(result.is_ok());
        result
    }

    /// Restores missing service routes and rules, and reads the routes in ranges of ClusterIPs. May
    /// wait for RTNL.
    pub async fn repair_routes(&mut self, health: &Health) -> Result<()> {
        let routed = self.update_routes(true, health).await;
        if let Ok(changed) = routed {
            let repaired = self.count_route_repairs(changed);
            self.relapses.note(repaired);
        }
        let read = self.ranges.read(&self.handle, health).await;
        all([routed.map(drop), read])
    }

    /// Restores sysctls outside the anchor, which systemd-sysctl may change whenever it runs.
    fn verify_changes(&mut self) -> Result<()> {
        self.repairs.sysctls += self.programs.verify_changes(&self.devices)?;
        Ok(())
    }

    /// Restores the anchor. Returns true after any change, because the anchor's routes may be lost.
    async fn fit_anchor(&mut self, listed: bool) -> Result<bool> {
        let Some(anchor_state) = self.anchor.fit(self.devices.links(), listed).await? else {
            return Ok(false);
        };
        self.repairs.anchors += u64::from(!anchor_state.was_up);
        self.repairs.sysctls += anchor_state.sysctls;
        let is_new = anchor_state.device != self.anchor.device();
        if is_new {
            let ifindex = anchor_state.device.ifindex;
            if self.relapses.is_news("anchor") {
                warn!(ifindex, "device kpx0 was missing, recreating it");
            }
            self.programs.move_anchor(ifindex)?;
            self.routes = ServiceRoutes::open(&self.handle, anchor_state.device.ifindex).await?;
        }
        self.anchor.set(&anchor_state);
        if is_new {
            self.write_node()?;
        }
        Ok(true)
    }

    /// Updates service routes and rules. With `verify`, reads the kernel's state first.
    async fn update_routes(&mut self, verify: bool, health: &Health) -> Result<RouteChanges> {
        // No change before the first sync: no packet may reach the anchor before frontends exist.
        // The routes of an earlier agent belong to Services that will exist again.
        let Some(desired_node) = self.synced_node.desired_node() else {
            return Ok(RouteChanges::default());
        };
        // No change before the devices have programs: a pod's packets would reach the anchor
        // untranslated.
        if !self.knows_devices() {
            return Ok(RouteChanges::default());
        }
        // No change before the pass that takes over the shared networks. That pass follows at once.
        if self.ranges.routes.is_some() && desired_node.shared != self.ranges.known_shared() {
            return Ok(RouteChanges::default());
        }
        let desired_routes = DesiredRoutes::of(&RouteInputs {
            service_cidrs: &desired_node.service_cidrs,
            shared: &desired_node.shared,
            lone_addresses: &desired_node.lone_addresses,
            external_frontends: &desired_node.external_frontends,
            own: &self.own_addresses(),
            primary: &self.addresses(),
            has_ipv6: sysctl::has_ipv6(),
        });
        self.routes.update(&desired_routes, verify, health).await
    }

    fn count_route_repairs(
        &mut self,
        RouteChanges { routes, rules }: RouteChanges,
    ) -> Option<&'static str> {
        let what = if routes > 0 { "route" } else { "rule" };
        if routes + rules > 0 && self.relapses.is_news(what) {
            warn!(
                routes,
                rules, "restored missing or changed routes to the anchor"
            );
        }
        self.repairs.routes += routes;
        self.repairs.rules += rules;
        (routes + rules > 0).then_some(what)
    }

    async fn update_addresses(&mut self) -> Result<()> {
        if self.rows.is_inherited() {
            return Ok(()); // The cluster's view of this node is not known yet.
        }
        let addrs = (
            self.node_address::<Addr4>().await?,
            self.node_address::<Addr6>().await?,
        );
        if addrs == self.rows.addrs {
            return Ok(());
        }
        info!(ipv4 = ?addrs.0, ipv6 = ?addrs.1, "node addresses");
        let before = std::mem::replace(&mut self.rows.addrs, addrs);
        all([self.write_node(), self.write_addrs()]).inspect_err(|_| self.rows.addrs = before) // The next event retries.
    }

    async fn node_address<A: Addr>(&self) -> Result<A> {
        let mut preferred = self.options.node_ips.clone();
        preferred.extend(
            self.synced_node
                .desired_node()
                .into_iter()
                .flat_map(|node| &node.node_addresses),
        );
        // This look-up lists all routes, so a preferred address replaces it.
        let named = preferred.iter().any(|ip| A::from_ip(*ip).is_some());
        let default_route = if named {
            None
        } else {
            addr::default_route::<A>(&self.handle).await?
        };
        Ok(
            addr::node_address(self.devices.links(), &preferred, default_route)
                .unwrap_or(A::UNSPECIFIED),
        )
    }

    fn write_pods(&mut self, desired: &Desired) -> Result<()> {
        let pod_cidrs = if self.is_host_mode() {
            Vec::new()
        } else {
            desired.pod_cidrs()
        };
        self.judged_rules.set(None); // It held for the old addresses.
        self.rows.write_pods(&self.detection, pod_cidrs)
    }

    fn write_node(&mut self) -> Result<()> {
        let detection = if self.detects {
            self.detection.flags()
        } else {
            0
        };
        let options = self.options.flags() | detection;
        let host = self.fast_path.flag() | self.devices.flags();
        self.rows
            .write_node(self.anchor.device(), NodeFlags { options, host })
    }
}

/// The interface index of lo in every network namespace.
const LO: u32 = 1;
