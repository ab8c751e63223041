//! What this kernel can do, tried out: the programs are loaded, and attached in a network namespace of our own.

use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, unshare};

use crate::datapath::{Datapath, Hooks, Mechanism, Options};
use crate::object;

/// The error says why not.
#[derive(Clone, Debug)]
pub(super) struct Probed {
    /// The verifier takes the programs, and the kernel has the maps.
    pub(super) programs: Result<(), String>,
    pub(super) tcx: Result<(), String>,
    pub(super) clsact: Result<(), String>,
}

impl Default for Probed {
    fn default() -> Self {
        Self { programs: Ok(()), tcx: Ok(()), clsact: Ok(()) }
    }
}

/// lo, the one device that every namespace has.
const LO: (u32, &str) = (1, "lo");

pub(super) fn probe() -> Probed {
    let load = |mechanism| Datapath::load(object::embedded()?, Options { mechanism, ..Options::default() });
    let programs = told(load(None).map(drop));
    if programs.is_err() {
        let not_tried = Err("not tried".to_owned());
        return Probed { programs, tcx: not_tried.clone(), clsact: not_tried };
    }
    let attach = |mechanism| {
        // A thread that leaves the network namespace, and ends: with it the namespace and what is attached there.
        let attached = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?;
            load(Some(mechanism))?.attachments.attach(LO.0, LO.1, Hooks::Both)
        });
        told(attached.join().unwrap_or_else(|_| Err(anyhow!("the probe panicked"))))
    };
    Probed { programs, tcx: attach(Mechanism::Tcx), clsact: attach(Mechanism::Clsact) }
}

fn told(result: Result<()>) -> Result<(), String> {
    result.map_err(|error| format!("{error:#}"))
}
