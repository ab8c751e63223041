//! Maintains this node: the devices that carry programs, the anchor, the service routes, and the
//! programs' knowledge of the node.

mod anchor;
mod desired_node;
pub mod detect;
mod device_rows;
mod devices;
mod fast_path;
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
mod whole_connections;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context, Result};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_core::desired::Desired;
use proxy_datapath::{Attachments, NodeMaps, WholeFlows};
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
    /// Set once the programs can detect local pods, as far as that is possible.
    detects: bool,
    fast_path: FastPathState,
    whole_flows: WholeFlows,
    /// The state of rules for which that holds.
    judged_rules: JudgedRules,
    /// The rules have to be judged again for a pod's device that is new.
    judges_pods: bool,
    /// This is no node.
    host_mode: Option<HostMode>,
    /// The desired state of this node as of the last sync.
    synced_node: SyncedNode,
    /// The repairs since the last query.
    repairs: Repairs,
    relapses: Relapses,
    refusals: Vec<String>,
}

impl Node {
    /// Makes the anchor. Devices get their programs as soon as [`Node::on_links`] hears of them.
    /// `watched` gets the networks in which the watch of routes looks for them.
    pub async fn start(
        options: NodeOptions,
        handle: Handle,
        attachments: Attachments,
        maps: NodeMaps,
        whole_flows: WholeFlows,
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
        let mut node = Self {
            // A host in host mode has no pods to detect, and no Node object with their networks.
            detection: if is_node {
                Detection::new(options.detector.clone())
            } else {
                Detection::default()
            },
            host_mode: options
                .pod_routing
                .map(|routing| HostMode::new(handle.clone(), routing)),
            fast_path: FastPathState::new(options.fast_path, rows.inherits_whole_flows()),
            whole_flows,
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
        };
        node.write_node()?;
        Ok(node)
    }

    /// Takes the programs off all devices. Otherwise they stay.
    pub fn detach(self) {
        self.programs.attachments.detach_all();
    }

    /// Removes rules, routes and anchor, including those of earlier processes.
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
        ])
    }

    pub fn attachments(&self) -> &Attachments {
        &self.programs.attachments
    }

    /// Returns true if the devices have been listed. Until then only the anchor has programs.
    pub fn knows_devices(&self) -> bool {
        self.devices.are_known()
    }

    /// Returns the addresses in force, as far as there are any.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.rows.addresses()
    }

    /// Returns the addresses of all devices.
    pub fn own_addresses(&self) -> BTreeSet<IpAddr> {
        self.devices.addresses()
    }

    /// Returns the addresses whose packets the host keeps, with the device that has each.
    pub fn kept_addresses(&self) -> BTreeMap<IpAddr, String> {
        self.devices.kept_addresses()
    }

    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Returns the addresses to listen on for a service that is reachable at the same addresses as
    /// node ports. The unspecified address stands for all of its family.
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

    /// Returns the state of the fast path on this node: `off`, `on`, or the obstacle that was
    /// found.
    pub fn fast_path(&self) -> String {
        self.fast_path.to_string()
    }

    /// Returns true while connections of pods may skip the stack from their first packet on.
    pub fn opens_whole_connections(&self) -> bool {
        self.rows.has_bare_pods() && self.fast_path.opens_flows()
    }

    /// Returns true if this host is not a node.
    pub fn is_host_mode(&self) -> bool {
        self.host_mode.is_some()
    }

    /// Returns the repairs since the last call.
    pub fn take_repairs(&mut self) -> Repairs {
        std::mem::take(&mut self.repairs)
    }

    /// Notes that routes have changed, by kpx or by others.
    pub fn on_routes(&mut self) {
        self.host_mode.iter_mut().for_each(HostMode::routes_changed);
    }

    /// Takes in the kernel's events about devices: a burst costs little more than a single change.
    pub async fn on_links(
        &mut self,
        events: impl IntoIterator<Item = LinkEvent>,
        health: &Health,
    ) -> Result<()> {
        let before = (self.devices.addresses_up(), self.anchor());
        let repaired = self.repairs;
        let judged_names = self.judged_names();
        self.on_routes(); // With a device or an address the kernel drops routes, without a message.
        let listed = self.devices.take(events);
        // The kernel drops routes with the address that they have as source, and says nothing.
        let lost = !before.0.is_subset(&self.devices.addresses_up());
        if listed {
            self.devices.ask_for_routes(&self.handle).await;
        }
        let judged_again = self.judge_for_devices(&judged_names).await;
        // The programs' map has a device before the device has programs. A failing part must not
        // keep others from work.
        let written = self.write_devices();
        self.programs.attach(&self.devices, health);
        let judged = if listed {
            self.judge_fast_path().await
        } else {
            Ok(())
        };
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
        let updated = self.update_addresses().await;
        let is_new_anchor = *anchor_state.as_ref().unwrap_or(&false);
        let routed = self
            .update_routes(listed || lost || is_new_anchor, health)
            .await;
        // A change that follows an address or the anchor is not another program's.
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
            written,
            judged,
            read,
            anchor_state.map(drop),
            verified,
            kept,
            updated,
            routed.map(drop),
        ])
    }

    /// Finds out what this host reaches, if it is no node.
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

    /// Takes in the facts that must be known before the node serves. Returns false while they are
    /// missing, and an error if the agent must restart.
    pub fn before_sync(&mut self, desired: &Desired, health: &Health) -> Result<bool> {
        // Without devices no node is a neighbour, so routes to pods would go and come back, and the
        // node loses its address.
        if (self.is_host_mode() || self.rows.is_inherited()) && !self.knows_devices() {
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
                    self.detects = false; // The next sync tries again.
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

    /// Takes in the cluster's objects after a sync; `written` is set if all frontends are in the
    /// maps. Returns true if there is work for [`Node::follow`], beside the result of what is done
    /// here.
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
        // Packets into these ranges that meet no frontend are dropped, so the frontends are written
        // first, and what else is there is known.
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

    /// Brings addresses, routes and rules up to date with the last sync. It may wait for the
    /// kernel's lock of devices.
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

    /// Puts service routes and rules back that are gone, and reads the routes in ranges of
    /// ClusterIPs. It may wait for the kernel's lock of devices.
    pub async fn repair_routes(&mut self, health: &Health) -> Result<()> {
        let routed = self.update_routes(true, health).await;
        if let Ok(changed) = routed {
            let repaired = self.count_route_repairs(changed);
            self.relapses.note(repaired);
        }
        let read = self.ranges.read(&self.handle, health).await;
        all([routed.map(drop), read])
    }

    /// Sets parameters beside the anchor's back, which systemd-sysctl may change whenever it is
    /// run.
    fn verify_changes(&mut self) -> Result<()> {
        self.repairs.sysctls += self.programs.verify_changes(&self.devices)?;
        Ok(())
    }

    /// Makes the anchor as it should be. True if anything was done: then routes may have been lost.
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
                warn!(ifindex, "the anchor was missing, recreating it");
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

    /// Makes the ways to the anchor what they should be. `verify` asks the kernel first what there
    /// is.
    async fn update_routes(&mut self, verify: bool, health: &Health) -> Result<RouteChanges> {
        // Routes are left alone before the first sync: no packet may reach the anchor before
        // frontends exist. A predecessor's routes lead to services that will exist again.
        let Some(desired_node) = self.synced_node.desired_node() else {
            return Ok(RouteChanges::default());
        };
        // Nor before the devices have their programs: what a pod sends would come to the anchor
        // untranslated.
        if !self.knows_devices() {
            return Ok(RouteChanges::default());
        }
        // Nor before the pass that knows what else is in the ranges. It follows at once.
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

    /// Counts repairs, and returns what was repaired.
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
        all([self.write_node(), self.write_addrs()]).inspect_err(|_| self.rows.addrs = before) // The next event tries again.
    }

    async fn node_address<A: Addr>(&self) -> Result<A> {
        let mut preferred = self.options.node_ips.clone();
        preferred.extend(
            self.synced_node
                .desired_node()
                .into_iter()
                .flat_map(|node| &node.node_addresses),
        );
        // This lookup lists all routes, so it is left out where an address is named.
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
        self.judged_rules.set(None); // For other addresses.
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

/// The interface index of lo, in every network namespace.
const LO: u32 = 1;
