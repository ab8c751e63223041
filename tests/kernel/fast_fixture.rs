//! The fixture of the fast path (`--fast-path`), in which packets of open connections skip the
//! stack.
//!
//! Each row names the device of its packet. A packet that the row counts as fast must be redirected
//! with one hop less, and into a pod with the link addresses of the last hop. Other packets pass
//! with their hops unchanged. `hops=N` may precede a packet. A packet at the
//! egress hook with the text of the last output is that output itself.

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node};
use proxy_common::names::{EGRESS, INGRESS};
use testbed::agent::{DEADLINE, wait_until};
use testbed::rows::Outcome;
use testbed::rows::parse::Row;
use testbed::rows::step::Step;
use testbed::test_run::Verdict::{Drop, Pass, Redirect};
use testbed::text::DST_MAC;

use crate::fixture::{Fixture, counted_since, fixtures_of};
use crate::offload::sum;
use crate::packets::Runner;
use crate::reuse::{Kernel, Setup};

/// Neighbours: name, device, last byte of the link address.
const NEIGHBOURS: [(&str, &str, u8); 4] = [
    ("client", "cli0", 0x0a),
    ("pod", "pod0", 0x0b),
    ("far", "eth1", 0x0c),
    ("stranger", "eth1", 0x0d),
];
/// The link address of the node's devices, and the destination of the tests' frames.
const OWN_MAC: &str = "02:00:00:00:00:02";

const POD: Device = Device::new(
    Device::POD | Device::PEER | Device::BARE,
    Addr4::UNSPECIFIED,
    Addr6::UNSPECIFIED,
)
.with_link(0, 1_500, DST_MAC);

pub(crate) const FAST: Setup = Setup {
    flow_entries: None,
    fast_path: true,
    kernel: Kernel::Usual,
    answers_per_sec: None,
    half_open_rings: None,
    hands_over: false,
    knows_no_shares: false,
};

/// In each period of this many seconds, one packet of a flow takes the stack.
pub(crate) const TURN_SECS: u32 = 16;

pub(crate) struct FastFixture {
    fixture: Fixture,
    /// The segment size into which the kernel splits a packet; 0: unsegmented.
    segment_size: u32,
    /// Frames arrive with another host's link address.
    is_for_others: bool,
    /// The last output packet.
    last: Vec<u8>,
    /// Flows have been silent for longer than a second. Otherwise each row follows the last one at
    /// once, however long it takes, ...
    is_aged: bool,
    /// ... or in the next second.
    is_next_second: bool,
}

/// Waits until no second, and no turn of the stack, is about to begin. Returns the time in seconds.
fn before_a_turn() -> Result<u32> {
    const LATE: i64 = 900_000_000;
    let mut now_secs = 0;
    wait_until(DEADLINE, "no packet is about to take its turn", || {
        let now = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
        now_secs = u32::try_from(now.tv_sec())?;
        Ok(now.tv_nsec() < LATE
            && now_secs % TURN_SECS != 0
            && !(now_secs + 1).is_multiple_of(TURN_SECS))
    })?;
    Ok(now_secs)
}

pub(crate) fn now_secs() -> Result<i64> {
    Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec())
}

impl Runner for FastFixture {
    fn fixture(&mut self) -> &mut Fixture {
        &mut self.fixture
    }

    fn outcome(&mut self, row: &Row) -> Result<Outcome> {
        let mut frame = self.frame(row.program, &row.packet)?;
        if self.is_for_others && row.program == INGRESS {
            frame[5] ^= 0x80;
        }
        let device = row.device.as_deref().context("the row names no device")?;
        let ifindex = self.fixture.ifindex(device)?;
        let before = self.fixture.counts()?;
        if !std::mem::take(&mut self.is_aged) {
            let last_secs = before_a_turn()? - u32::from(std::mem::take(&mut self.is_next_second));
            self.fixture.change_flows(|_| Some(last_secs))?;
        }
        let Fixture { bench, netns, .. } = &self.fixture;
        let outcome =
            netns.run(|| bench.run_segmented(row.program, &frame, ifindex, self.segment_size))?;
        let counted = counted_since(&before, &self.fixture.counts()?);
        let verdict = outcome.verdict;
        if verdict == Drop {
            return Ok(Outcome {
                verdict,
                out: "-".to_owned(),
                counted,
            });
        }
        if counted.iter().any(|name| name == "rejected") {
            let out = self.fixture.names.learn(&outcome.packet, &row.out)?;
            return Ok(Outcome {
                verdict,
                out,
                counted,
            });
        }
        let is_fast = counted.iter().any(|name| name.starts_with("fast_"));
        ensure!(
            verdict == if is_fast { Redirect } else { Pass },
            "{verdict:?} counted {counted:?}"
        );
        self.last = outcome.packet;
        let had = hops(&frame);
        let has = hops(&self.last);
        ensure!(
            had.checked_sub(has) == Some(is_fast.into()),
            "of {had} hops {has} are left"
        );
        let same = split_hops(&row.packet).1;
        let is_same = row.out == "same";
        let found = self
            .fixture
            .names
            .learn(&self.last, if is_same { same } else { &row.out })?;
        if counted.iter().any(|name| name == "fast_local") {
            let (_, to) = found.split_once("> ").context("no destination")?;
            let to = to
                .split([':', ' '])
                .next()
                .and_then(|to| NEIGHBOURS.iter().find(|(name, ..)| *name == to));
            let macs = [
                2,
                0,
                0,
                0,
                1,
                to.context("no neighbour")?.2,
                2,
                0,
                0,
                0,
                0,
                2,
            ];
            ensure!(
                self.last[..12] == macs,
                "link addresses {:x?}",
                &self.last[..12]
            );
        } else {
            // The kernel writes the link addresses of the next hop.
            ensure!(
                self.last[..12] == frame[..12],
                "link addresses {:x?}",
                &self.last[..12]
            );
        }
        let out = if found == same && found != row.out {
            "same".to_owned()
        } else {
            found
        };
        Ok(Outcome {
            verdict,
            out,
            counted,
        })
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Segments(size) => self.segment_size = *size,
            Step::FramesForOthers(is_for_others) => self.is_for_others = *is_for_others,
            Step::Silence(1) => self.is_next_second = true,
            step => {
                self.is_aged |= matches!(step, Step::Silence(_));
                self.fixture.step(step)?;
            }
        }
        Ok(())
    }
}

impl FastFixture {
    /// Makes a fixture per family.
    pub(crate) fn both() -> Result<Vec<Self>> {
        fixtures_of("fast", FAST)?
            .into_iter()
            .map(Self::new)
            .collect()
    }

    fn new(mut fixture: Fixture) -> Result<Self> {
        fixture.netns.ip(&format!(
            "link add cli0 address {OWN_MAC} type veth peer name cli1
             link set cli0 up
             link set cli1 up
             link set pod0 address {OWN_MAC}
             link set eth1 address {OWN_MAC}
             route replace {} dev cli0
             route replace {} dev eth1",
            fixture.names.addr("client")?,
            fixture.names.addr("stranger")?,
        ))?;
        for (name, device, end) in NEIGHBOURS {
            let addr = fixture.names.addr(name)?;
            fixture.netns.ip(&format!(
                "neigh add {addr} dev {device} lladdr 02:00:00:00:01:{end:02x} nud permanent"
            ))?;
        }
        fixture.netns.sysctl("ipv4/conf/all/forwarding", "1")?;
        fixture.netns.sysctl("ipv6/conf/all/forwarding", "1")?;
        fixture.netns.settle()?;
        fixture.set_flags(Node::FAST_PATH)?;
        fixture.set_devices(&[("cli0", Some(POD)), ("pod0", Some(POD))])?;
        fixture.add_frontends()?;
        fixture.bench.datapath.ways.open_for(Some(1_000_000))?;
        Ok(Self {
            fixture,
            segment_size: 0,
            is_for_others: false,
            last: Vec::new(),
            is_aged: false,
            is_next_second: false,
        })
    }

    fn frame(&self, program: &str, packet: &str) -> Result<Vec<u8>> {
        if program == EGRESS
            && self
                .fixture
                .names
                .text_as(&self.last, packet)
                .is_ok_and(|text| text == packet)
        {
            return Ok(self.last.clone());
        }
        let (hops, packet) = split_hops(packet);
        let mut frame = self.fixture.names.frame(packet)?;
        let Some(hops) = hops else { return Ok(frame) };
        let at = hops_at(&frame);
        frame[at] = hops.parse()?;
        if self.fixture.is_v4() {
            frame[24..26].fill(0);
            let checksum = !sum(&frame[14..34]);
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        }
        Ok(frame)
    }
}

/// Splits `hops=N` from the packet that follows it.
fn split_hops(packet: &str) -> (Option<&str>, &str) {
    let split = packet
        .strip_prefix("hops=")
        .and_then(|packet| packet.split_once(' '));
    split.map_or((None, packet), |(hops, packet)| (Some(hops), packet))
}

pub(crate) fn hops(frame: &[u8]) -> u8 {
    frame[hops_at(frame)]
}

fn hops_at(frame: &[u8]) -> usize {
    if frame[14] >> 4 == 4 { 22 } else { 21 }
}
