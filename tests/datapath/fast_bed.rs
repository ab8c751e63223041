//! Where packets of open connections skip the stack (`--fast-path`).
//!
//! Here packets come in through the devices that routes lead to. What a row counts as fast must have been redirected with
//! one hop less, and into a pod with the link addresses of the last hop; any other passes with the hops that it had.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::Pod;
use aya::maps::{HashMap, MapData};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::names::{EGRESS, INGRESS, IPV4, IPV6};
use proxy_datapath::open;
use testbed::agent::wait_until;
use testbed::test_run::Verdict::{Pass, Redirect};

use crate::lab::{Lab, counted_since, labs_of, words};
use crate::offload::sum;
use crate::reuse::Setup;

/// Program, device, packet in, packet out, what is counted. Before a packet may stand `hops=N`; one that leaves may be the
/// last one that was put out, as it was.
pub(crate) type Row<'a> = (&'a str, &'a str, &'a str, &'a str, &'a str);

/// Who is reached through which device, and the end of its link address.
const NEIGHBOURS: [(&str, &str, u8); 4] =
    [("client", "cli0", 0x0a), ("pod", "pod0", 0x0b), ("far", "eth1", 0x0c), ("stranger", "eth1", 0x0d)];
/// Of the node's devices: to what the frames of the tests are sent.
const OWN_MAC: &str = "02:00:00:00:00:02";

pub(crate) const POD: Device = Device::new(Device::POD | Device::PEER, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);

/// A TCP connection from `client:1000` to `web:80` that is assured, and none of whose packets was fast yet.
pub(crate) const TCP: [Row<'_>; 4] = [
    (INGRESS, "cli0", "tcp S client:1000 > web:80", "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
    (INGRESS, "pod0", "tcp SA pod:8080 > client:1000", "same", "no_flow"),
    (EGRESS, "cli0", "tcp SA pod:8080 > client:1000", "tcp SA web:80 > client:1000", "returned"),
    (INGRESS, "cli0", "tcp A client:1000 > web:80", "tcp A client:1000 > pod:8080", "forwarded"),
];
/// Its next packets.
pub(crate) const TCP_THERE: Row<'_> =
    (INGRESS, "cli0", "tcp PA client:1000 > web:80 +5", "tcp PA client:1000 > pod:8080 +5", "fast_local forwarded");
pub(crate) const TCP_BACK: Row<'_> =
    (INGRESS, "pod0", "tcp A pod:8080 > client:1000 +7", "tcp A web:80 > client:1000 +7", "fast_local returned");
/// The same, by the stack.
pub(crate) const TCP_THERE_SLOW: Row<'_> =
    (INGRESS, "cli0", "tcp PA client:1000 > web:80 +5", "tcp PA client:1000 > pod:8080 +5", "forwarded");
pub(crate) const TCP_BACK_SLOW: Row<'_> = (INGRESS, "pod0", "tcp A pod:8080 > client:1000 +7", "same", "no_flow");

/// The same of UDP, from `client:1000` to `web:53`.
pub(crate) const UDP: [Row<'_>; 4] = [
    (INGRESS, "cli0", "udp client:1000 > web:53", "udp client:1000 > pod:5353", "flow_opened forwarded"),
    (INGRESS, "pod0", "udp pod:5353 > client:1000", "same", "not_ours"),
    (EGRESS, "cli0", "udp pod:5353 > client:1000", "udp web:53 > client:1000", "returned"),
    (INGRESS, "cli0", "udp client:1000 > web:53 +1", "udp client:1000 > pod:5353 +1", "forwarded"),
];
pub(crate) const UDP_THERE: Row<'_> =
    (INGRESS, "cli0", "udp client:1000 > web:53 +3", "udp client:1000 > pod:5353 +3", "fast_local forwarded");
pub(crate) const UDP_BACK: Row<'_> =
    (INGRESS, "pod0", "udp pod:5353 > client:1000 +4", "udp web:53 > client:1000 +4", "fast_local returned");
pub(crate) const UDP_THERE_SLOW: Row<'_> =
    (INGRESS, "cli0", "udp client:1000 > web:53 +3", "udp client:1000 > pod:5353 +3", "forwarded");
pub(crate) const UDP_BACK_SLOW: Row<'_> = (INGRESS, "pod0", "udp pod:5353 > client:1000 +4", "same", "not_ours");

pub(crate) const FAST: Setup = Setup { flow_entries: None, fast_path: true, refuses: false, answers_per_sec: None };

/// One packet of a flow in as many seconds takes the stack in any case.
pub(crate) const TURN_SECS: u32 = 16;
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

pub(crate) struct Bed {
    pub(crate) lab: Lab,
    /// Of what the kernel will cut up; 0: nothing.
    pub(crate) segment_size: u32,
    /// Frames that come in have another machine's link address.
    pub(crate) is_for_others: bool,
    /// As it was put out last.
    last: Vec<u8>,
    /// Flows have been silent. Else they are not, however long a row may take: see [`Self::age`].
    is_aged: bool,
}

/// One for each family.
pub(crate) fn beds() -> Result<Vec<Bed>> {
    labs_of("fast", FAST)?.into_iter().map(Bed::new).collect()
}

/// The time, once no second is about to begin in which a packet takes the stack.
fn before_a_turn() -> Result<u32> {
    let mut now_secs = 0;
    wait_until(DEADLINE, "it is nobody's turn soon", || {
        now_secs = u32::try_from(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec())?;
        Ok(!(now_secs + 1).is_multiple_of(TURN_SECS))
    })?;
    Ok(now_secs)
}

impl Bed {
    fn new(mut lab: Lab) -> Result<Self> {
        lab.netns.ip(&format!(
            "link add cli0 address {OWN_MAC} type veth peer name cli1
             link set cli0 up
             link set cli1 up
             link set pod0 address {OWN_MAC}
             link set eth1 address {OWN_MAC}
             route replace {} dev cli0
             route replace {} dev eth1",
            lab.names.addr("client")?,
            lab.names.addr("stranger")?,
        ))?;
        for (name, device, end) in NEIGHBOURS {
            let addr = lab.names.addr(name)?;
            lab.netns.ip(&format!("neigh add {addr} dev {device} lladdr 02:00:00:00:01:{end:02x} nud permanent"))?;
        }
        lab.netns.sysctl("ipv4/conf/all/forwarding", "1")?;
        lab.netns.sysctl("ipv6/conf/all/forwarding", "1")?;
        lab.netns.settle()?;
        lab.set_flags(Node::FAST_PATH)?;
        lab.set_devices(&[("cli0", Some(POD)), ("pod0", Some(POD))])?;
        lab.add_frontends()?;
        Ok(Self { lab, segment_size: 0, is_for_others: false, last: Vec::new(), is_aged: false })
    }

    pub(crate) fn is_v4(&self) -> bool {
        matches!(self.lab.names.addr("web"), Ok(addr) if addr.is_ipv4())
    }

    pub(crate) fn check(&mut self, rows: &[Row<'_>]) -> Result<()> {
        for row in rows {
            self.check_row(row).with_context(|| format!("{row:?}, IPv4: {}", self.is_v4()))?;
        }
        Ok(())
    }

    fn check_row(&mut self, (program, device, packet, out, counted): &Row<'_>) -> Result<()> {
        let mut frame = self.frame(program, packet)?;
        if self.is_for_others && *program == INGRESS {
            frame[5] ^= 0x80;
        }
        if !std::mem::take(&mut self.is_aged) {
            let now_secs = before_a_turn()?;
            self.change_flows(|_| Some(now_secs))?;
        }
        let (ifindex, before) = (self.lab.ifindex(device)?, self.lab.counts()?);
        let bench = &self.lab.bench;
        let outcome = self.lab.netns.run(|| bench.run_segmented(program, &frame, ifindex, self.segment_size))?;
        let grown = counted_since(&before, &self.lab.counts()?);
        ensure!(grown == words(counted), "counted {grown:?}");
        let is_fast = counted.contains("fast_");
        ensure!(outcome.verdict == if is_fast { Redirect } else { Pass }, "{:?}", outcome.verdict);
        self.last = outcome.packet;
        let (had, has) = (hops(&frame), hops(&self.last));
        ensure!(had.checked_sub(has) == Some(is_fast.into()), "of {had} hops {has} are left");
        let became = if *out == "same" { split_hops(packet).1 } else { out };
        let found = self.lab.names.learn(&self.last, became)?;
        ensure!(found == became, "became {found}");
        if counted.contains("fast_local") {
            let (_, to) = became.split_once("> ").context("a destination")?;
            let to = NEIGHBOURS.iter().find(|(name, ..)| to.starts_with(&format!("{name}:")));
            let macs = [2, 0, 0, 0, 1, to.context("a neighbour")?.2, 2, 0, 0, 0, 0, 2];
            ensure!(self.last[..12] == macs, "link addresses {:x?}", &self.last[..12]);
        } else {
            // The kernel writes those of the next hop.
            ensure!(self.last[..12] == frame[..12], "link addresses {:x?}", &self.last[..12]);
        }
        Ok(())
    }

    fn frame(&self, program: &str, packet: &str) -> Result<Vec<u8>> {
        if program == EGRESS && self.lab.names.text_as(&self.last, packet).is_ok_and(|text| text == packet) {
            return Ok(self.last.clone());
        }
        let (hops, packet) = split_hops(packet);
        let mut frame = self.lab.names.frame(packet)?;
        let Some(hops) = hops else { return Ok(frame) };
        let at = hops_at(&frame);
        frame[at] = hops.parse()?;
        if self.is_v4() {
            frame[24..26].fill(0);
            let checksum = !sum(&frame[14..34]);
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        }
        Ok(frame)
    }

    /// As if there had been no flow yet.
    pub(crate) fn forget(&mut self) -> Result<()> {
        self.change_flows(|_| None)
    }

    /// To the next row it is as if nothing had passed for so many seconds.
    pub(crate) fn age(&mut self, secs: u32) -> Result<()> {
        self.is_aged = true;
        self.change_flows(|last_secs| Some(last_secs - secs))
    }

    /// Makes flows' last packets pass at another second, or the flows be gone.
    fn change_flows(&self, change: impl Fn(u32) -> Option<u32>) -> Result<()> {
        if self.is_v4() {
            change_flows::<Addr4>(&self.lab, IPV4.flows, change)
        } else {
            change_flows::<Addr6>(&self.lab, IPV6.flows, change)
        }
    }
}

fn change_flows<A: Addr>(lab: &Lab, name: &str, change: impl Fn(u32) -> Option<u32>) -> Result<()>
where
    FlowKey<A>: Pod,
    Flow<A>: Pod,
{
    let mut flows: HashMap<MapData, FlowKey<A>, Flow<A>> = open(&lab.bench.datapath.loaded.maps, name)?;
    for (key, mut flow) in flows.iter().collect::<Result<Vec<_>, _>>()? {
        match change(flow.last_secs) {
            None => flows.remove(&key)?,
            Some(last_secs) => {
                flow.last_secs = last_secs;
                flows.insert(key, flow, 0)?;
            }
        }
    }
    Ok(())
}

/// What stands before a packet, and the packet.
fn split_hops(packet: &str) -> (Option<&str>, &str) {
    let split = packet.strip_prefix("hops=").and_then(|packet| packet.split_once(' '));
    split.map_or((None, packet), |(hops, packet)| (Some(hops), packet))
}

pub(crate) fn hops(frame: &[u8]) -> u8 {
    frame[hops_at(frame)]
}

fn hops_at(frame: &[u8]) -> usize {
    if frame[14] >> 4 == 4 { 22 } else { 21 }
}
