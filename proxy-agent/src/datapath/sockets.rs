//! Sockets that dial services: the programs of the cgroup hooks attached, kept, taken away (`--socket-lb`).

mod cgroup;
mod stale;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use aya::programs::cgroup_sock_addr::CgroupSockAddrLinkId;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{CgroupAttachMode, CgroupSockAddr, ProgramError, ProgramType};
use aya::sys::{BpfHelper, is_helper_supported};
use aya::{Ebpf, EbpfLoader};
use proxy_common::{names, socket};
use tracing::{debug, info, warn};

use super::attach::{Attachments, Stays};
use super::pins::{self, Pins, remove_pin};
use super::verifier;
use super::verify::open_links;
use crate::status::SocketsStatus;

pub use cgroup::Cgroup;
pub use stale::StaleSockets;

/// Whose sockets are led to backends, and how. What is unset is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Of all network namespaces, instead of this one alone.
    pub everywhere: bool,
    /// Those of UDP as well as those of TCP.
    pub udp: bool,
}

/// What the programs are told when they are loaded.
pub(super) struct Told {
    netns: u64,
    flags: u32,
}

impl Told {
    pub(super) fn of(options: SocketOptions) -> Result<Self> {
        let SocketOptions { everywhere, udp } = options;
        let netns = netns_cookie::netns_cookie().context(
            "ask for this network namespace's number, which --socket-lb needs to tell the host's sockets: \
             kernels before Linux 5.14 do not have it",
        )?;
        let refuses = is_supported(BpfHelper::BPF_FUNC_set_retval)?;
        let names = is_supported(BpfHelper::BPF_FUNC_get_current_comm)?;
        debug!(netns, refuses, names, "sockets");
        let flags =
            [(everywhere, socket::EVERYWHERE), (udp, socket::UDP), (refuses, socket::REFUSES), (names, socket::NAMES)];
        Ok(Self { netns, flags: flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag) })
    }

    pub(super) fn tell<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        loader.override_global(names::SOCKET_NETNS, &self.netns, true);
        loader.override_global(names::SOCKET_FLAGS, &self.flags, true);
    }
}

fn is_supported(helper: BpfHelper) -> Result<bool> {
    is_helper_supported(ProgramType::CgroupSockAddr, helper)
        .with_context(|| format!("ask whether the kernel has {helper:?} for sockets"))
}

/// The programs that are asked for. Those that show what was dialled come first: nothing must be led of which nobody knows.
pub(super) fn programs(options: SocketOptions) -> Vec<&'static str> {
    let all = names::SOCKETS.into_iter().chain(names::DATAGRAMS.into_iter().filter(|_| options.udp));
    let (leading, showing): (Vec<_>, Vec<_>) = all.partition(|name| name.contains("connect") || name.contains("send"));
    showing.into_iter().chain(leading).collect()
}

pub(super) fn load(ebpf: &mut Ebpf, options: SocketOptions) -> Result<()> {
    programs(options).into_iter().try_for_each(|name| {
        let program = program(ebpf, name)?;
        verifier::load(|| program.load()).with_context(|| format!("load program {name}"))
    })
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut CgroupSockAddr> {
    let program = ebpf.program_mut(name).with_context(|| format!("no program {name} in the BPF object"))?;
    program.try_into().with_context(|| format!("program {name}"))
}

/// The maps of which these programs have no use: without room, and without pins.
pub(super) fn unused_maps(options: Option<SocketOptions>) -> Vec<&'static str> {
    let families = [names::IPV4, names::IPV6];
    let (tcp, udp) = (families.map(|maps| maps.tcp_sockets), families.map(|maps| maps.udp_sockets));
    match options {
        None => [tcp, udp].concat(),
        Some(SocketOptions { udp: false, .. }) => udp.to_vec(),
        Some(SocketOptions { udp: true, .. }) => Vec::new(),
    }
}

/// The programs that are attached.
pub(super) struct Sockets {
    cgroup: Cgroup,
    options: SocketOptions,
    /// By program.
    links: BTreeMap<&'static str, PinnedLink>,
}

impl Attachments {
    /// Attaches the programs that were loaded to a cgroup, and lets go of those of a predecessor. Each comes before its
    /// predecessor goes, so that no call meets none: whom the first has led to a backend the second leaves alone.
    pub fn attach_sockets(&mut self, cgroup: Cgroup, options: SocketOptions) -> Result<()> {
        let names = programs(options);
        self.sockets = Some(Sockets { cgroup, options, links: BTreeMap::new() });
        names.iter().try_for_each(|name| self.attach_socket(name))?;
        let keeps: BTreeSet<_> = names.into_iter().map(pin_name).collect();
        let pins = &self.stays.as_ref().context(NOT_PINNED)?.pins;
        remove_links(pins, |pin| keeps.contains(pin))?;
        if let Some(Sockets { cgroup, links, .. }) = &self.sockets {
            info!(cgroup = %cgroup, programs = links.len(), "serving sockets");
        }
        Ok(())
    }

    pub fn sockets_status(&self) -> Option<SocketsStatus> {
        let Sockets { cgroup, options, .. } = self.sockets.as_ref()?;
        let scope = if options.everywhere { "all" } else { "host" };
        Some(SocketsStatus { scope: scope.to_owned(), udp: options.udp, cgroup: cgroup.to_string() })
    }

    /// Attaches anew what somebody has taken off, and says how much that was.
    pub(crate) fn mend_sockets(&mut self) -> Result<u64> {
        let (Some(Sockets { links, .. }), Some(Stays { pins, .. })) = (&self.sockets, &self.stays) else {
            return Ok(0);
        };
        let attached = attached()?;
        let mut missing = Vec::new();
        for name in links.keys() {
            let id = program(&mut self.ebpf, name)?.info()?.id();
            if !attached.contains(&id) || !pins.links().join(pin_name(name)).exists() {
                missing.push(*name);
            }
        }
        for name in &missing {
            warn!(program = name, "the program was taken off its cgroup, attaching it again");
            self.attach_socket(name)?;
        }
        Ok(missing.len() as u64)
    }

    /// What is led already stays so: its connections know their backends.
    pub(super) fn detach_sockets(&mut self) {
        for (_, link) in self.sockets.take().into_iter().flat_map(|sockets| sockets.links) {
            if let Err(error) = link.unpin() {
                debug!(%error, "a link's pin was gone");
            }
        }
    }

    fn attach_socket(&mut self, name: &'static str) -> Result<()> {
        let Stays { pins, .. } = self.stays.as_ref().context(NOT_PINNED)?;
        let Sockets { cgroup, links, .. } = self.sockets.as_mut().context("no cgroup")?;
        let program = program(&mut self.ebpf, name)?;
        let id = attach_beside_others(program, cgroup);
        let id = id.with_context(|| format!("attach {name} to the cgroup {cgroup}"))?;
        let link = program.take_link(id).with_context(|| format!("take the link of {name}"))?;
        let link = FdLink::try_from(link).context("a cgroup's link")?;
        fs::create_dir_all(pins.links()).with_context(|| format!("create {}", pins.links().display()))?;
        let (path, next) = (pins.links().join(pin_name(name)), pins.links().join(format!("{}-next", pin_name(name))));
        if next.exists() {
            remove_pin(&next)?; // Of one that was killed in the middle of this.
        }
        link.pin(&next).with_context(|| format!("pin the link of {name}"))?;
        // With the pin that it takes the place of goes the predecessor's link.
        fs::rename(&next, &path).with_context(|| format!("rename {}", next.display()))?;
        let pinned = PinnedLink::from_pin(&path).with_context(|| format!("open the pin {}", path.display()))?;
        links.insert(name, pinned);
        Ok(())
    }
}

/// Up to Linux 7.2 that is what a link always means, and the kernel takes no word for it (EINVAL); later it has to be said.
fn attach_beside_others(program: &mut CgroupSockAddr, cgroup: &Cgroup) -> Result<CgroupSockAddrLinkId, ProgramError> {
    match program.attach(cgroup, CgroupAttachMode::AllowMultiple) {
        Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(EINVAL) => {
            program.attach(cgroup, CgroupAttachMode::Single)
        }
        attached => attached,
    }
}

const EINVAL: i32 = 22;

const NOT_PINNED: &str = "programs on sockets are pinned, and there is no place for that";

/// Takes away what a predecessor that was told to had for sockets, and these options have not. (Links of single programs go
/// when those that stay are attached.)
pub(super) fn remove_unused(pins: &Pins, options: Option<SocketOptions>) -> Result<()> {
    if options.is_none() {
        remove_links(pins, |_| false)?;
    }
    let (unused, maps) = (unused_maps(options), pins::names(&pins.maps())?);
    let is_unused = |pin: &&String| pin.split('-').next().is_some_and(|name| unused.contains(&name));
    maps.iter().filter(is_unused).try_for_each(|pin| remove_pin(&pins.maps().join(pin)))
}

/// Connecting programs go first: see [`programs`].
fn remove_links(pins: &Pins, keeps: impl Fn(&str) -> bool) -> Result<()> {
    let links: Vec<PathBuf> = pins::names(&pins.links())?
        .iter()
        .filter(|pin| is_pin(pin) && !keeps(pin))
        .map(|pin| pins.links().join(pin))
        .collect();
    links.iter().try_for_each(|pin| {
        info!(pin = %pin.display(), "sockets are served no longer: removed a link");
        remove_pin(pin)
    })
}

/// Among the pinned links.
fn pin_name(program: &str) -> String {
    format!("{PREFIX}{}", program.trim_start_matches("kpx_"))
}

/// Is this the pin of a link to a cgroup?
pub(super) fn is_pin(name: &str) -> bool {
    name.starts_with(PREFIX)
}

const PREFIX: &str = "socket-";

/// The programs of links to cgroups that this process holds. One that was detached, or whose cgroup is gone, has no id of
/// a cgroup.
fn attached() -> Result<BTreeSet<u32>> {
    let links = open_links()?;
    let held = links.iter().filter(|fields| fields.get("link_type").is_some_and(|kind| kind == "cgroup"));
    let held = held.filter(|fields| fields.get("cgroup_id").is_some_and(|id| id != "0"));
    Ok(held.filter_map(|fields| fields.get("prog_id")?.parse().ok()).collect())
}
