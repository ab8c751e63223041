//! Builds a trace's input from a folder of manifests, for a hypothetical node that serves these
//! objects.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node, OwnAddr};
use proxy_common::frontend::service_net;
use proxy_common::names;
use tokio::sync::mpsc;

use crate::input::{Entry, Family, Net, Notes, TraceInput, port_names};
use crate::namespace::{self, NodeDevices};
use crate::node::{NodeFlags, NodeRules};
use crate::programs::LO;
use crate::resolve::Known;
use crate::target::{CLIENT_PORT, Target};
use proxy_core::compact::Address;
use proxy_core::desired::Desired;
use proxy_core::model::{self, Cause, SharedNetworks};
use proxy_core::store::Store;
use proxy_datapath::Counts;
use proxy_net::anchor::Anchor;
use proxy_net::{self as net, anchor};
use proxy_source::Source;
use proxy_source::events::Queue;
use proxy_source::health::Health;
use proxy_source::nodes::NodeQuestions;
use proxy_source::peers::Peering;
use proxy_view::{Names, frontend_names, views};

/// The objects of a folder, and the node derived from them.
pub(crate) struct Folder<R> {
    desired: Desired,
    /// The rules of the node, from the options of `kpx run`.
    rules: R,
    /// The networks inside ClusterIP ranges that also hold other addresses.
    shared: Vec<IpNet>,
    node_addrs: Vec<IpAddr>,
    pod_nets: Vec<IpNet>,
    notes: Vec<String>,
}

impl<R: NodeRules> Folder<R> {
    /// Reads the objects once.
    pub(crate) async fn read(
        dir: &Path,
        node_name: &str,
        args: &impl NodeFlags<Rules = R>,
    ) -> Result<Self> {
        let (mut rules, model) = args.rules()?;
        let health = Health::default();
        let (sender, mut inputs) = mpsc::channel(Self::KINDS);
        let source = Source::Manifests(PathBuf::from(dir));
        let mut desired = Desired::with_options(node_name, model);
        let take = async {
            while !desired.is_complete() {
                desired.apply(inputs.recv().await.context("read the folder's objects")?);
            }
            Ok(())
        };
        tokio::select! {
            taken = take => taken,
            ended = source.run(Some(node_name.to_owned()), sender, health.clone(), Queue::none(), NodeQuestions::none(), Peering::Off) => ended.and_then(|()| bail!("the folder has ended")),
        }?;
        // Manifests have no routes.
        let shared = SharedNetworks::of(ranges(&rules, &desired), &desired.pod_cidrs(), &[]);
        desired.share_networks(&shared.networks);
        let mut notes: Vec<_> = health
            .problems()
            .iter()
            .map(|(what, problem)| format!("{what}: {}", problem.why))
            .collect();
        desired.sync();
        let store = desired.store();
        if store.node().is_none() {
            notes.push(format!(
                "Node {node_name} does not exist: no addresses, pod CIDRs or zone"
            ));
        }
        let node_addrs = store.node().map(model::node_addresses).unwrap_or_default();
        let mut pod_nets = store.node().map(model::pod_cidrs).unwrap_or_default();
        pod_nets.extend(local_pods(store, &node_addrs).map(IpNet::from));
        // The address family decides which conflicts matter.
        notes.extend(shared.why);
        let unreadable = desired
            .skipped()
            .filter(|skipped| skipped.cause != Cause::Conflict);
        notes.extend(unreadable.map(ToString::to_string));
        rules.learn(&desired.pod_cidrs())?;
        Ok(Self {
            desired,
            rules,
            shared: shared.networks,
            node_addrs,
            pod_nets,
            notes,
        })
    }

    /// Returns the objects that an argument may name: the node, and the folder's Services.
    pub(crate) fn known(&self) -> Known {
        let services = views(&self.desired.snapshot(), &Counts::default());
        let node_name = self.desired.store().node_name().to_owned();
        Known {
            services,
            node_name,
            node_addresses: self.node_addrs.clone(),
        }
    }

    /// The number of object kinds. The first input of a kind has all its objects.
    const KINDS: usize = 4;

    /// Creates the node's devices in this thread's namespace, and returns the programs' rows. If
    /// `from` is `None`, the host sends the packet from the node's address.
    pub(crate) async fn input<A: Family>(
        self,
        from: Option<SocketAddr>,
        host: bool,
        to: &Target,
    ) -> Result<(TraceInput<A>, SocketAddr)> {
        let (driver, handle) = net::connect()?;
        let node_devices = tokio::select! {
            node_devices = namespace::make(&handle, &self.node_addrs, &self.pod_nets) => node_devices?,
            () = driver => bail!("the netlink socket has failed"),
        };
        let own = || {
            self.desired
                .node()
                .primary
                .iter()
                .copied()
                .find(|addr| A::from_ip(*addr).is_some())
        };
        let from = match from {
            Some(from) => from,
            None => SocketAddr::new(
                own().with_context(|| format!("the node has no {} address", A::FAMILY))?,
                CLIENT_PORT,
            ),
        };
        let tables = A::tables(self.desired.tables());
        let snapshot = self.desired.snapshot();
        let conflicts = A::conflicts(&snapshot)
            .values()
            .flatten()
            .map(ToString::to_string);
        let mut notes = Notes::default();
        notes.warn(self.notes.iter().cloned().chain(conflicts));
        let input = TraceInput {
            node_name: self.desired.store().node_name().to_owned(),
            tables: tables.clone(),
            node: self.node(&node_devices),
            devices: self.devices(&node_devices),
            addrs: self.addrs(&node_devices),
            pods: nets(&self.rules.detected()),
            service_nets: self.service_nets(),
            generation: 0,
            affinity: BTreeMap::new(),
            connections: BTreeMap::new(),
            shares: None,
            names: port_names(&Names::new(frontend_names(&snapshot)), tables),
            entry: self.entry(from.ip(), host, to, &node_devices),
            notes,
            mark: 0,
            external_client_note: None,
            outside: None,
        };
        Ok((input, from))
    }

    fn service_nets<A: Family>(&self) -> Vec<(Net<A>, u32)> {
        let cidrs = ranges(&self.rules, &self.desired);
        let others: Vec<_> = self
            .desired
            .of_other_proxies()
            .iter()
            .map(|addr| IpNet::from(*addr))
            .collect();
        let ranges = nets(cidrs).into_iter().map(|net| (net, service_net::RANGE));
        let ranges = ranges.chain(
            nets(&self.shared)
                .into_iter()
                .map(|net| (net, service_net::SHARED)),
        );
        ranges
            .chain(
                nets(&others)
                    .into_iter()
                    .map(|net| (net, service_net::OF_OTHER_PROXY)),
            )
            .collect()
    }

    fn node(&self, node_devices: &NodeDevices) -> Node {
        let Anchor { ifindex, mac } = node_devices.anchor;
        Node::new(
            self.primary(),
            self.primary(),
            ifindex,
            mac,
            self.rules.flags(),
        )
    }

    /// Returns the devices. The pods' device has `DETECTED` if local pods are detected by device.
    fn devices(&self, node_devices: &NodeDevices) -> BTreeMap<u32, Device> {
        let by_device = self.rules.detects_by_device();
        let pods = Device::POD | if by_device { Device::DETECTED } else { 0 };
        BTreeMap::from([
            (
                node_devices.uplink,
                Device::new(0, self.primary(), self.primary()),
            ),
            (
                node_devices.pods,
                Device::new(pods, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED),
            ),
        ])
    }

    fn addrs<A: Addr>(&self, node_devices: &NodeDevices) -> BTreeMap<A, OwnAddr> {
        let localhosts = [
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
        ];
        let addrs = self
            .node_addrs
            .iter()
            .chain(&localhosts)
            .filter_map(|addr| {
                let serves = self
                    .rules
                    .serves_node_ports(*addr, &self.desired.node().primary);
                Some((
                    A::from_ip(*addr)?,
                    OwnAddr::new(
                        node_devices.uplink,
                        if serves { OwnAddr::NODE_PORTS } else { 0 },
                    ),
                ))
            });
        addrs.collect()
    }

    fn primary<A: Addr>(&self) -> A {
        self.desired
            .node()
            .primary
            .iter()
            .find_map(|addr| A::from_ip(*addr))
            .unwrap_or(A::UNSPECIFIED)
    }

    fn entry(&self, from: IpAddr, host: bool, to: &Target, node_devices: &NodeDevices) -> Entry {
        let entry = |program, device: &str, ifindex| Entry {
            program,
            device: device.to_owned(),
            ifindex,
        };
        let is_own = |addr: IpAddr| addr.is_loopback() || self.node_addrs.contains(&addr);
        if host || is_own(from) {
            if is_own(to.addr.ip()) {
                entry(names::LO, "lo", LO)
            } else {
                entry(names::ANCHOR, anchor::NAME, node_devices.anchor.ifindex)
            }
        } else if self.pod_nets.iter().any(|net| net.contains(&from)) {
            entry(names::INGRESS, namespace::PODS, node_devices.pods)
        } else {
            entry(names::INGRESS, namespace::UPLINK, node_devices.uplink)
        }
    }
}

fn nets<A: Family>(nets: &[IpNet]) -> Vec<Net<A>> {
    nets.iter()
        .filter_map(|net| Some((net.prefix_len().into(), A::from_ip(net.network())?)))
        .collect()
}

/// Returns the endpoints on the node, without the node's own addresses.
fn local_pods(store: &Store, node_addrs: &[IpAddr]) -> impl Iterator<Item = IpAddr> {
    let endpoints = store.slices().flat_map(|slice| &slice.endpoints);
    let local =
        endpoints.filter(|endpoint| endpoint.node_name.as_deref() == Some(store.node_name()));
    let addrs = local.filter_map(|endpoint| match endpoint.address {
        Address::Ip(addr) => Some(addr),
        Address::Text(_) | Address::Missing => None,
    });
    addrs.filter(|addr| !node_addrs.contains(addr))
}

/// Returns the ClusterIP ranges: the operator's ranges, otherwise the cluster's.
fn ranges<'a>(rules: &'a impl NodeRules, desired: &'a Desired) -> &'a [IpNet] {
    match rules.service_cidrs() {
        [] => desired.service_cidrs(),
        given => given,
    }
}
