//! The programs, run on single packets by BPF_PROG_TEST_RUN.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use aya::maps::{Map, MapData, MapInfo};
use aya::programs::SchedClassifier;
use nix::time::{ClockId, clock_gettime};
use proxy_common::names::{self, ANCHOR, EGRESS, INGRESS};
use proxy_datapath::object;
use proxy_datapath::test_run::{Field, SkBuff, test_run};
use proxy_datapath::{Datapath, Options, Sizes};

use crate::agent::wait_until;

/// The interface index of lo, in every network namespace.
const LO: u32 = 1;
/// The host has made the packet: `MADE_HERE` of proxy-ebpf.
const MADE_HERE: u32 = 1;
/// Flow entries that are enough for every source port to be given to a flow of four.
const SMALL: u32 = 32_768;

/// Loaded programs that are attached to nothing.
pub struct Bench {
    pub datapath: Datapath,
    /// Marks of packets as ingress hooks put them out: the hook through which one leaves finds on
    /// it what they noted.
    marks: Mutex<HashMap<Vec<u8>, u32>>,
}

/// The facts that the kernel adds to a packet.
struct Surroundings {
    ifindex: u32,
    /// Beside what hooks have noted.
    more_mark: u32,
    gso_size: u32,
}

/// The outcome of a program for a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub verdict: Verdict,
    pub packet: Vec<u8>,
}

/// The answer of a program: the actions of linux/pkt_cls.h that ours use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    Drop,
    Redirect,
    Other(i32),
}

impl From<i32> for Verdict {
    fn from(action: i32) -> Self {
        match action {
            -1 => Self::Pass,
            2 => Self::Drop,
            7 => Self::Redirect,
            other => Self::Other(other),
        }
    }
}

/// Waits until the programs' clock has gone on by so many seconds.
pub fn let_seconds_pass(secs: u32) -> Result<()> {
    let now_secs = || {
        clock_gettime(ClockId::CLOCK_BOOTTIME)
            .map(|now| now.tv_sec())
            .context("read the time since boot")
    };
    let end_secs = now_secs()? + i64::from(secs);
    wait_until(
        Duration::from_secs(u64::from(secs) + 5),
        "the programs' clock goes on",
        || Ok(now_secs()? >= end_secs),
    )
}

impl Bench {
    pub fn load(options: Options) -> Result<Self> {
        Self::load_object(object::embedded()?, options)
    }

    /// With another object than kpx's own.
    pub fn load_object(object: &[u8], options: Options) -> Result<Self> {
        let answers_per_sec = options.answers_per_sec.or(Some(u32::MAX));
        // A test's thread may move to another CPU, and the order of half-open flows shall not
        // depend on that.
        let half_open_rings = options.half_open_rings.or(Some(1));
        let options = Options {
            exposes_packet_mark: true,
            answers_per_sec,
            half_open_rings,
            ..options
        };
        let datapath = Datapath::load(object, options)?;
        // As on a node, packets of ends without a flow ask for none: see `proxy_common::ways`.
        for _ in 0..2 {
            datapath.flows.sweep()?;
        }
        Ok(Self {
            datapath,
            marks: Mutex::default(),
        })
    }

    /// Programs with room for so few flows that loading them takes no time.
    pub fn load_small() -> Result<Self> {
        Self::load(Options {
            sizes: Sizes {
                flows: Some(SMALL),
                ..Sizes::default()
            },
            ..Options::default()
        })
    }

    pub fn program(&self, name: &str) -> Result<&SchedClassifier> {
        self.datapath.attachments.program(name)
    }

    /// Runs a program once, as if the packet were on lo of this thread's network namespace. The
    /// host has made what meets the hooks of its own way.
    pub fn run(&self, program: &str, packet: &[u8]) -> Result<Outcome> {
        if [ANCHOR, names::LO].contains(&program) {
            self.run_own(program, packet)
        } else {
            self.run_on(program, packet, LO)
        }
    }

    /// Runs a program once, as if the packet were on that device of this thread's network
    /// namespace. One that leaves is on its way through this host if an ingress hook put it out
    /// just like that before.
    pub fn run_on(&self, program: &str, packet: &[u8], ifindex: u32) -> Result<Outcome> {
        self.run_segmented(program, packet, ifindex, 0)
    }

    /// The same of a packet that is to be cut into segments of so many bytes of payload, unless
    /// that is 0.
    pub fn run_segmented(
        &self,
        program: &str,
        packet: &[u8],
        ifindex: u32,
        size: u32,
    ) -> Result<Outcome> {
        self.run_in(
            program,
            packet,
            Surroundings {
                ifindex,
                more_mark: 0,
                gso_size: size,
            },
        )
    }

    /// Runs a program as [`Self::run_on`] does, on a packet with these bits of its mark.
    pub fn run_marked(
        &self,
        program: &str,
        packet: &[u8],
        ifindex: u32,
        mark: u32,
    ) -> Result<Outcome> {
        self.run_in(
            program,
            packet,
            Surroundings {
                ifindex,
                more_mark: mark,
                gso_size: 0,
            },
        )
    }

    /// Runs a program as [`Self::run`] does, on a packet that the host itself has made.
    pub fn run_own(&self, program: &str, packet: &[u8]) -> Result<Outcome> {
        self.run_own_on(program, packet, LO)
    }

    /// Runs a program as [`Self::run_on`] does, on a packet that the host itself has made.
    pub fn run_own_on(&self, program: &str, packet: &[u8], ifindex: u32) -> Result<Outcome> {
        self.run_in(
            program,
            packet,
            Surroundings {
                ifindex,
                more_mark: MADE_HERE,
                gso_size: 0,
            },
        )
    }

    fn run_in(&self, program: &str, packet: &[u8], around: Surroundings) -> Result<Outcome> {
        let mut out = vec![0; 65_536];
        let noted = if program == EGRESS {
            self.marks().get(packet).copied().unwrap_or(0)
        } else {
            0
        };
        let Surroundings {
            ifindex,
            more_mark,
            gso_size,
        } = around;
        let mark = noted | more_mark;
        let context = SkBuff::new([
            (Field::MARK, mark),
            (Field::IFINDEX, ifindex),
            (Field::GSO_SIZE, gso_size),
        ]);
        let ran = test_run(self.program(program)?, packet, Some(&context), &mut out);
        let ran = ran.with_context(|| format!("run {program}"))?;
        out.truncate(ran.len);
        let verdict = Verdict::from(ran.action);
        if [INGRESS, EGRESS].contains(&program) && verdict != Verdict::Drop {
            self.marks()
                .insert(out.clone(), ran.context.get(Field::MARK));
        }
        Ok(Outcome {
            verdict,
            packet: out,
        })
    }

    fn marks(&self) -> MutexGuard<'_, HashMap<Vec<u8>, u32>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another handle on a map of the loaded programs, which `program` uses.
    pub fn map(&self, program: &str, name: &str) -> Result<Map> {
        let ids = self
            .program(program)?
            .info()?
            .map_ids()?
            .context("this kernel does not tell a program's maps")?;
        for id in ids {
            if MapInfo::from_id(id)?.name_as_str() == Some(name) {
                return Ok(Map::from_map_data(MapData::from_id(id)?)?);
            }
        }
        bail!("{program} uses no map {name}")
    }
}
