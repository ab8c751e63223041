//! The lab that the rows run in: services, devices, routes, and programs that are attached to nothing.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::counter::Reason;
use proxy_common::device::{Device, Node, OwnAddr};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};
use proxy_common::names::INGRESS;
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::Maps;
use testbed::netns::NetNs;
use testbed::test_run::{Bench, Outcome, Verdict};
use testbed::text::{DST_MAC, Names};

use crate::reuse::{Reused, Setup};

/// Program, packet in, verdict, packet out ("same", or "-" for a dropped one), what is counted.
pub(crate) type Row = (&'static str, &'static str, Verdict, &'static str, &'static str);

const FAMILIES: [&[(&str, &str)]; 2] = [
    &[
        ("client", "10.244.1.10"),
        ("pod", "10.244.1.11"),
        ("far", "10.244.2.11"),
        ("lost", "10.244.9.9"),
        ("node", "172.18.0.11"),
        ("uplink", "172.18.1.11"),
        ("web", "10.96.0.10"),
        ("api", "10.96.0.11"),
        ("self", "10.96.0.12"),
        ("none", "10.96.0.13"),
        ("local", "10.96.0.14"),
        ("stale", "10.96.0.15"),
        ("own", "10.96.0.16"),
        ("remote", "10.96.0.17"),
        ("nowhere", "10.96.0.18"),
        ("stranger", "192.0.2.1"),
        ("vip", "203.0.113.1"),
        ("outer", "203.0.113.2"),
        ("near", "203.0.113.3"),
        ("distant", "203.0.113.4"),
        ("empty", "203.0.113.5"),
        ("fenced", "203.0.113.6"),
        ("near-ip", "10.96.0.23"),
        ("distant-ip", "10.96.0.24"),
        ("empty-ip", "10.96.0.25"),
        ("fenced-ip", "10.96.0.26"),
        ("sticky", "10.96.0.27"),
        ("turns", "10.96.0.28"),
        ("least", "10.96.0.29"),
        ("pair", "10.96.0.30"),
        ("spare", "10.96.0.99"),
        ("burglar", "192.0.2.66"),
        ("router", "192.0.2.254"),
        ("group", "224.0.0.251"),
    ],
    &[
        ("client", "fd00:10:244:1::10"),
        ("pod", "fd00:10:244:1::11"),
        ("far", "fd00:10:244:2::11"),
        ("lost", "fd00:10:244:9::9"),
        ("node", "fd00:172:18::11"),
        ("uplink", "fd00:172:18:1::11"),
        ("web", "fd00:10:96::10"),
        ("api", "fd00:10:96::11"),
        ("self", "fd00:10:96::12"),
        ("none", "fd00:10:96::13"),
        ("local", "fd00:10:96::14"),
        ("stale", "fd00:10:96::15"),
        ("own", "fd00:10:96::16"),
        ("remote", "fd00:10:96::17"),
        ("nowhere", "fd00:10:96::18"),
        ("stranger", "2001:db8::1"),
        ("vip", "2001:db8:203::1"),
        ("outer", "2001:db8:203::2"),
        ("near", "2001:db8:203::3"),
        ("distant", "2001:db8:203::4"),
        ("empty", "2001:db8:203::5"),
        ("fenced", "2001:db8:203::6"),
        ("near-ip", "fd00:10:96::23"),
        ("distant-ip", "fd00:10:96::24"),
        ("empty-ip", "fd00:10:96::25"),
        ("fenced-ip", "fd00:10:96::26"),
        ("sticky", "fd00:10:96::27"),
        ("turns", "fd00:10:96::28"),
        ("least", "fd00:10:96::29"),
        ("pair", "fd00:10:96::30"),
        ("spare", "fd00:10:96::99"),
        ("burglar", "2001:db8::66"),
        ("router", "2001:db8::fe"),
        ("group", "ff02::fb"),
    ],
];

/// Runs the rows one after the other, in both families.
pub(crate) fn check(rows: &[Row]) -> Result<()> {
    for mut lab in labs("rows")? {
        lab.check(rows)?;
    }
    Ok(())
}

pub(crate) struct Lab {
    pub(crate) bench: Reused,
    pub(crate) names: Names,
    pub(crate) netns: NetNs,
    /// The device through which all packets come in, whatever their sources.
    comes_in_by: Option<&'static str>,
    /// What meets the hooks of the host's own way has come in.
    pub(crate) came_in: bool,
}

pub(crate) fn labs(name: &str) -> Result<Vec<Lab>> {
    labs_of(name, Setup::default())
}

/// With room for so many entries of flows, by default for as many as a node has.
pub(crate) fn labs_with_room(name: &str, flow_entries: Option<u32>) -> Result<Vec<Lab>> {
    labs_of(name, Setup { flow_entries, ..Setup::default() })
}

/// Labs of this process so far.
static MADE: AtomicU32 = AtomicU32::new(0);

/// One lab per family: programs that are attached to nothing, in a namespace with routes for them to look up.
pub(crate) fn labs_of(name: &str, setup: Setup) -> Result<Vec<Lab>> {
    let make = |addrs: &&[(&'static str, &str)]| {
        let addrs: Vec<(&'static str, IpAddr)> =
            addrs.iter().map(|(name, addr)| Ok((*name, addr.parse()?))).collect::<Result<_>>()?;
        let names = Names::new(addrs);
        let family = if names.addr("web")?.is_ipv4() { 4 } else { 6 };
        // Tests run side by side, and some give the same name.
        let nth = MADE.fetch_add(1, Ordering::Relaxed);
        let netns = NetNs::create(format!("kpx-{}-{name}-{nth}-{family}", std::process::id()))?;
        let mut bench = Reused::get(setup)?;
        prepare(&mut bench, &names, &netns)?;
        Ok(Lab { bench, names, netns, comes_in_by: None, came_in: false })
    };
    FAMILIES.iter().map(make).collect()
}

impl Lab {
    pub(crate) fn check(&mut self, rows: &[Row]) -> Result<()> {
        for row in rows {
            self.check_row(row)
                .with_context(|| format!("{row:?} with {}", self.names.addr("web").expect("it is there")))?;
        }
        Ok(())
    }

    fn check_row(&mut self, (program, packet, verdict, out, counted): &Row) -> Result<()> {
        let frame = self.names.frame(packet)?;
        let before = self.counts()?;
        let outcome = self.run_from(program, &frame, packet)?;
        ensure!(outcome.verdict == *verdict, "{:?}; {:?}", outcome.verdict, counted_since(&before, &self.counts()?));
        match *out {
            "-" => {}
            "same" => ensure!(outcome.packet == frame, "became {}", self.names.text(&outcome.packet)?),
            out => {
                let found = self.names.learn(&outcome.packet, out)?;
                ensure!(found == out, "became {found}");
            }
        }
        let now = counted_since(&before, &self.counts()?);
        ensure!(now == words(counted), "counted {now:?}");
        Ok(())
    }

    /// Runs a program on a packet in the lab's namespace, as if it were on lo.
    pub(crate) fn run(&self, program: &str, frame: &[u8]) -> Result<Outcome> {
        self.netns.run(|| self.bench.run(program, frame))
    }

    /// The same of a row's packet. What a backend sends comes in where the route to it leads, unless the row's test has said
    /// through what packets come in.
    pub(crate) fn run_from(&self, program: &str, frame: &[u8], packet: &str) -> Result<Outcome> {
        let src = packet.split(" > ").next().and_then(|before| before.split_whitespace().last());
        let device = match src.map(|src| src.split(':').next().unwrap_or(src)) {
            Some("pod") => "pod0",
            Some("far") => "eth1",
            _ => "lo",
        };
        if program != INGRESS && !self.came_in {
            return self.run(program, frame);
        }
        let ifindex = self.ifindex(if program == INGRESS { self.comes_in_by.unwrap_or(device) } else { "lo" })?;
        self.netns.run(|| self.bench.run_on(program, frame, ifindex))
    }

    /// Gives the node these flags: see [`Node`].
    pub(crate) fn set_flags(&mut self, flags: u32) -> Result<()> {
        self.bench.datapath.node.set_node(node(self.names.addr("node")?, flags))
    }

    /// Makes this the device through which packets come in.
    pub(crate) fn set_device(&mut self, device: Device) -> Result<()> {
        self.comes_in_by = Some("lo");
        self.set_devices(&[("lo", Some(device))])
    }

    /// Lets packets come in through this device, whatever their sources.
    pub(crate) fn come_in_by(&mut self, device: &'static str) -> Result<()> {
        self.comes_in_by = Some(device);
        self.ifindex(device).map(drop)
    }

    /// Makes these devices what is said of them, and the others what they were at the beginning; None: there is no such.
    pub(crate) fn set_devices(&mut self, of: &[(&str, Option<Device>)]) -> Result<()> {
        let mut devices = devices(&self.names, &self.netns)?;
        for (name, device) in of {
            let ifindex = self.ifindex(name)?;
            match device {
                // Routes lead to no sender through lo.
                Some(device) if *name == "lo" => {
                    let from = self.ifindex(FROM)?;
                    devices.insert(ifindex, device.with_link(from, 0, DST_MAC))
                }
                Some(device) => devices.insert(ifindex, *device),
                None => devices.remove(&ifindex),
            };
        }
        self.bench.datapath.node.set_devices(&devices)
    }

    pub(crate) fn ifindex(&self, device: &str) -> Result<u32> {
        ifindex(&self.netns, device)
    }

    pub(crate) fn counts(&self) -> Result<BTreeMap<&'static str, u64>> {
        let counters = &self.bench.datapath.counters;
        let mut counts: BTreeMap<_, _> = counters.events()?.into_iter().map(|(event, n)| (event.name(), n)).collect();
        counts.extend(counters.reasons()?.into_iter().map(|(reason, n): (Reason, u64)| (reason.name(), n)));
        Ok(counts)
    }
}

/// Names of the counters that grew, each by one, in alphabetical order.
pub(crate) fn counted_since(before: &BTreeMap<&'static str, u64>, now: &BTreeMap<&'static str, u64>) -> Vec<String> {
    let grown = |(name, n): (&&str, &u64)| vec![(*name).to_owned(); usize::try_from(n - before[*name]).expect("few")];
    now.iter().flat_map(grown).collect()
}

pub(crate) fn words(text: &str) -> Vec<String> {
    let mut words: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    words.sort();
    words
}

/// Services, devices and routes that the rows speak of.
fn prepare(bench: &mut Bench, names: &Names, netns: &NetNs) -> Result<()> {
    let v4 = names.addr("web")?.is_ipv4();
    let host_len = if v4 { 32 } else { 128 };
    let (node_ip, uplink) = (names.addr("node")?, names.addr("uplink")?);
    let uplink_len = if v4 { 24 } else { 64 };
    // Without it an address is nowhere until the kernel has looked for its duplicates.
    let at_once = if v4 { "" } else { "nodad" };
    netns.ip(&format!(
        "link add pod0 type veth peer name pod1
         link set pod0 up
         link set pod1 up
         link add eth1 type veth peer name wire
         link set eth1 up
         link set wire up
         addr add {node_ip}/{host_len} dev lo {at_once}
         addr add {uplink}/{uplink_len} dev eth1 {at_once}
         route add {} dev pod0
         route add {} dev eth1
         link add {FROM} type veth peer name there
         link set {FROM} up
         link set there up",
        names.addr("pod")?,
        names.addr("far")?,
    ))?;
    for client in CLIENTS {
        netns.ip(&format!("route add {} dev {FROM}", names.addr(client)?))?;
    }
    netns.settle()?;
    // BPF_PROG_TEST_RUN takes lo for the packet's device.
    for device in ["lo", "pod0", "eth1", FROM] {
        netns.sysctl(&format!("ipv4/conf/{device}/forwarding"), "1")?;
        netns.sysctl(&format!("ipv6/conf/{device}/forwarding"), "1")?;
    }
    let own = BTreeMap::from([
        (node_ip, OwnAddr::new(1, OwnAddr::NODE_PORTS)),
        (uplink, OwnAddr::new(ifindex(netns, "eth1")?, 0)),
    ]);
    let maps = &mut bench.datapath.node;
    maps.set_node(node(node_ip, 0))?;
    maps.set_devices(&devices(names, netns)?)?;
    maps.set_addrs(&own)?;
    for change in if v4 {
        tables::<Addr4>(names)?.into_iter().map(Change::V4).collect::<Vec<_>>()
    } else {
        tables::<Addr6>(names)?.into_iter().map(Change::V6).collect()
    } {
        bench.datapath.tables.apply(&change)?;
    }
    Ok(())
}

/// A node with this address.
fn node(ip: IpAddr, flags: u32) -> Node {
    Node::new(addr4(ip), addr6(ip), 1, [2, 0, 0, 0, 0, 9], flags)
}

/// BPF_PROG_TEST_RUN takes the first for every packet's: a pod's.
fn devices(names: &Names, netns: &NetNs) -> Result<BTreeMap<u32, Device>> {
    let uplink = names.addr("uplink")?;
    let pod = Device::new(Device::POD, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
    Ok(BTreeMap::from([
        (1, pod.with_link(ifindex(netns, FROM)?, 0, DST_MAC)),
        (ifindex(netns, "pod0")?, pod.with_link(0, 0, DST_MAC)),
        (ifindex(netns, "eth1")?, Device::new(0, addr4(uplink), addr6(uplink)).with_link(0, 0, DST_MAC)),
    ]))
}

/// The device that routes to the senders of packets name: as lo were a port of it.
pub(crate) const FROM: &str = "from0";
/// Who sends packets to the node.
const CLIENTS: [&str; 4] = ["client", "stranger", "burglar", "router"];

fn ifindex(netns: &NetNs, name: &str) -> Result<u32> {
    netns.run(|| nix::net::if_::if_nametoindex(name)).with_context(|| format!("index of {name}"))
}

fn addr4(ip: IpAddr) -> Addr4 {
    Addr4::from_ip(ip).unwrap_or(Addr4::UNSPECIFIED)
}

fn addr6(ip: IpAddr) -> Addr6 {
    Addr6::from_ip(ip).unwrap_or(Addr6::UNSPECIFIED)
}

fn tables<A: Addr>(names: &Names) -> Result<Vec<FamilyChange<A>>> {
    let addr = |name| -> Result<A> { A::from_ip(names.addr(name)?).context("family") };
    // Service, port, protocol, its backend, slots in the cluster set, flags.
    let all = Service::HAS_ENDPOINTS;
    let ports = [
        ("web", 80, Proto::TCP, Some(("pod", 8080, true)), 1, all),
        ("web", 53, Proto::UDP, Some(("pod", 5353, true)), 1, all),
        ("api", 443, Proto::TCP, Some(("pod", 8080, true)), 1, all),
        ("self", 80, Proto::TCP, Some(("client", 8080, true)), 1, all),
        ("self", 53, Proto::UDP, Some(("client", 5353, true)), 1, all),
        ("own", 443, Proto::TCP, Some(("node", 6443, true)), 1, all),
        ("remote", 53, Proto::UDP, Some(("far", 5353, false)), 1, all),
        ("remote", 80, Proto::TCP, Some(("far", 8080, false)), 1, all),
        ("nowhere", 80, Proto::TCP, Some(("lost", 80, false)), 1, all),
        ("none", 80, Proto::TCP, None, 0, 0),
        ("none", 80, Proto::UDP, None, 0, 0),
        ("local", 80, Proto::TCP, None, 0, all | Service::INTERNAL_LOCAL),
        ("local", 80, Proto::UDP, None, 0, all | Service::INTERNAL_LOCAL),
        ("stale", 80, Proto::TCP, None, 2, all),
        ("web", 3868, Proto::SCTP, Some(("pod", 13868, true)), 1, all),
        ("web", 5060, Proto::SCTP, Some(("pod", 5060, true)), 1, all),
        ("self", 3868, Proto::SCTP, Some(("client", 13868, true)), 1, all),
        ("own", 3868, Proto::SCTP, Some(("node", 13868, true)), 1, all),
        ("none", 3868, Proto::SCTP, None, 0, 0),
    ];
    let mut changes = Vec::new();
    for (service, port, proto, backend, count, flags) in ports {
        let key = FrontendKey::new(addr(service)?, Port::new(port), proto);
        if let Some((backend, port, local)) = backend {
            let flags = if local { Backend::<A>::LOCAL } else { 0 };
            let backend = Backend::new(addr(backend)?, Port::new(port), flags);
            changes.push(FamilyChange::PutSlot(SlotKey::new(key, Set::CLUSTER, 0), backend));
        }
        let address = FrontendKey::address(addr(service)?);
        changes.push(FamilyChange::PutService(key, Service::new(count, 0, flags)));
        changes.push(FamilyChange::PutFrontend(key, Frontend::new(key, FrontendKind::CLUSTER_IP)));
        changes.push(FamilyChange::PutFrontend(address, Frontend::new(address, FrontendKind::ADDRESS)));
    }
    Ok(changes)
}
