//! Finds the networks in the ranges of ClusterIPs that also have another use: the node's routes, or
//! pods.

use anyhow::{Context, Result};
use ipnet::IpNet;

use proxy_core::desired::Desired;
use proxy_core::model::SharedNetworks;
use proxy_net::{Handle, WatchedNets, fib};
use proxy_source::health::{Health, Problem};

use super::Node;

impl Node {
    /// Passes the shared networks in ranges of ClusterIPs to the model. Returns true if a Service
    /// may change.
    pub fn share_networks(&mut self, desired: &mut Desired) -> bool {
        let given = &self.options.service_cidrs;
        let cidrs = if given.is_empty() {
            desired.service_cidrs()
        } else {
            given
        };
        let pods = self
            .detection
            .nets()
            .into_iter()
            .chain(desired.pod_cidrs())
            .collect();
        let is_news = self.ranges.learn(cidrs, pods);
        desired.share_networks(self.ranges.shared()) || is_news
    }
}

#[derive(Default)]
pub(super) struct Ranges {
    /// The ranges of ClusterIPs and the networks of pods, as of the last pass.
    cidrs: Vec<IpNet>,
    pods: Vec<IpNet>,
    /// The node's routes within the ranges. `None` until they are read for the current ranges.
    pub(super) routes: Option<Vec<IpNet>>,
    shared: SharedNetworks,
    /// The networks of the route watch, limited to the ranges. `None` if the watch covers all
    /// routes.
    watched: Option<WatchedNets>,
    /// Set when routes are first read for the ranges: the programs need the ranges then.
    is_news: bool,
}

impl Ranges {
    pub(super) fn of(cidrs: &[IpNet], watched: Option<WatchedNets>) -> Self {
        watched.iter().for_each(|watched| watched.set(cidrs));
        Self {
            cidrs: cidrs.to_vec(),
            watched,
            ..Self::default()
        }
    }

    /// Takes in the ranges and the networks of pods. Returns true if routes were first read since
    /// the last call.
    pub(super) fn learn(&mut self, cidrs: &[IpNet], pods: Vec<IpNet>) -> bool {
        if self.cidrs != cidrs {
            self.cidrs = cidrs.to_vec();
            self.watched.iter().for_each(|watched| watched.set(cidrs));
            self.routes = cidrs.is_empty().then(Vec::new);
        }
        self.pods = pods;
        self.judge();
        std::mem::take(&mut self.is_news)
    }

    /// Reads the node's routes. May wait for RTNL.
    pub(super) async fn read(&mut self, handle: &Handle, health: &Health) -> Result<()> {
        let routes = fib::networks_within(handle, &self.cidrs)
            .await
            .context("read the routes in ranges of ClusterIPs")?;
        self.is_news |= self.routes.replace(routes).is_none();
        self.judge();
        match &self.shared.why {
            Some(why) => health.begin(&Problem::ServiceRanges, why),
            None => health.end(&Problem::ServiceRanges),
        }
        Ok(())
    }

    pub(super) fn shared(&self) -> &[IpNet] {
        &self.shared.networks
    }

    /// Returns the shared networks, empty until the routes are read.
    pub(super) fn known_shared(&self) -> &[IpNet] {
        if self.routes.is_some() {
            &self.shared.networks
        } else {
            &[]
        }
    }

    /// Evaluates which networks are shared. Until the routes are read, all ranges count as shared,
    /// so that no packet is dropped.
    fn judge(&mut self) {
        self.shared = match &self.routes {
            Some(routes) => SharedNetworks::of(&self.cidrs, &self.pods, routes),
            None => SharedNetworks {
                networks: self.cidrs.clone(),
                why: None,
            },
        };
    }
}
