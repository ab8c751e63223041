//! Attaches programs to devices and detaches them, through TCX where the kernel supports it, else
//! through clsact.

mod sockets;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::mem::ManuallyDrop;

use anyhow::{Context, Result, bail, ensure};
use aya::Ebpf;
use aya::programs::links::FdLink;
use aya::programs::tc::{
    NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle, qdisc_add_clsact,
};
use aya::programs::{LinkOrder, ProgramInfo, SchedClassifier, TcAttachType};
use nix::net::if_::if_nametoindex;
use proxy_common::hook::{Direction, PacketHook, Place};
use tracing::debug;

use super::adopt::{Adopted, adopt, is_shortage};
use super::attached::{Attached, AttachedProgram};
use super::links::link_name;
use super::persistence::{Persistence, PersistenceKind};
use super::pins::remove_pin;
use super::slow_path;
use super::sockets::Sockets;
use super::sys::tcx_query::tcx_programs;
use super::verifier;
use super::verify::{MissingProgram, missing};
use proxy_net::Handle;
use proxy_net::changes::Changes;
use proxy_net::filter::{HANDLE, Hook, PRIORITY};

/// The handle of kpx's filters among a device's clsact filters.
pub(super) const CLSACT_HANDLE: TcHandle = TcHandle::new(0, HANDLE);

/// The order in which hooks get their programs. In the reverse order, flows would open before a
/// program translates their replies.
pub(super) const EGRESS_FIRST: [TcAttachType; 2] = [TcAttachType::Egress, TcAttachType::Ingress];

/// Why clsact cannot be used on a device, and the remedy. On an `ingress` qdisc the kernel adds an
/// egress filter to the ingress filters.
const NO_EGRESS: &str = "the qdisc `ingress` of another program is in the place of clsact and has no egress hook: have that program use \
                         clsact (tc qdisc del dev DEVICE ingress; tc qdisc add dev DEVICE clsact), or attach by TCX, from Linux 6.6 on";

/// The mechanism that attaches programs to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mechanism {
    Tcx,
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

/// The devices with kpx's programs. With persistence, programs stay attached after a drop.
pub struct Attachments {
    ebpf: Ebpf,
    /// The mechanism to use. If unset, both mechanisms are tried on each device, first the
    /// mechanism that outlives the agent.
    mechanism: Option<Mechanism>,
    devices: BTreeMap<u32, Attached>,
    /// The interface indexes of devices without an egress hook because of another program's qdisc.
    without_egress: BTreeSet<u32>,
    /// The kernel's error for each hook whose program it refused. Later events do not retry these
    /// loads.
    refused: BTreeMap<&'static str, String>,
    persistence: Option<Persistence>,
    sockets: Option<Sockets>,
    /// Why packet programs serve the sockets, if socket programs were requested.
    sockets_left: Option<String>,
}

impl Attachments {
    pub(super) fn new(
        ebpf: Ebpf,
        mechanism: Option<Mechanism>,
        persistence: Option<Persistence>,
    ) -> Self {
        let devices = BTreeMap::new();
        let without_egress = BTreeSet::new();
        let refused = BTreeMap::new();
        Self {
            ebpf,
            mechanism,
            devices,
            without_egress,
            refused,
            persistence,
            sockets: None,
            sockets_left: None,
        }
    }

    pub fn devices(&self) -> &BTreeMap<u32, Attached> {
        &self.devices
    }

    /// Returns a loaded program for BPF_PROG_TEST_RUN.
    pub fn program(&self, name: &str) -> Result<&SchedClassifier> {
        let program = self
            .ebpf
            .program(name)
            .with_context(|| format!("no program {name} in the BPF object"))?;
        program
            .try_into()
            .with_context(|| format!("program {name}"))
    }

    pub fn info(&self, name: &str) -> Result<ProgramInfo> {
        let program = self
            .ebpf
            .program(name)
            .with_context(|| format!("no program {name} in the BPF object"))?;
        program
            .info()
            .with_context(|| format!("read information about program {name}"))
    }

    /// Returns the devices that may have other programs at their TCX hooks, including devices whose
    /// query failed.
    pub fn with_others(&self, devices: impl Iterator<Item = u32>) -> BTreeSet<u32> {
        let ours = PacketHook::ALL
            .into_iter()
            .filter_map(|hook| self.info(hook.program()).ok());
        let ours: BTreeSet<u32> = ours.map(|info| info.id()).collect();
        let has_others = |ifindex: &u32| {
            let is_others = |ids: Vec<u32>| ids.iter().any(|id| !ours.contains(id));
            Hook::ALL
                .into_iter()
                .any(|hook| tcx_programs(*ifindex, hook).map_or(true, is_others))
        };
        devices.filter(has_others).collect()
    }

    /// Sets the mechanism for later calls: see [`super::Options::mechanism`].
    pub fn set_mechanism(&mut self, mechanism: Mechanism) {
        self.mechanism = Some(mechanism);
    }

    /// Sets the devices that have no egress hook because of another program's qdisc.
    pub fn set_without_egress(&mut self, devices: BTreeSet<u32>) {
        self.without_egress = devices;
    }

    /// Attaches a device's missing programs.
    pub fn attach(&mut self, ifindex: u32, name: &str, place: Place) -> Result<()> {
        let lacks_egress = self.lacks_egress(ifindex, place);
        if lacks_egress
            && self
                .devices
                .get(&ifindex)
                .is_some_and(|attached| attached.mechanism == Mechanism::Clsact)
        {
            self.detach(ifindex);
        }
        // A modem can switch to packets without Ethernet headers, and another program can change a
        // tunnel's type.
        if self
            .devices
            .get(&ifindex)
            .is_some_and(|attached| attached.place != place)
        {
            self.detach(ifindex);
        }
        let mut carried = None;
        if let Some(attached) = self.devices.get_mut(&ifindex) {
            attached.name = name.to_owned();
            carried = Some(attached.mechanism);
            if attached.is_whole(place)
                && self
                    .mechanism
                    .is_none_or(|mechanism| mechanism == attached.mechanism)
            {
                return Ok(());
            }
        }
        match self.mechanism.or(carried) {
            Some(mechanism) => self.attach_by(mechanism, ifindex, name, place),
            None => {
                let [first, second] = self.preferred();
                self.attach_by(first, ifindex, name, place)
                    .or_else(|error| {
                        debug!(
                            device = name,
                            error = format!("{error:#}"),
                            "{first} failed, trying {second}"
                        );
                        self.attach_by(second, ifindex, name, place)
                    })
            }
        }
    }

    fn lacks_egress(&self, ifindex: u32, place: Place) -> bool {
        self.without_egress.contains(&ifindex) && PacketHook::at(place, Direction::Egress).is_some()
    }

    /// Returns the mechanisms in the order of the attempts. A link lives as long as its pin, a
    /// filter as long as its qdisc.
    fn preferred(&self) -> [Mechanism; 2] {
        match self
            .persistence
            .as_ref()
            .is_some_and(|persistence| persistence.pins.is_ours_alone())
        {
            true => [Mechanism::Clsact, Mechanism::Tcx],
            false => [Mechanism::Tcx, Mechanism::Clsact],
        }
    }

    /// Returns what keeps the programs in the kernel while no agent runs.
    pub fn persistence_kind(&self) -> PersistenceKind {
        let Some(Persistence { pins, .. }) = &self.persistence else {
            return PersistenceKind::Nothing;
        };
        let all_are_filters = || {
            self.devices
                .values()
                .all(|device| device.mechanism == Mechanism::Clsact)
        };
        match pins.is_ours_alone() {
            false if pins.is_of_unknown_owner() => PersistenceKind::Unknown,
            false => PersistenceKind::Pins,
            true if pins.may_open_by_id() && all_are_filters() => PersistenceKind::Filters,
            true => PersistenceKind::Nothing,
        }
    }

    /// Detaches and forgets a device's programs.
    pub fn detach(&mut self, ifindex: u32) -> Option<Attached> {
        let mut attached = self.devices.remove(&ifindex)?;
        attached.detach();
        Some(attached)
    }

    /// Takes over a predecessor's programs. Returns false if one of its programs may remain.
    pub(super) fn adopt(&mut self) -> Result<bool> {
        let Some(persistence) = &self.persistence else {
            return Ok(true);
        };
        let Adopted { devices, is_all } = adopt(&mut self.ebpf, persistence)?;
        self.devices = devices;
        Ok(is_all)
    }

    /// Returns kpx's programs that are missing on their devices. A link without its pin still runs:
    /// see [`Self::restore_pins`].
    pub async fn verify(&self, handle: &Handle) -> Result<Vec<MissingProgram>> {
        let id = |program: &SchedClassifier| {
            program
                .fd()
                .ok()
                .map(|_| Ok(program.info()?.id()))
                .transpose()
        };
        missing(handle, &self.devices, |name| id(self.program(name)?)).await
    }

    pub(crate) fn keep_maps(&mut self) -> Result<()> {
        self.persistence
            .as_mut()
            .map_or(Ok(()), Persistence::keep_maps)
    }

    /// Restores the programs of the slow path that another program removed from their array.
    pub fn restore_slow_path(&mut self) -> Result<()> {
        slow_path::restore(&mut self.ebpf)
    }

    /// Restores pins of maps and links that another program removed. Returns the number of restored
    /// pins.
    pub fn restore_pins(&mut self) -> Result<u64> {
        let Some(persistence) = &self.persistence else {
            return Ok(0);
        };
        persistence.pins.reopen()?;
        let links = persistence.pins.links();
        let mut restored = persistence.restore_pins()?;
        for (ifindex, attached) in &mut self.devices {
            for attach_type in EGRESS_FIRST {
                let path = links.join(link_name(*ifindex, attach_type));
                restored += u64::from(attached.restore_pin(attach_type, &path)?);
            }
        }
        Ok(restored)
    }

    /// Returns the list of changes to this host; `None` if the programs do not outlive the agent.
    pub fn changes(&self) -> Option<&Changes> {
        self.persistence
            .as_ref()
            .map(|persistence| &persistence.changes)
    }

    /// Detaches the programs of all devices and of sockets.
    pub fn detach_all(mut self) {
        if let Some(sockets) = self.sockets.take() {
            sockets.detach();
        }
        self.devices.values_mut().for_each(Attached::detach);
    }

    /// Attaches through one mechanism, then detaches the other mechanism's programs.
    fn attach_by(
        &mut self,
        mechanism: Mechanism,
        ifindex: u32,
        name: &str,
        place: Place,
    ) -> Result<()> {
        let (mut attached, before) = match self.devices.remove(&ifindex) {
            Some(same) if same.mechanism == mechanism => (same, None),
            other => (Attached::new(name, place, mechanism), other),
        };
        let result = self.complete(&mut attached, ifindex, place);
        let (stands, mut goes) = if result.is_ok() {
            (Some(attached), before)
        } else {
            (before, None)
        };
        if let Some(goes) = &mut goes {
            goes.detach();
        }
        self.devices.extend(stands.map(|stands| (ifindex, stands)));
        result
    }

    /// Attaches egress before ingress. If either fails, detaches both.
    fn complete(&mut self, attached: &mut Attached, ifindex: u32, place: Place) -> Result<()> {
        if attached.mechanism == Mechanism::Clsact {
            ensure!(
                !self.lacks_egress(ifindex, place),
                "{}",
                NO_EGRESS.replace("DEVICE", &attached.name)
            );
            self.ensure_clsact(ifindex, &attached.name)?;
        }
        same_device(&attached.name, ifindex)?;
        let result = self
            .fill(attached, ifindex, place)
            .and_then(|()| same_device(&attached.name, ifindex));
        if result.is_err() {
            attached.detach();
        } else if attached.mechanism == Mechanism::Tcx {
            remove_filters(&attached.name);
        }
        result
    }

    fn fill(&mut self, attached: &mut Attached, ifindex: u32, place: Place) -> Result<()> {
        for attach_type in EGRESS_FIRST {
            let is_there = attached.hook(attach_type).is_some();
            match PacketHook::at(place, direction(attach_type)) {
                Some(hook) if !is_there => {
                    let program = self.hold(
                        attached.mechanism,
                        ifindex,
                        hook,
                        &attached.name,
                        attach_type,
                    )?;
                    *attached.hook(attach_type) = Some(program);
                }
                None => {
                    if let Some(program) = attached.hook(attach_type).take() {
                        program.detach();
                    }
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Adds a clsact qdisc if the device has none.
    fn ensure_clsact(&self, ifindex: u32, device: &str) -> Result<()> {
        let changes = self
            .persistence
            .as_ref()
            .map(|persistence| &persistence.changes);
        let is_new = changes.map_or(Ok(false), |changes| changes.begin_qdisc(ifindex))?;
        if let Err(error) = qdisc_add_clsact(device) {
            debug!(device, %error, "clsact not added");
            if let Some(changes) = changes.filter(|_| is_new) {
                changes.forget_qdisc(ifindex)?;
            }
        }
        Ok(())
    }

    fn hold(
        &mut self,
        mechanism: Mechanism,
        ifindex: u32,
        hook: PacketHook,
        device: &str,
        attach_type: TcAttachType,
    ) -> Result<AttachedProgram> {
        let link = self.link(mechanism, hook, device, attach_type)?;
        let Some(Persistence { pins, .. }) = &self.persistence else {
            return Ok(AttachedProgram::Own { _link: link });
        };
        if mechanism == Mechanism::Clsact {
            return Ok(AttachedProgram::Filter(ManuallyDrop::new(link)));
        }
        let links = pins.links();
        // Another program may have removed the directory with its content.
        fs::create_dir_all(&links).with_context(|| format!("create {}", links.display()))?;
        let path = links.join(link_name(ifindex, attach_type));
        if path.exists() {
            remove_pin(&path)?; // The pin belongs to a device that is gone.
        }
        let link = FdLink::try_from(link).context("a TCX link")?;
        let pinned = link
            .pin(&path)
            .with_context(|| format!("pin the link of {} on {device}", hook.program()))?;
        Ok(AttachedProgram::Pinned(pinned))
    }

    fn link(
        &mut self,
        mechanism: Mechanism,
        hook: PacketHook,
        device: &str,
        attach_type: TcAttachType,
    ) -> Result<SchedClassifierLink> {
        let name = hook.program();
        if let Some(why) = self.refused.get(name) {
            bail!("{why}");
        }
        let program = loaded(&mut self.ebpf, hook).inspect_err(|error| {
            if !is_shortage(error) {
                self.refused.insert(name, format!("{error:#}"));
            }
        })?;
        let options = match mechanism {
            Mechanism::Tcx => TcAttachOptions::TcxOrder(LinkOrder::default()),
            Mechanism::Clsact => TcAttachOptions::Netlink(NlOptions {
                priority: PRIORITY,
                handle: CLSACT_HANDLE,
                classid: None,
            }),
        };
        let id = match program.attach_with_options(device, attach_type, options) {
            Ok(id) => Ok(id),
            // A killed predecessor left this filter, which has kpx's handle. Replace it atomically.
            Err(_) if mechanism == Mechanism::Clsact => {
                let left = SchedClassifierLink::attached(
                    device,
                    attach_type,
                    PRIORITY,
                    CLSACT_HANDLE,
                    None,
                );
                left.map_err(|error| TcError::IoError(error).into())
                    .and_then(|left| program.attach_to_link(left))
            }
            Err(error) => Err(error),
        };
        let id = id.with_context(|| format!("attach {name} to {device} by {mechanism}"))?;
        program
            .take_link(id)
            .with_context(|| format!("take the link of {name} on {device}"))
    }
}

/// Removes the clsact filters of a killed predecessor, which would run after kpx's programs with
/// stale tables. Usually there are no such filters.
pub(super) fn remove_filters(device: &str) {
    for attach_type in [TcAttachType::Ingress, TcAttachType::Egress] {
        // A dropped filter is detached.
        drop(SchedClassifierLink::attached(
            device,
            attach_type,
            PRIORITY,
            CLSACT_HANDLE,
            None,
        ));
    }
}

pub(super) fn direction(attach_type: TcAttachType) -> Direction {
    if attach_type == TcAttachType::Ingress {
        Direction::Ingress
    } else {
        Direction::Egress
    }
}

/// Returns a hook's loaded program. Programs that few nodes need are loaded with the first device
/// that needs them.
pub(super) fn loaded(ebpf: &mut Ebpf, hook: PacketHook) -> Result<&mut SchedClassifier> {
    if program(ebpf, hook.program())?.fd().is_err() && slow_path::is_separate(ebpf)? {
        slow_path::load(ebpf, hook.slow())?;
    }
    loaded_as(ebpf, hook.program())
}

/// Returns a program by its name, and loads it if it is not loaded.
pub(super) fn loaded_as<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let program = program(ebpf, name)?;
    if program.fd().is_err() {
        verifier::load(|| program.load()).with_context(|| format!("load program {name}"))?;
    }
    Ok(program)
}

pub(super) fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let program = ebpf
        .program_mut(name)
        .with_context(|| format!("no program {name} in the BPF object"))?;
    program
        .try_into()
        .with_context(|| format!("program {name}"))
}

/// Returns an error if the name now belongs to another device.
fn same_device(name: &str, ifindex: u32) -> Result<()> {
    let found = if_nametoindex(name).with_context(|| format!("find device {name}"))?;
    ensure!(
        found == ifindex,
        "device {ifindex} is not called {name} any more"
    );
    Ok(())
}
