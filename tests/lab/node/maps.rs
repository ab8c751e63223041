//! The contents of kpx's maps.

use std::collections::BTreeMap;
use std::hash::Hash;

use anyhow::{Context, Result};
use aya::Pod;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{Array, HashMap, Map, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node, OwnAddr};
use testbed::agent::Agent;

/// Returns the node's own addresses; `*` marks an address that takes node ports.
pub(crate) fn own_addresses(kpx: &Agent) -> Result<Vec<String>> {
    let shown = |(addr, own): (String, OwnAddr)| {
        if own.takes_node_ports() {
            addr + "*"
        } else {
            addr
        }
    };
    let v4 = hash::<Addr4, OwnAddr>(open(kpx, "ADDRS4")?)?
        .into_iter()
        .map(text);
    let v6 = hash::<Addr6, OwnAddr>(open(kpx, "ADDRS6")?)?
        .into_iter()
        .map(text);
    Ok(v4.chain(v6).map(shown).collect())
}

/// Returns the networks in the IPv4 and IPv6 maps of this name (`PODS` or `SERVICE_CIDRS`).
pub(crate) fn nets(kpx: &Agent, map: &str) -> Result<Vec<String>> {
    let v4 = family_nets::<Addr4>(open(kpx, &format!("{map}4"))?)?;
    let v6 = family_nets::<Addr6>(open(kpx, &format!("{map}6"))?)?;
    Ok([v4, v6].concat())
}

/// Returns for each of these flags whether `NODE` has it.
pub(crate) fn flags<const N: usize>(kpx: &Agent, flags: [u32; N]) -> Result<[bool; N]> {
    let map: Array<MapData, Node> = open(kpx, "NODE")?.try_into()?;
    let node = map.get(&0, 0)?;
    Ok(flags.map(|flag| node.has(flag)))
}

/// Returns the names of the devices that lead to detected pods.
pub(crate) fn detected(kpx: &Agent) -> Result<Vec<String>> {
    let devices = hash::<u32, Device>(open(kpx, "DEVICES")?)?;
    let names = kpx
        .typed_status()?
        .devices
        .into_iter()
        .map(|device| (device.ifindex, device.name));
    let names: BTreeMap<u32, String> = names.collect();
    let detected = devices
        .iter()
        .filter(|(_, device)| device.is_detected())
        .map(|(ifindex, _)| names.get(ifindex));
    let mut detected: Vec<String> = detected.flatten().cloned().collect();
    detected.sort();
    Ok(detected)
}

fn open(kpx: &Agent, name: &str) -> Result<Map> {
    let id = *kpx
        .typed_status()?
        .maps
        .get(name)
        .with_context(|| format!("no map {name}"))?;
    Ok(Map::from_map_data(MapData::from_id(id)?)?)
}

fn text<A: Addr, V>((addr, value): (A, V)) -> (String, V) {
    (addr.ip().to_string(), value)
}

fn hash<K: Pod + Ord + Hash, V: Pod>(map: Map) -> Result<BTreeMap<K, V>> {
    let map: HashMap<MapData, K, V> = map.try_into()?;
    Ok(map.iter().collect::<Result<_, _>>()?)
}

fn family_nets<A: Addr + Pod>(map: Map) -> Result<Vec<String>> {
    let map: LpmTrie<MapData, A, u32> = map.try_into()?;
    let rows = map.iter().collect::<Result<Vec<_>, _>>()?;
    // Other bits mark networks with another origin.
    let counted = rows.iter().filter(|(_, value)| value & 1 != 0);
    let mut nets: Vec<_> = counted
        .map(|(key, _)| format!("{}/{}", key.data().ip(), key.prefix_len()))
        .collect();
    nets.sort();
    Ok(nets)
}
