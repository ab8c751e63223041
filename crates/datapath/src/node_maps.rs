//! Writes the maps that describe this node to the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use anyhow::{Context, Result, bail};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, MapError};
use aya::{Ebpf, Pod};
use ipnet::IpNet;
use nix::sys::socket::AddressFamily;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node, OwnAddr, pod_net};
use proxy_common::flow::AnyKey;
use proxy_common::frontend::service_net;
use proxy_common::names;
use proxy_common::peer::{Peer, PeerKey};

use super::fast_path_ways::FastPathWays;
use super::maps::{FamilyNames, take};
use super::sys::map_walk::Walk;

/// The number of rows read at once.
const BATCH: usize = 1_024;

pub struct NodeMaps {
    node: Array<MapData, Node>,
    devices: HashMap<MapData, u32, Device>,
    peers: HashMap<MapData, PeerKey, Peer>,
    handed_over: HashMap<MapData, AnyKey, PeerKey>,
    /// An iteration over `handed_over`, which the programs change meanwhile.
    connections: Walk<AnyKey, PeerKey>,
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    ways: FastPathWays,
}

struct Family<A: FamilyNames> {
    addrs: HashMap<MapData, A, OwnAddr>,
    pods: LpmTrie<MapData, A, u32>,
    service_cidrs: LpmTrie<MapData, A, u32>,
}

impl NodeMaps {
    pub(super) fn new(ebpf: &mut Ebpf, ways: FastPathWays) -> Result<Self> {
        let node = take(ebpf, names::NODE)?;
        let devices = take(ebpf, names::DEVICES)?;
        let Some(Map::LruHashMap(connections)) = ebpf.map(names::HANDED_OVER) else {
            bail!("no LRU map {} in the BPF object", names::HANDED_OVER)
        };
        let connections = Walk::new(connections, BATCH)
            .with_context(|| format!("open {}", names::HANDED_OVER))?;
        Ok(Self {
            node,
            devices,
            peers: take(ebpf, names::PEERS)?,
            handed_over: take(ebpf, names::HANDED_OVER)?,
            connections,
            v4: Family::new(ebpf)?,
            v6: Family::new(ebpf)?,
            ways,
        })
    }

    /// Returns the predecessor's description of the node; `None` if there is none.
    pub fn node(&self) -> Result<Option<Node>> {
        let node = self
            .node
            .get(&0, 0)
            .with_context(|| format!("read {}", names::NODE))?;
        Ok(Some(node)
            .filter(|node| node.addr4 != Addr4::UNSPECIFIED || node.addr6 != Addr6::UNSPECIFIED))
    }

    pub fn set_node(&mut self, node: Node) -> Result<()> {
        self.node.set(0, node, 0).context("write NODE")
    }

    /// Makes the kernel's device table equal to `want`.
    pub fn set_devices(&mut self, want: &BTreeMap<u32, Device>) -> Result<()> {
        replace(&mut self.devices, want, names::DEVICES)
    }

    /// Returns the row with the tunnel devices; `None` if packets are not handed over.
    pub fn tunnels(&self) -> Result<Option<Device>> {
        match self.devices.get(&Device::TUNNELS, 0) {
            Err(MapError::KeyNotFound) => Ok(None),
            row => row
                .map(Some)
                .with_context(|| format!("read {}", names::DEVICES)),
        }
    }

    /// Returns the node's own addresses that are addresses of its Node object.
    pub fn addrs_of_node_object(&self) -> Result<BTreeSet<IpAddr>> {
        let mut found = self.v4.addrs_of_node_object()?;
        found.append(&mut self.v6.addrs_of_node_object()?);
        Ok(found)
    }

    /// Makes the kernel's table of the nodes that hand over packets equal to `nodes`: the addresses of
    /// each, by name.
    pub fn set_peers(&mut self, nodes: &BTreeMap<String, Vec<IpAddr>>) -> Result<()> {
        let rows = nodes.iter().flat_map(|(name, addrs)| {
            let mut hasher = DefaultHasher::new();
            name.hash(&mut hasher);
            let peer = Peer {
                node: hasher.finish(),
            };
            addrs.iter().map(move |addr| (peer_key(*addr), peer))
        });
        replace(&mut self.peers, &rows.collect(), names::PEERS)
    }

    /// Keeps the memory of connections that were handed over to these addresses of nodes. The packets
    /// of all others go by the tables of their Services.
    pub fn keep_handed_over(&mut self, nodes: &BTreeSet<IpAddr>) -> Result<()> {
        let nodes: BTreeSet<_> = nodes.iter().copied().map(peer_key).collect();
        let mut lost = Vec::new();
        self.connections.restart();
        while let Some(batch) = self
            .connections
            .next_batch()
            .with_context(|| format!("read {}", names::HANDED_OVER))?
        {
            let of_others = batch.filter(|(_, node)| !nodes.contains(node));
            lost.extend(of_others.map(|(connection, _)| connection));
        }
        for connection in lost {
            match self.handed_over.remove(&connection) {
                // A program may have evicted the row.
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("write {}", names::HANDED_OVER));
                }
            }
        }
        Ok(())
    }

    /// Makes the kernel's table of the node's own addresses, with the device of each, equal to
    /// `want`.
    pub fn set_addrs(&mut self, want: &BTreeMap<IpAddr, OwnAddr>) -> Result<()> {
        replace(&mut self.v4.addrs, &of_family(want), names::IPV4.addrs)?;
        replace(&mut self.v6.addrs, &of_family(want), names::IPV6.addrs)
    }

    /// Makes the kernel's pod networks equal to the given lists: networks for local-traffic
    /// detection, the Node object's podCIDRs, and networks within which the network stack leaves
    /// packets unchanged. Programs then recheck the flows that bypass the stack.
    pub fn set_pods(
        &mut self,
        detected: &[IpNet],
        node_cidrs: &[IpNet],
        unchanged: &[IpNet],
    ) -> Result<()> {
        let flags = |net: &IpNet| {
            let is_in = |nets: &[IpNet]| nets.iter().any(|other| other.contains(net));
            let of = |is_set, flag| if is_set { flag } else { 0 };
            of(is_in(detected), pod_net::DETECTED)
                | of(is_in(node_cidrs), pod_net::NODE_CIDR)
                | of(is_in(unchanged), pod_net::UNCHANGED)
        };
        let want = detected
            .iter()
            .chain(node_cidrs)
            .chain(unchanged)
            .map(|net| (*net, flags(net)))
            .collect();
        let written = replace_nets(&mut self.v4.pods, &want, names::IPV4.pods)
            .and_then(|()| replace_nets(&mut self.v6.pods, &want, names::IPV6.pods));
        // Needed even after a partial write: programs may have checked flows against the old
        // networks in this second.
        let begun = self.ways.begin_epoch();
        written.and(begun)
    }

    /// Makes the kernel's ClusterIP ranges equal to `want`. The programs then drop packets to
    /// addresses in these ranges without a frontend.
    pub fn set_service_cidrs(&mut self, want: &[IpNet]) -> Result<()> {
        self.set_service_nets(want, &[], &BTreeSet::new())
    }

    /// Sets the ranges, and excludes shared networks in them and the ClusterIPs that other proxies
    /// serve. The programs let packets to excluded addresses pass unless there is a frontend.
    pub fn set_service_nets(
        &mut self,
        cidrs: &[IpNet],
        shared: &[IpNet],
        of_other_proxies: &BTreeSet<IpAddr>,
    ) -> Result<()> {
        let ranges = cidrs.iter().map(|net| (*net, service_net::RANGE));
        let shared = shared.iter().map(|net| (*net, service_net::SHARED));
        let others = of_other_proxies
            .iter()
            .map(|addr| (IpNet::from(*addr), service_net::OF_OTHER_PROXY));
        let want: BTreeMap<IpNet, u32> = ranges.chain(shared).chain(others).collect();
        replace_nets(&mut self.v4.service_cidrs, &want, names::IPV4.service_cidrs)?;
        replace_nets(&mut self.v6.service_cidrs, &want, names::IPV6.service_cidrs)
    }
}

impl<A: FamilyNames> Family<A> {
    fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self {
            addrs: take(ebpf, A::MAPS.addrs)?,
            pods: take(ebpf, A::MAPS.pods)?,
            service_cidrs: take(ebpf, A::MAPS.service_cidrs)?,
        })
    }

    fn addrs_of_node_object(&self) -> Result<BTreeSet<IpAddr>> {
        let mut found = BTreeSet::new();
        for row in self.addrs.iter() {
            let (addr, own) = row.with_context(|| format!("read {}", A::MAPS.addrs))?;
            if own.is_of_node_object() {
                found.insert(addr.ip());
            }
        }
        Ok(found)
    }
}

fn peer_key(addr: IpAddr) -> PeerKey {
    let (addr, family) = match addr {
        IpAddr::V4(addr) => (
            [u32::from_ne_bytes(addr.octets()), 0, 0, 0],
            AddressFamily::Inet,
        ),
        IpAddr::V6(addr) => {
            let mut words = [0; 4];
            for (word, bytes) in words.iter_mut().zip(addr.octets().as_chunks::<4>().0) {
                *word = u32::from_ne_bytes(*bytes);
            }
            (words, AddressFamily::Inet6)
        }
    };
    PeerKey {
        addr,
        family: family as u32,
    }
}

fn of_family<A: Addr>(addrs: &BTreeMap<IpAddr, OwnAddr>) -> BTreeMap<A, OwnAddr> {
    addrs
        .iter()
        .filter_map(|(addr, own)| Some((A::from_ip(*addr)?, *own)))
        .collect()
}

/// Writes the differences. Writes come before deletions, so a changed row is never missing.
fn replace<K, V>(map: &mut HashMap<MapData, K, V>, want: &BTreeMap<K, V>, name: &str) -> Result<()>
where
    K: Pod + Ord,
    V: Pod + PartialEq,
{
    let now: BTreeMap<K, V> = map
        .iter()
        .collect::<Result<_, _>>()
        .with_context(|| format!("read {name}"))?;
    for (key, value) in want
        .iter()
        .filter(|(key, value)| now.get(key) != Some(value))
    {
        map.insert(key, value, 0)
            .with_context(|| format!("write {name}"))?;
    }
    for key in now.keys().filter(|key| !want.contains_key(key)) {
        map.remove(key)
            .with_context(|| format!("delete from {name}"))?;
    }
    Ok(())
}

/// Replaces the rows of an LPM map like [`replace`], and skips networks of the other family. Longer
/// prefixes are written first and removed last, because they are exceptions to wider prefixes.
fn replace_nets<A: FamilyNames>(
    map: &mut LpmTrie<MapData, A, u32>,
    want: &BTreeMap<IpNet, u32>,
    name: &str,
) -> Result<()> {
    let rows = map
        .iter()
        .collect::<Result<Vec<(Key<A>, u32)>, MapError>>()
        .with_context(|| format!("read {name}"))?;
    let now: BTreeMap<(u32, A), u32> = rows
        .into_iter()
        .map(|(key, value)| ((key.prefix_len(), key.data()), value))
        .collect();
    let want: BTreeMap<(u32, A), u32> = want
        .iter()
        .filter_map(|(net, value)| {
            Some((
                (u32::from(net.prefix_len()), A::from_ip(net.network())?),
                *value,
            ))
        })
        .collect();
    for ((bits, addr), value) in want
        .iter()
        .rev()
        .filter(|(net, value)| now.get(net) != Some(value))
    {
        map.insert(&Key::new(*bits, *addr), value, 0)
            .with_context(|| format!("write {name}"))?;
    }
    for (bits, addr) in now.keys().filter(|net| !want.contains_key(net)) {
        map.remove(&Key::new(*bits, *addr))
            .with_context(|| format!("delete from {name}"))?;
    }
    Ok(())
}
