//! Probes this kernel: loads the programs, and attaches them in a private network namespace.

use std::thread;

use anyhow::{Context, Result, anyhow};
use caps::{CapSet, Capability};
use nix::sched::{CloneFlags, unshare};

use proxy_common::hook::Place;
use proxy_datapath::object;
use proxy_datapath::{Cgroup, Datapath, Mechanism, Options, SocketOptions};

/// The results of the probe; an error is the kernel's refusal.
#[derive(Clone, Debug)]
pub(crate) struct Probed {
    /// `Ok` if the verifier accepts the programs, and the kernel has the map types.
    pub(crate) programs: Result<(), String>,
    /// `Ok` if the verifier accepts the socket programs.
    pub(crate) sockets: Result<(), String>,
    pub(crate) tcx: Result<(), String>,
    pub(crate) clsact: Result<(), String>,
    /// True if attaching was skipped, because this process may not create a network namespace.
    pub(crate) may_not_attach: bool,
}

impl Default for Probed {
    fn default() -> Self {
        Self {
            programs: Ok(()),
            sockets: Ok(()),
            tcx: Ok(()),
            clsact: Ok(()),
            may_not_attach: false,
        }
    }
}

/// The index and name of lo, the only device of a new namespace.
const LO: (u32, &str) = (1, "lo");

pub(crate) fn probe() -> Probed {
    let may_not_attach =
        !caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN).unwrap_or(false);
    let not_tried = || Err("not tried".to_owned());
    // Loading takes most of the time, so the programs are loaded once.
    let (datapath, sockets) = load();
    let mut datapath = match datapath {
        Err(error) => {
            let programs = Err(format!("{error:#}"));
            return Probed {
                programs,
                sockets,
                tcx: not_tried(),
                clsact: not_tried(),
                may_not_attach,
            };
        }
        Ok(_) if may_not_attach => {
            return Probed {
                sockets,
                tcx: not_tried(),
                clsact: not_tried(),
                may_not_attach,
                ..Probed::default()
            };
        }
        Ok(datapath) => datapath,
    };
    let mut attach = |mechanism| {
        datapath.attachments.set_mechanism(mechanism);
        // A thread enters a new network namespace. The namespace and its attachments end with the
        // thread.
        let attached = thread::scope(|scope| {
            let attaching = scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?;
                let attached = datapath.attachments.attach(LO.0, LO.1, Place::Device);
                datapath.attachments.detach(LO.0);
                attached
            });
            attaching.join()
        });
        attached
            .unwrap_or_else(|_| Err(anyhow!("the probe panicked")))
            .map_err(|error| format!("{error:#}"))
    };
    Probed {
        programs: Ok(()),
        sockets,
        tcx: attach(Mechanism::Tcx),
        clsact: attach(Mechanism::Clsact),
        may_not_attach,
    }
}

/// Loads the programs with the socket programs, as `--socket-lb auto` does. The second result has
/// the reason why sockets stay untranslated.
fn load() -> (Result<Datapath>, Result<(), String>) {
    let sockets = Some(SocketOptions {
        everywhere: false,
        pods: true,
        udp: true,
        is_optional: true,
    });
    let datapath = object::embedded().and_then(|object| {
        Datapath::load(
            object,
            Options {
                sockets,
                ..Options::default()
            },
        )
    });
    let left = datapath
        .as_ref()
        .ok()
        .and_then(|datapath| datapath.attachments.sockets_left());
    let fit = match left {
        Some(why) => Err(why.to_owned()),
        None => Cgroup::find(None)
            .map(drop)
            .map_err(|error| format!("{error:#}")),
    };
    (datapath, fit)
}
