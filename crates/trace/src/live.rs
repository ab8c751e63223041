//! Builds a trace's input from a running agent: the rows of its maps, and the packet's first hook.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use aya::Pod;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, MapError};
use nix::net::if_::{if_indextoname, if_nametoindex};
use proxy_common::addr::Proto;
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::connect::Connects;
use proxy_common::counter::Reason;
use proxy_common::device::{HANDED_OVER_MARK, pod_net};
use proxy_common::frontend::{
    EndpointKey, FrontendKey, Maglev, Service, Set, SetKey, SlotKey, SourceRange,
};
use proxy_common::hook::SlowProgram;
use proxy_common::names;
use proxy_common::share;

use crate::input::{Entry, Family, Net, Notes, Shares, TraceInput, port_names};
use crate::outside_reach::Outside;
use crate::programs::{LO, sock_addr};
use crate::resolve::Known;
use crate::target::{CLIENT_PORT, Target};
use proxy_core::tables::{FamilyTables, RangeKey};
use proxy_datapath as datapath;
use proxy_net::next_hop::{NextHop, next_hop};
use proxy_net::role::TELL_PODS;
use proxy_net::{self as net, anchor};
use proxy_source::health::Problem;
use proxy_view::Names;
use proxy_view::client::Client;
use proxy_view::status::Status;

/// The packet's origin, from the command line.
pub(crate) struct PacketArgs<'a> {
    /// The client's address; `None` for a packet of the host from any of the host's addresses.
    pub(crate) from: Option<SocketAddr>,
    pub(crate) host: bool,
    /// Another node has handed the packet over.
    pub(crate) is_handed_over: bool,
    pub(crate) in_device: Option<&'a str>,
}

/// The state of a running agent.
pub(crate) struct Live {
    pub(crate) client: Client,
    pub(crate) status: Status,
    /// The kernel's ids of the maps, by name.
    maps: BTreeMap<String, u32>,
    /// The folder of the maps' pins; `None` for an older agent.
    pins: Option<PathBuf>,
    names: Names,
}

impl Live {
    pub(crate) async fn query(run_dir: &Path) -> Result<Self> {
        let client = Client::new(run_dir);
        let status = client.status().await?;
        check_namespace(&status, run_dir)?;
        let maps = client.maps().await?;
        let names = client.names().await?;
        let pins = client.get("/pins").await.ok();
        Ok(Self {
            client,
            status,
            maps,
            pins,
            names,
        })
    }

    /// Returns the objects that an argument may name: this node, and the agent's Services.
    pub(crate) async fn known(&self) -> Result<Known> {
        let Status {
            node_name,
            node_addresses,
            ..
        } = self.status.clone();
        Ok(Known {
            services: self.client.services().await?,
            node_name,
            node_addresses,
        })
    }

    /// Returns true if the running programs of the hooks call the slow path.
    pub(crate) fn calls_slow_path(&self) -> bool {
        let is_loaded = |slow: SlowProgram| self.status.programs.contains_key(slow.program());
        SlowProgram::ALL.into_iter().any(is_loaded)
    }

    /// Fails unless the running program has the same tag (the kernel's hash): the copy must behave
    /// alike.
    pub(crate) fn check_tag(&self, program: &str, tag: &str) -> Result<()> {
        let running = self.status.programs.get(program);
        let running = running.with_context(|| {
            format!(
                "the running kpx {} has no program {program}",
                self.status.version
            )
        })?;
        ensure!(
            running.tag == tag,
            "the running kpx {} has a different {program} ({}, not {tag}): trace with the running binary",
            self.status.version,
            running.tag,
        );
        Ok(())
    }

    /// Returns the rows of the maps with the packet's entry point, and the packet's source.
    pub(crate) async fn input<A: Family>(
        &self,
        packet_args: &PacketArgs<'_>,
        to: &Target,
    ) -> Result<(TraceInput<A>, SocketAddr)> {
        let maps = A::MAPS;
        let from = match packet_args.from {
            Some(from) => from,
            None => SocketAddr::new(source_to(to.addr.ip()).await?, CLIENT_PORT),
        };
        let mut affinity: BTreeMap<AffinityKey<A>, Affinity<A>> = self.rows(maps.new_affinity)?;
        affinity.extend(self.rows::<AffinityKey<A>, Affinity<A>>(maps.affinity)?);
        affinity.retain(|key, _| key.client.ip() == from.ip());
        let nowhere = Entry {
            program: names::INGRESS,
            device: String::new(),
            ifindex: 0,
        };
        let tables = self.tables()?;
        let mut input = TraceInput {
            node_name: self.status.node_name.clone(),
            names: port_names(&self.names, &tables),
            tables,
            node: self.single(names::NODE)?,
            devices: self.rows(names::DEVICES)?,
            addrs: self.rows(maps.addrs)?,
            pods: self.detected_nets(maps.pods)?,
            service_nets: self.valued_nets(maps.service_cidrs)?,
            generation: self.single(names::GENERATION)?,
            affinity,
            connections: self.rows(maps.connections)?,
            shares: self.shares(from.ip())?,
            entry: nowhere,
            mark: match packet_args.is_handed_over {
                true => HANDED_OVER_MARK,
                false => 0,
            },
            notes: Notes::default(),
            external_client_note: None,
            outside: Outside::of(&self.status),
        };
        if !self.status.healthy {
            let unhealthy =
                "the agent is not healthy (see kpx status): its tables may be out of date";
            input.notes.warn([unhealthy.to_owned()]);
        }
        input.entry = entry(&input, from.ip(), packet_args, to).await?;
        ensure!(
            !packet_args.is_handed_over || input.takes_handed_over(),
            "--handed-over is for packets of clients outside, on a node with --external-forwarding dsr"
        );
        if input.entry.program == names::ANCHOR {
            let rules = self
                .status
                .problems
                .iter()
                .filter(|problem| problem.what == Problem::Rules.to_string());
            input.notes.warn(rules.map(|problem| problem.why.clone()));
        }
        input.notes.all.extend(self.of_sockets(&input, to));
        let device = self
            .status
            .devices
            .iter()
            .find(|device| device.ifindex == input.entry.ifindex);
        let no_pod = device.and_then(|device| device.no_pod.as_ref());
        // A device that kpx classifies as a router's may be the pod's.
        if packet_args.in_device.is_none() && no_pod.is_none() {
            let guess = guess(&input, from.ip());
            input.notes.warn(guess);
        }
        input.external_client_note = no_pod.map(|why| {
            format!("{why}; if it is a pod's device, give it host routes alone, or set {TELL_PODS}")
        });
        Ok((input, from))
    }

    /// Returns true while the agent waits for its first lists.
    pub(crate) fn waits(&self) -> bool {
        !self.status.complete
    }

    /// Returns a note for clients with socket load balancing, whose sockets are translated before
    /// they send a packet.
    fn of_sockets<A: Family>(&self, input: &TraceInput<A>, to: &Target) -> Option<String> {
        let sockets = self.status.sockets.as_ref()?;
        let is_translated = to.proto == Proto::TCP || to.proto == Proto::UDP && sockets.udp;
        let is_host = input.entry.program != names::INGRESS;
        let is_pod = input
            .devices
            .get(&input.entry.ifindex)
            .is_some_and(|device| device.is_pod());
        let client = match (is_host, sockets.scope.as_str()) {
            _ if !is_translated => return None,
            (true, _) => "the node",
            (false, "all") if is_pod => "this pod",
            (false, _) if is_pod && sockets.pods && to.proto == Proto::TCP => {
                "pods whose sockets kpx translates (kpx status -o wide lists them)"
            }
            _ => return None,
        };
        let call = if to.proto == Proto::TCP {
            "connect()"
        } else {
            "connect() or sendmsg()"
        };
        let setting = socket_setting(&self.status.options.socket_lb, &sockets.scope);
        Some(format!(
            "--socket-lb {setting}: sockets of {client} get a backend at {call}. A packet to a frontend comes from a socket that is excluded (docs/socket-lb.md), or was open before"
        ))
    }

    /// Returns the client's shares of the flow table. While half of the table is free, no share is
    /// used up.
    fn shares<A: Family>(&self, client: IpAddr) -> Result<Option<Shares<A>>> {
        let maps = A::MAPS;
        let Some(fill) = self.status.map_fill.get(maps.flows) else {
            return Ok(None);
        };
        let room = u32::try_from(fill.max_entries).context("the flow table's size")?;
        let lasting = self.single(maps.lasting)?;
        let mut held = BTreeMap::new();
        if !share::is_ample(lasting, room) {
            held = self.rows::<A, u32>(maps.clients)?;
            let is_client = |holder: &A| {
                A::from_ip(client).is_some_and(|addr| [addr, addr.site_if(true)].contains(holder))
            };
            // A namespace's key is a multicast address.
            held.retain(|holder, _| is_client(holder) || holder.ip().is_multicast());
        }
        Ok(Some(Shares {
            room,
            lasting,
            held,
        }))
    }

    /// Returns the programs' counts of a service port's connections to a backend, and the seconds
    /// since the last count.
    pub(crate) fn connects<A: Family>(
        &self,
        service: &str,
        backend: SocketAddr,
    ) -> Option<(Connects, u32)> {
        let (at, proto) = service.split_once('/')?;
        let at = sock_addr::<A>(at.parse().ok()?).ok()?;
        let proto = [Proto::TCP, Proto::UDP]
            .into_iter()
            .find(|known| known.to_string() == proto)?;
        let service = FrontendKey::new(at.addr, at.port, proto);
        let map: HashMap<MapData, EndpointKey<A>, Connects> = self.map(A::MAPS.connects).ok()?;
        let key = EndpointKey::new(service, sock_addr(backend).ok()?);
        let connects = map.get(&key, 0).ok()?;
        let now_secs = datapath::boot_secs().ok()?;
        Some((connects, now_secs.saturating_sub(connects.last_secs)))
    }

    /// Reads the tables. Reads them again if the agent wrote in between and the parts are
    /// inconsistent.
    fn tables<A: Family>(&self) -> Result<FamilyTables<A>> {
        const TRIES: usize = 5;
        let maps = A::MAPS;
        for _ in 0..TRIES {
            let maglev: BTreeMap<SetKey<A>, Maglev> = self.rows(maps.maglev)?;
            let ranges: Vec<Key<SourceRange<A>>> = self.keys(maps.source_ranges)?;
            let ranges = ranges.into_iter().map(|key| RangeKey {
                range: key.data(),
                bits: key.prefix_len(),
            });
            let tables = FamilyTables {
                frontends: self.rows(maps.frontends)?,
                services: self.rows(maps.services)?,
                slots: self.rows(maps.slots)?,
                endpoints: self.rows(maps.endpoints)?,
                maglev: maglev
                    .into_iter()
                    .map(|(key, table)| (key, Arc::new(table)))
                    .collect(),
                source_ranges: ranges.collect::<BTreeSet<_>>(),
            };
            if is_whole(&tables) {
                return Ok(tables);
            }
        }
        bail!("the agent's tables change faster than they can be read")
    }

    fn map<M: TryFrom<Map, Error = MapError>>(&self, name: &str) -> Result<M> {
        datapath::open_or_pinned(&self.maps, self.pins.as_deref(), name)
    }

    fn rows<K: Pod + Ord, V: Pod>(&self, name: &str) -> Result<BTreeMap<K, V>> {
        let map: HashMap<MapData, K, V> = self.map(name)?;
        map.iter()
            .collect::<Result<_, _>>()
            .with_context(|| format!("read {name}"))
    }

    fn keys<K: Pod>(&self, name: &str) -> Result<Vec<Key<K>>> {
        let map: LpmTrie<MapData, K, u32> = self.map(name)?;
        map.keys()
            .collect::<Result<_, _>>()
            .with_context(|| format!("read {name}"))
    }

    /// Returns the networks whose clients count as local pods.
    fn detected_nets<A: Family>(&self, name: &str) -> Result<Vec<Net<A>>> {
        let rows = self.valued_nets(name)?.into_iter();
        Ok(rows
            .filter(|(_, flags)| flags & pod_net::DETECTED != 0)
            .map(|(net, _)| net)
            .collect())
    }

    fn valued_nets<A: Family>(&self, name: &str) -> Result<Vec<(Net<A>, u32)>> {
        let map: LpmTrie<MapData, A, u32> = self.map(name)?;
        let rows = map
            .iter()
            .map(|row| row.map(|(key, value)| ((key.prefix_len(), key.data()), value)));
        rows.collect::<Result<_, _>>()
            .with_context(|| format!("read {name}"))
    }

    fn single<V: Pod>(&self, name: &str) -> Result<V> {
        let map: Array<MapData, V> = self.map(name)?;
        map.get(&0, 0).with_context(|| format!("read {name}"))
    }
}

/// Returns the operator's setting from the reported state: `auto` of `auto: host and pods`. Earlier
/// versions of the agent report only the scope.
fn socket_setting<'a>(served: &'a str, scope: &'a str) -> &'a str {
    let setting = served.split([':', ' ']).next().unwrap_or_default();
    if setting.is_empty() { scope } else { setting }
}

/// Fails in a network namespace other than the agent's, where devices and routes would differ.
fn check_namespace(status: &Status, run_dir: &Path) -> Result<()> {
    let Some(theirs) = &status.network_namespace else {
        return Ok(());
    };
    let ours = net::namespace()?.display().to_string();
    ensure!(
        ours == *theirs,
        "the kpx of {} serves another network namespace, {theirs}, and this is {ours}: trace there (`nsenter --net`, \
         `ip netns exec`)",
        run_dir.display(),
    );
    Ok(())
}

/// Returns true if every frontend has a service port, and every set has all its slots.
fn is_whole<A: Family>(tables: &FamilyTables<A>) -> bool {
    let leads =
        |service| tables.services.contains_key(service) || tables.frontends.contains_key(service);
    let counted = |(key, service): (&FrontendKey<A>, &Service)| {
        Set::ALL.iter().all(|set| {
            let mut indexes = 0..service.count(*set);
            indexes.all(|index| tables.slots.contains_key(&SlotKey::new(*key, *set, index)))
        })
    };
    tables
        .frontends
        .values()
        .all(|frontend| leads(&frontend.service))
        && tables.services.iter().all(counted)
}

/// Returns the source address that the host would use for `target`.
async fn source_to(target: IpAddr) -> Result<IpAddr> {
    let NextHop { source, .. } = next_hop(target).await?;
    source.with_context(|| format!("the host has no address to reach {target} from: pass --from"))
}

async fn entry<A: Family>(
    input: &TraceInput<A>,
    from: IpAddr,
    packet_args: &PacketArgs<'_>,
    to: &Target,
) -> Result<Entry> {
    if let Some(device) = packet_args.in_device {
        let ifindex =
            if_nametoindex(device).with_context(|| format!("look for device {device}"))?;
        return at_device(input, device.to_owned(), ifindex);
    }
    let is_own = |addr: IpAddr| {
        addr.is_loopback() || A::from_ip(addr).is_some_and(|addr| input.addrs.contains_key(&addr))
    };
    if !packet_args.host && !is_own(from) {
        let ifindex = device_of(input, from).await?;
        let device =
            if_indextoname(ifindex).with_context(|| format!("look for device {ifindex}"))?;
        return at_device(input, device.to_string_lossy().into_owned(), ifindex);
    }
    // Packets to the host's own addresses, such as all of 127.0.0.0/8, never use a route of kpx.
    let to = to.addr.ip();
    if is_own(to) || next_hop(to).await.is_ok_and(|hop| hop.device == LO) {
        return Ok(Entry {
            program: names::LO,
            device: "lo".to_owned(),
            ifindex: LO,
        });
    }
    let ifindex = input.node.anchor_ifindex;
    Ok(Entry {
        program: names::ANCHOR,
        device: anchor::NAME.to_owned(),
        ifindex,
    })
}

/// Returns a note if the route to a client probably points to the wrong device: the client is a
/// local endpoint, and the device is not a pod's.
fn guess<A: Family>(input: &TraceInput<A>, client: IpAddr) -> Option<String> {
    let Entry {
        program,
        device,
        ifindex,
    } = &input.entry;
    let is_pod = input.devices.get(ifindex)?.is_pod();
    let is_local = input
        .tables
        .slots
        .values()
        .any(|backend| backend.is_local() && backend.addr.ip() == client);
    (*program == names::INGRESS && !is_pod && is_local).then(|| {
        format!(
            "device {device} guessed from the route: {client} is a local endpoint, and the node has no route to that pod. kpx drops its packets as {} until the CNI plugin's route is back; --in-device names the pod's device",
            Reason::Spoofed.name()
        )
    })
}

fn at_device<A: Family>(input: &TraceInput<A>, device: String, ifindex: u32) -> Result<Entry> {
    let row = input
        .devices
        .get(&ifindex)
        .with_context(|| format!("kpx has no ingress program on {device}"))?;
    ensure!(
        !row.is_headerless(),
        "packets that come in by {device} have no Ethernet header, and trace makes none like that"
    );
    Ok(Entry {
        program: names::INGRESS,
        device,
        ifindex,
    })
}

/// Returns the interface index of the device on which packets of `client` arrive: the device of the
/// route to the client, or the bridge's port with the forwarding entry.
async fn device_of<A: Family>(input: &TraceInput<A>, client: IpAddr) -> Result<u32> {
    let hop = next_hop(client)
        .await
        .with_context(|| format!("find the device of {client}; --in-device names it"))?;
    if let Some(port) = hop.port {
        return Ok(port);
    }
    let pods = hop.ports.iter().any(|port| {
        input
            .devices
            .get(port)
            .is_some_and(|device| device.is_pod())
    });
    ensure!(
        !pods,
        "{client} may be a pod on a bridge, but its port is unknown: pass --in-device"
    );
    Ok(hop.device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_on_sockets_names_the_setting_and_not_its_effect() {
        assert_eq!(socket_setting("auto: host and pods", "host"), "auto");
        assert_eq!(socket_setting("host", "host"), "host");
        assert_eq!(socket_setting("all", "all"), "all");
        assert_eq!(socket_setting("", "host"), "host");
    }
}
