//! The programs, run on single packets by BPF_PROG_TEST_RUN.

use std::time::Duration;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::programs::{SchedClassifier, TestRun, TestRunOptions};
use proxy_agent::datapath::{Datapath, Options};
use proxy_agent::object;
use proxy_common::names::EMPTY;

/// Loaded programs that are attached to nothing.
pub struct Bench {
    pub datapath: Datapath,
    /// For the program that does nothing, which no datapath loads.
    empty: Ebpf,
}

/// What a program made of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub verdict: Verdict,
    pub packet: Vec<u8>,
}

/// What a program answered: the actions of linux/pkt_cls.h that ours use.
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

impl Bench {
    pub fn load(options: Options) -> Result<Self> {
        let mut empty = Ebpf::load(object::embedded()?).context("load the BPF object for its empty program")?;
        let program: &mut SchedClassifier = empty.program_mut(EMPTY).context("no empty program")?.try_into()?;
        program.load().context("load the empty program")?;
        Ok(Self { datapath: Datapath::load(object::embedded()?, options)?, empty })
    }

    fn program(&self, name: &str) -> Result<&SchedClassifier> {
        if name == EMPTY {
            return Ok(self.empty.program(EMPTY).context("no empty program")?.try_into()?);
        }
        self.datapath.attachments.program(name)
    }

    /// Runs a program once, as if the packet were on lo of this thread's network namespace.
    pub fn run(&self, program: &str, packet: &[u8]) -> Result<Outcome> {
        let mut out = vec![0; 65_536];
        let mut options = TestRunOptions::new();
        options.data_in = Some(packet);
        options.data_out = Some(&mut out);
        let result = self
            .program(program)?
            .test_run(options)
            .with_context(|| format!("run {program} on a packet of {} bytes", packet.len()))?;
        out.truncate(result.data_size_out as usize);
        Ok(Outcome { verdict: Verdict::from(result.return_value.cast_signed()), packet: out })
    }

    /// Mean time of one run over `runs`, each on a fresh packet: a packet that a program has rewritten is no longer the
    /// same to it.
    pub fn cost(&self, program: &str, packet: &[u8], runs: u32) -> Result<Duration> {
        let program = self.program(program)?;
        let mut total = Duration::ZERO;
        for _ in 0..runs {
            let mut options = TestRunOptions::new();
            options.data_in = Some(packet);
            total += program.test_run(options)?.duration;
        }
        Ok(total / runs)
    }
}
