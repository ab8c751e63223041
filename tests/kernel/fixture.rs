//! The fixture of the rows: Services, devices, routes, and programs without attachments.

mod addrs;
mod cached_route;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};
use aya::Pod;
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::counter::Reason;
use proxy_common::device::{Device, Node, OwnAddr};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};
use proxy_common::names::{INGRESS, IPV4, IPV6};
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::Maps;
use testbed::flow_table::older;
use testbed::netns::NetNs;
use testbed::rows::Outcome;
use testbed::rows::parse::Row;
use testbed::rows::step::{Step, with_addrs};
use testbed::test_run::{self, Bench, Verdict, let_seconds_pass};
use testbed::text::{DST_MAC, Names};

use self::addrs::{FAMILIES, is_drawn};
use crate::half_open::flood;
use crate::packets::{Runner, run_section};
use crate::reuse::{Reused, Setup};

pub(crate) struct Fixture {
    pub(crate) bench: Reused,
    pub(crate) names: Names,
    pub(crate) netns: NetNs,
    /// The device by which all packets come in; None: the device of the route to the sender.
    comes_in_by: Option<String>,
    /// The bits in the mark of all packets that come in.
    pub(crate) mark: u32,
    /// Packets at the anchor and on lo came in through a device.
    carries_received: bool,
    pub(crate) offers: crate::opened::Offers,
}

pub(crate) fn fixtures(name: &str) -> Result<Vec<Fixture>> {
    fixtures_of(name, Setup::default())
}

/// Makes fixtures with this many flow entries; None: the default of a node.
pub(crate) fn fixtures_with_room(name: &str, flow_entries: Option<u32>) -> Result<Vec<Fixture>> {
    fixtures_of(
        name,
        Setup {
            flow_entries,
            ..Setup::default()
        },
    )
}

/// The number of fixtures that this process has made.
static MADE: AtomicU32 = AtomicU32::new(0);

/// Makes a fixture per family: unattached programs, in a namespace with routes for their look-ups.
pub(crate) fn fixtures_of(name: &str, setup: Setup) -> Result<Vec<Fixture>> {
    let make = |addrs: &&[(&'static str, &str)]| {
        let addrs: Vec<(&'static str, IpAddr)> = addrs
            .iter()
            .map(|(name, addr)| Ok((*name, addr.parse()?)))
            .collect::<Result<_>>()?;
        let names = Names::new(addrs);
        let family = if names.addr("web")?.is_ipv4() { 4 } else { 6 };
        // Tests run in parallel, and some share a name.
        let nth = MADE.fetch_add(1, Ordering::Relaxed);
        let netns = NetNs::create(format!("kpx-{}-{name}-{nth}-{family}", std::process::id()))?;
        let mut bench = Reused::get(setup)?;
        prepare(&mut bench, &names, &netns)?;
        Ok(Fixture {
            bench,
            names,
            netns,
            comes_in_by: None,
            mark: 0,
            carries_received: false,
            offers: Default::default(),
        })
    };
    FAMILIES.iter().map(make).collect()
}

impl Runner for Fixture {
    fn fixture(&mut self) -> &mut Fixture {
        self
    }

    fn outcome(&mut self, row: &Row) -> Result<Outcome> {
        let frame = self.names.frame(&row.packet)?;
        let before = self.counts()?;
        let test_run::Outcome { verdict, packet } =
            self.run_from(row.program, &frame, &row.packet)?;
        let counted = counted_since(&before, &self.counts()?);
        if verdict == Verdict::Drop {
            return Ok(Outcome {
                verdict,
                out: "-".to_owned(),
                counted,
            });
        }
        let is_same = packet == frame;
        if is_same && row.out == "same" {
            return Ok(Outcome {
                verdict,
                out: row.out.clone(),
                counted,
            });
        }
        let out = self.names.learn(&packet, &row.out)?;
        let out = if is_same && out != row.out {
            "same".to_owned()
        } else {
            out
        };
        Ok(Outcome {
            verdict,
            out,
            counted,
        })
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::ComeInBy(device) => self.come_in_by(device),
            Step::HostPathCarriesReceived(received) => {
                self.carries_received = *received;
                Ok(())
            }
            Step::NodeFlags(flags) => self.set_flags(*flags),
            Step::NodeHasNoAddress => self.bench.datapath.node.set_node(node_with(
                Addr4::UNSPECIFIED,
                Addr6::UNSPECIFIED,
                0,
            )),
            Step::Devices(devices) => {
                if devices.iter().any(|(name, _)| name == "lo") {
                    self.comes_in_by = Some("lo".to_owned());
                }
                let devices: Vec<_> = devices
                    .iter()
                    .map(|(name, device)| (name.as_str(), *device))
                    .collect();
                self.set_devices(&devices)
            }
            Step::PodAddresses(nets) => self.bench.datapath.node.set_pods(nets, &[], &[]),
            Step::Ip(words) => {
                let words = with_addrs(words, |name| self.names.addr(name))?;
                let family = if self.is_v4() { "-4" } else { "-6" };
                self.netns
                    .exec(Command::new("ip").arg(family).args(words.split(' ')))
                    .map(drop)
            }
            Step::BackendMoves {
                service,
                port,
                old,
                new,
            } => self.leave(service, *port, old, new),
            Step::Flood(count) => flood(self, 30_000, *count),
            Step::ForgetFlows => self.change_flows(|_| None),
            Step::Silence(secs) => self.age_answers(*secs).and_then(|()| self.be_silent(*secs)),
            Step::ConnectionsEnd { service, backend } => self.end_connections(service, backend),
            Step::MakeLiberal(is_made_liberal) => self.make_liberal(*is_made_liberal),
            Step::Segments(_) | Step::FramesForOthers(_) => {
                bail!("the step is for fixture fast only")
            }
        }
    }
}

impl Fixture {
    /// Changes the second of each flow's last packet, or removes the flow.
    pub(crate) fn change_flows(&self, change: impl FnMut(u32) -> Option<u32>) -> Result<()> {
        if self.is_v4() {
            change_flows::<Addr4>(self, IPV4.flows, change)
        } else {
            change_flows::<Addr6>(self, IPV6.flows, change)
        }
    }

    /// Ages all flows. A flow cannot be older than the machine, so on a freshly booted machine this
    /// waits for the rest.
    pub(crate) fn be_silent(&self, secs: u32) -> Result<()> {
        let mut missing = 0;
        self.change_flows(|last_secs| {
            missing = missing.max((secs + 1).saturating_sub(last_secs) * u32::from(last_secs > 0));
            Some(last_secs)
        })?;
        let_seconds_pass(missing)?;
        self.change_flows(|last_secs| Some(last_secs.saturating_sub(secs - missing)))
    }

    pub(crate) fn is_v4(&self) -> bool {
        matches!(self.names.addr("web"), Ok(addr) if addr.is_ipv4())
    }

    /// Runs a section of rows, such as `flows::closed_flow_gives_its_port_back`.
    pub(crate) fn rows(&mut self, section: &str) -> Result<()> {
        run_section(self, section)
    }

    /// Replaces drawn ports in a packet's text by names, and names new ones.
    pub(crate) fn name_drawn_ports(&mut self, text: &str) -> Result<String> {
        let words = text.split(' ').map(|word| match word.split_once(':') {
            Some((host, port)) if port.parse().is_ok_and(|port| is_drawn(host, port)) => {
                let free = ('p'..='z')
                    .map(|name| format!("${name}"))
                    .find(|name| self.names.port(name).is_none());
                format!("{host}:{}", free.unwrap_or_else(|| port.to_owned()))
            }
            _ => word.to_owned(),
        });
        let named = words.collect::<Vec<_>>().join(" ");
        if named != text {
            self.names.learn(&self.names.frame(text)?, &named)?;
        }
        Ok(named)
    }

    /// Runs a program on a packet in the fixture's namespace, as if on lo.
    pub(crate) fn run(&self, program: &str, frame: &[u8]) -> Result<test_run::Outcome> {
        self.netns.run(|| self.bench.run(program, frame))
    }

    /// Runs a program on a row's packet. A backend's packet comes in by the device of the route to
    /// that backend, unless the test has named another device.
    pub(crate) fn run_from(
        &self,
        program: &str,
        frame: &[u8],
        packet: &str,
    ) -> Result<test_run::Outcome> {
        let src = packet
            .split(" > ")
            .next()
            .and_then(|before| before.split_whitespace().last());
        let device = match src.map(|src| src.split(':').next().unwrap_or(src)) {
            Some("pod" | "reserved-pod") => "pod0",
            Some("far") => "eth1",
            _ => "lo",
        };
        if program != INGRESS && !self.carries_received {
            return self.run(program, frame);
        }
        let ifindex = self.ifindex(if program == INGRESS {
            self.comes_in_by.as_deref().unwrap_or(device)
        } else {
            "lo"
        })?;
        self.netns
            .run(|| self.bench.run_marked(program, frame, ifindex, self.mark))
    }

    /// Sets the flags of the node: see [`Node`].
    pub(crate) fn set_flags(&mut self, flags: u32) -> Result<()> {
        self.bench
            .datapath
            .node
            .set_node(node(self.names.addr("node")?, flags))
    }

    /// Makes all packets come in by this device.
    pub(crate) fn set_device(&mut self, device: Device) -> Result<()> {
        self.comes_in_by = Some("lo".to_owned());
        self.set_devices(&[("lo", Some(device))])
    }

    /// Makes all packets come in by the device of this name.
    fn come_in_by(&mut self, device: &str) -> Result<()> {
        self.comes_in_by = Some(device.to_owned());
        self.ifindex(device).map(drop)
    }

    /// Sets these devices, and resets all others to their initial state; None: the device has no
    /// hooks.
    pub(crate) fn set_devices(&mut self, of: &[(&str, Option<Device>)]) -> Result<()> {
        let mut devices = devices(&self.names, &self.netns)?;
        for (name, device) in of {
            let ifindex = self.ifindex(name)?;
            match device {
                // No route to a sender leads through lo.
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
        let mut counts: BTreeMap<_, _> = counters
            .events()?
            .into_iter()
            .map(|(event, n)| (event.name(), n))
            .collect();
        counts.extend(
            counters
                .reasons()?
                .into_iter()
                .map(|(reason, n): (Reason, u64)| (reason.name(), n)),
        );
        Ok(counts)
    }
}

/// Returns the names of the counters that grew, in alphabetical order, repeated once per increment.
pub(crate) fn counted_since(
    before: &BTreeMap<&'static str, u64>,
    now: &BTreeMap<&'static str, u64>,
) -> Vec<String> {
    let grown = |(name, n): (&&str, &u64)| {
        vec![(*name).to_owned(); usize::try_from(n - before[*name]).expect("few")]
    };
    now.iter().flat_map(grown).collect()
}

/// Makes the Services, devices and routes that rows name.
fn prepare(bench: &mut Bench, names: &Names, netns: &NetNs) -> Result<()> {
    let v4 = names.addr("web")?.is_ipv4();
    let host_len = if v4 { 32 } else { 128 };
    let node_ip = names.addr("node")?;
    let uplink = names.addr("uplink")?;
    let uplink_len = if v4 { 24 } else { 64 };
    // Without `nodad` an IPv6 address is unusable until duplicate address detection ends.
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
         link add {FROM} type veth peer name there
         link set {FROM} up
         link set there up",
    ))?;
    let backends = [("pod", "pod0"), ("reserved-pod", "pod0"), ("far", "eth1")];
    for (sender, device) in CLIENTS
        .map(|client| (client, FROM))
        .into_iter()
        .chain(backends)
    {
        netns.ip(&format!("route add {} dev {device}", names.addr(sender)?))?;
    }
    netns.settle()?;
    // BPF_PROG_TEST_RUN sets lo as the packet's device.
    for device in ["lo", "pod0", "eth1", FROM] {
        netns.sysctl(&format!("ipv4/conf/{device}/forwarding"), "1")?;
        netns.sysctl(&format!("ipv6/conf/{device}/forwarding"), "1")?;
    }
    let own = BTreeMap::from([
        (
            node_ip,
            OwnAddr::new(1, OwnAddr::NODE_PORTS | OwnAddr::OF_NODE_OBJECT),
        ),
        (
            names.addr("localhost")?,
            OwnAddr::new(1, OwnAddr::NODE_PORTS),
        ),
        (uplink, OwnAddr::new(ifindex(netns, "eth1")?, 0)),
    ]);
    let maps = &mut bench.datapath.node;
    maps.set_node(node(node_ip, 0))?;
    maps.set_devices(&devices(names, netns)?)?;
    maps.set_addrs(&own)?;
    for change in if v4 {
        tables::<Addr4>(names)?
            .into_iter()
            .map(Change::V4)
            .collect::<Vec<_>>()
    } else {
        tables::<Addr6>(names)?
            .into_iter()
            .map(Change::V6)
            .collect()
    } {
        bench.datapath.tables.apply(&change)?;
    }
    Ok(())
}

/// Returns a node with this address.
fn node(ip: IpAddr, flags: u32) -> Node {
    node_with(addr4(ip), addr6(ip), flags)
}

fn node_with(addr4: Addr4, addr6: Addr6, flags: u32) -> Node {
    Node::new(addr4, addr6, 1, [2, 0, 0, 0, 0, 9], flags)
}

/// Returns the initial devices. BPF_PROG_TEST_RUN sets the first, a pod's, as every packet's
/// device.
fn devices(names: &Names, netns: &NetNs) -> Result<BTreeMap<u32, Device>> {
    let uplink = names.addr("uplink")?;
    let pod = Device::new(Device::POD, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
    Ok(BTreeMap::from([
        (1, pod.with_link(ifindex(netns, FROM)?, 0, DST_MAC)),
        (ifindex(netns, "pod0")?, pod.with_link(0, 0, DST_MAC)),
        (
            ifindex(netns, "eth1")?,
            Device::new(0, addr4(uplink), addr6(uplink)).with_link(0, 0, DST_MAC),
        ),
    ]))
}

/// The device of routes to the senders, as if lo were a port of it.
pub(crate) const FROM: &str = "from0";
/// The clients that send to the node.
const CLIENTS: [&str; 8] = [
    "client",
    "neighbour",
    "stranger",
    "burglar",
    "router",
    "reserved-client",
    "link-client",
    "zero-client",
];

fn ifindex(netns: &NetNs, name: &str) -> Result<u32> {
    netns
        .run(|| nix::net::if_::if_nametoindex(name))
        .with_context(|| format!("index of {name}"))
}

fn addr4(ip: IpAddr) -> Addr4 {
    Addr4::from_ip(ip).unwrap_or(Addr4::UNSPECIFIED)
}

fn addr6(ip: IpAddr) -> Addr6 {
    Addr6::from_ip(ip).unwrap_or(Addr6::UNSPECIFIED)
}

fn tables<A: Addr>(names: &Names) -> Result<Vec<FamilyChange<A>>> {
    let addr = |name| -> Result<A> { A::from_ip(names.addr(name)?).context("family") };
    // Service, port, protocol, backend, slots in the cluster set, flags.
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
        (
            "reserved",
            80,
            Proto::TCP,
            Some(("reserved-pod", 8080, true)),
            1,
            all,
        ),
        (
            "reserved",
            53,
            Proto::UDP,
            Some(("reserved-pod", 5353, true)),
            1,
            all,
        ),
        ("none", 80, Proto::TCP, None, 0, 0),
        ("none", 80, Proto::UDP, None, 0, 0),
        (
            "local",
            80,
            Proto::TCP,
            None,
            0,
            all | Service::INTERNAL_LOCAL,
        ),
        (
            "local",
            80,
            Proto::UDP,
            None,
            0,
            all | Service::INTERNAL_LOCAL,
        ),
        ("stale", 80, Proto::TCP, None, 2, all),
        ("web", 3868, Proto::SCTP, Some(("pod", 13868, true)), 1, all),
        ("web", 5060, Proto::SCTP, Some(("pod", 5060, true)), 1, all),
        (
            "self",
            3868,
            Proto::SCTP,
            Some(("client", 13868, true)),
            1,
            all,
        ),
        (
            "own",
            3868,
            Proto::SCTP,
            Some(("node", 13868, true)),
            1,
            all,
        ),
        ("none", 3868, Proto::SCTP, None, 0, 0),
    ];
    let mut changes = Vec::new();
    for (service, port, proto, backend, count, flags) in ports {
        let key = FrontendKey::new(addr(service)?, Port::new(port), proto);
        if let Some((backend, port, local)) = backend {
            let flags = if local { Backend::<A>::LOCAL } else { 0 };
            let backend = Backend::new(addr(backend)?, Port::new(port), flags);
            changes.push(FamilyChange::PutSlot(
                SlotKey::new(key, Set::CLUSTER, 0),
                backend,
            ));
        }
        let address = FrontendKey::address(addr(service)?);
        changes.push(FamilyChange::PutService(key, Service::new(count, 0, flags)));
        changes.push(FamilyChange::PutFrontend(
            key,
            Frontend::new(key, FrontendKind::CLUSTER_IP),
        ));
        changes.push(FamilyChange::PutFrontend(
            address,
            Frontend::new(address, FrontendKind::ADDRESS),
        ));
    }
    Ok(changes)
}

fn change_flows<A: Addr>(
    fixture: &Fixture,
    name: &str,
    mut change: impl FnMut(u32) -> Option<u32>,
) -> Result<()>
where
    FlowKey<A>: Pod,
    Flow<A>: Pod,
{
    let mut flows: HashMap<MapData, FlowKey<A>, Flow<A>> = fixture.bench.map(name)?;
    for (key, flow) in flows.iter().collect::<Result<Vec<_>, _>>()? {
        match change(flow.last_secs) {
            None => flows.remove(&key)?,
            Some(last_secs) => flows.insert(
                key,
                older(flow, key.proto(), flow.last_secs.wrapping_sub(last_secs)),
                0,
            )?,
        }
    }
    Ok(())
}
