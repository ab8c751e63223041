//! Attach the programs to devices, and detach them: TCX where the kernel takes it, clsact where it does not.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::programs::tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle, qdisc_add_clsact};
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use proxy_common::names;
use tracing::debug;

use super::program;
use crate::net::filter::PRIORITY;

/// The first handle at our place among a device's clsact filters.
const CLSACT_HANDLE: TcHandle = TcHandle::new(0, 1);

/// How programs hang on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mechanism {
    /// TCX links, from Linux 6.6.
    Tcx,
    /// cls_bpf filters of a clsact qdisc.
    Clsact,
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}

/// A device that carries our programs. Dropping it detaches them.
pub struct Attached {
    pub name: String,
    pub mechanism: Mechanism,
    // Ingress goes first: a flow must not be opened whose replies nobody translates.
    _ingress: Option<SchedClassifierLink>,
    _egress: SchedClassifierLink,
}

/// Which of our programs a device carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hooks {
    /// Ingress and egress.
    Both,
    /// lo's own program, on its egress: a packet that arrives there has its way already.
    Loopback,
    /// The anchor's own program, on its egress.
    Anchor,
}

impl Hooks {
    fn at_egress(self) -> &'static str {
        match self {
            Self::Both => names::EGRESS,
            Self::Loopback => names::LO,
            Self::Anchor => names::ANCHOR,
        }
    }
}

/// All devices that carry our programs.
pub struct Attachments {
    ebpf: Ebpf,
    /// What to use; unset, each device is tried with TCX first.
    mechanism: Option<Mechanism>,
    devices: BTreeMap<u32, Attached>,
}

impl Attachments {
    pub(super) fn new(ebpf: Ebpf, mechanism: Option<Mechanism>) -> Self {
        Self { ebpf, mechanism, devices: BTreeMap::new() }
    }

    pub fn devices(&self) -> &BTreeMap<u32, Attached> {
        &self.devices
    }

    /// One of the loaded programs, to be run on packets of a test.
    pub fn program(&self, name: &str) -> Result<&SchedClassifier> {
        let program = self.ebpf.program(name).with_context(|| format!("no program {name} in the BPF object"))?;
        program.try_into().with_context(|| format!("program {name}"))
    }

    /// Attaches to a device, egress before ingress, both or neither.
    pub fn attach(&mut self, ifindex: u32, name: &str, hooks: Hooks) -> Result<()> {
        if let Some(attached) = self.devices.get_mut(&ifindex) {
            attached.name = name.to_owned();
            return Ok(());
        }
        let attached = match self.mechanism {
            Some(mechanism) => self.attach_by(mechanism, name, hooks)?,
            None => match self.attach_by(Mechanism::Tcx, name, hooks) {
                Ok(attached) => attached,
                Err(error) => {
                    debug!(device = name, error = format!("{error:#}"), "no TCX, trying clsact");
                    self.attach_by(Mechanism::Clsact, name, hooks)?
                }
            },
        };
        self.devices.insert(ifindex, attached);
        Ok(())
    }

    /// Detaches from a device; from one that is gone, forgets it.
    pub fn detach(&mut self, ifindex: u32) -> Option<Attached> {
        self.devices.remove(&ifindex)
    }

    fn attach_by(&mut self, mechanism: Mechanism, name: &str, hooks: Hooks) -> Result<Attached> {
        if mechanism == Mechanism::Clsact {
            // A qdisc that is there already is as good; whether it has an egress, attaching there shows.
            if let Err(error) = qdisc_add_clsact(name) {
                debug!(device = name, error = %error, "clsact not added");
            }
        }
        let egress = self.link(mechanism, hooks.at_egress(), name, TcAttachType::Egress)?;
        let ingress = match hooks {
            Hooks::Both => Some(self.link(mechanism, names::INGRESS, name, TcAttachType::Ingress)?),
            Hooks::Loopback | Hooks::Anchor => None,
        };
        if mechanism == Mechanism::Tcx {
            remove_filters(name);
        }
        Ok(Attached { name: name.to_owned(), mechanism, _ingress: ingress, _egress: egress })
    }

    fn link(
        &mut self,
        mechanism: Mechanism,
        program_name: &str,
        device: &str,
        attach_type: TcAttachType,
    ) -> Result<SchedClassifierLink> {
        let program = program(&mut self.ebpf, program_name)?;
        let options = match mechanism {
            Mechanism::Tcx => TcAttachOptions::TcxOrder(LinkOrder::default()),
            Mechanism::Clsact => {
                TcAttachOptions::Netlink(NlOptions { priority: PRIORITY, handle: CLSACT_HANDLE, classid: None })
            }
        };
        let id = match program.attach_with_options(device, attach_type, options) {
            Ok(id) => Ok(id),
            // What a predecessor left that was killed: ours by its place, replaced in one step.
            Err(_) if mechanism == Mechanism::Clsact => {
                let left = SchedClassifierLink::attached(device, attach_type, PRIORITY, CLSACT_HANDLE, None);
                left.map_err(|error| TcError::IoError(error).into()).and_then(|left| program.attach_to_link(left))
            }
            Err(error) => Err(error),
        };
        let id = id.with_context(|| format!("attach {program_name} to {device} by {mechanism}"))?;
        program.take_link(id).with_context(|| format!("take the link of {program_name} on {device}"))
    }
}

/// Takes off the filters of a predecessor that used clsact and was killed: after ours they would have their turn as
/// well, with tables that nobody keeps. There are hardly ever any, so that there are none is no error.
fn remove_filters(device: &str) {
    for attach_type in [TcAttachType::Ingress, TcAttachType::Egress] {
        // Detached when dropped.
        drop(SchedClassifierLink::attached(device, attach_type, PRIORITY, CLSACT_HANDLE, None));
    }
}
