//! Attaches, maintains and removes the cgroup programs that translate the destinations of sockets
//! (`--socket-lb`), and the program that counts the connections of these sockets.

mod cgroup;
mod kubepods;
pub(crate) mod pods;
mod stale;

use std::collections::{BTreeMap, BTreeSet};
use std::{fs, iter};

use anyhow::{Context, Result, bail, ensure};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{CgroupAttachMode, Program, ProgramError, ProgramType};
use aya::sys::{BpfHelper, is_helper_supported};
use aya::{Ebpf, EbpfLoader};
use proxy_common::{names, socket};
use serde::{Deserialize, Serialize};
use tracing::{debug, info, warn};

use super::links::open_links;
use super::pins::{self, Pins, remove_pin};
use super::verifier;

pub use cgroup::Cgroup;
pub use pods::{PodRow, PodRows, PodSockets};
pub use stale::StaleSockets;

/// The sockets that the programs translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Includes the sockets of all network namespaces instead of only this namespace.
    pub everywhere: bool,
    /// Includes the TCP sockets of selected pods: see [`PodSockets`].
    pub pods: bool,
    /// Includes UDP sockets.
    pub udp: bool,
    /// Lets packet programs serve the sockets if the socket programs fail.
    pub is_optional: bool,
}

/// The programs' global variables, which are set at load.
pub(super) struct SocketGlobals {
    netns: u64,
    flags: u32,
}

impl SocketGlobals {
    pub(super) fn of(options: SocketOptions) -> Result<Self> {
        let SocketOptions {
            everywhere,
            pods,
            udp,
            is_optional,
        } = options;
        let netns = crate::sys::netns_cookie::netns_cookie().context(
            "read this network namespace's number, by which --socket-lb recognizes the host's sockets: \
             kernels before Linux 5.14 do not have it",
        )?;
        let refuses = is_supported(BpfHelper::BPF_FUNC_set_retval)?;
        let names = is_supported(BpfHelper::BPF_FUNC_get_current_comm)?;
        debug!(netns, refuses, names, "sockets");
        ensure!(
            refuses || !is_optional,
            "this kernel has no bpf_set_retval: connects to Services without endpoints would time out"
        );
        ensure!(
            names || !is_optional,
            "this kernel cannot distinguish its own workers from other tasks: their mounts would stay on one backend"
        );
        let flags = [
            (everywhere, socket::EVERYWHERE),
            (pods, socket::PODS),
            (udp, socket::UDP),
            (refuses, socket::REFUSES),
            (names, socket::NAMES),
        ];
        Ok(Self {
            netns,
            flags: flags
                .into_iter()
                .filter(|(is_set, _)| *is_set)
                .fold(0, |all, (_, flag)| all | flag),
        })
    }

    pub(super) fn set<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        loader.override_global(names::SOCKET_NETNS, &self.netns, true);
        loader.override_global(names::SOCKET_FLAGS, &self.flags, true);
    }
}

fn is_supported(helper: BpfHelper) -> Result<bool> {
    is_helper_supported(ProgramType::CgroupSockAddr, helper)
        .with_context(|| format!("probe the kernel for {helper:?} in socket programs"))
}

/// Returns the names of the requested programs. The programs that show the dialled address
/// (`getpeername`, `recvmsg`) come first, because every translated socket needs them.
pub(super) fn programs(options: SocketOptions) -> Vec<&'static str> {
    let all = names::SOCKETS
        .into_iter()
        .chain(names::DATAGRAMS.into_iter().filter(|_| options.udp));
    let (translating, showing): (Vec<_>, Vec<_>) = all.partition(|name| translates(name));
    showing.into_iter().chain(translating).collect()
}

pub(super) fn load(ebpf: &mut Ebpf, options: SocketOptions) -> Result<()> {
    verifier::load_all(ebpf, programs(options).into_iter())?;
    // This program only counts. The others serve sockets without it.
    if let Err(error) = verifier::load_all(ebpf, iter::once(names::SOCK_OPS)) {
        warn!(
            error = format!("{error:#}"),
            "the kernel refuses the program that counts connections"
        );
    }
    Ok(())
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Program> {
    ebpf.program_mut(name)
        .with_context(|| format!("no program {name} in the BPF object"))
}

/// Returns the unused maps, which get no pins.
pub(super) fn unused_maps(options: Option<SocketOptions>) -> Vec<&'static str> {
    let storage = names::DIALLED.into_iter().chain([names::CONNECTING]);
    storage
        .filter(|_| options.is_none())
        .chain(unused_tables(options))
        .collect()
}

/// Returns the unused tables, which get the minimum size.
pub(super) fn unused_tables(options: Option<SocketOptions>) -> impl Iterator<Item = &'static str> {
    let (has_udp, has_pods) = options.map_or((false, false), |options| (options.udp, options.pods));
    let udp = [names::IPV4.udp_sockets, names::IPV6.udp_sockets]
        .into_iter()
        .filter(move |_| !has_udp);
    udp.chain(iter::once(names::SOCKET_PODS).filter(move |_| !has_pods))
}

/// The state of socket load balancing, for `kpx status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SocketsStatus {
    /// The scope: `host` or `all`.
    pub scope: String,
    pub udp: bool,
    /// True if selected pods are included: see `pods` in the agent's status.
    #[serde(default)]
    pub pods: bool,
    /// The cgroup that contains the translated sockets.
    pub cgroup: String,
    /// Why connections of these sockets are not counted, if they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncounted: Option<String>,
}

pub(super) struct Sockets {
    cgroup: Cgroup,
    options: SocketOptions,
    links: BTreeMap<&'static str, PinnedLink>,
    /// Why [`names::SOCK_OPS`] is not attached.
    uncounted: Option<String>,
}

impl Sockets {
    /// Attaches the loaded programs to a cgroup and removes a predecessor's programs. Each program
    /// is attached before its predecessor is removed, so every call passes a program. A program
    /// skips sockets that another program has translated.
    pub(super) fn attach(
        ebpf: &mut Ebpf,
        pins: &Pins,
        cgroup: Cgroup,
        options: SocketOptions,
    ) -> Result<Self> {
        let names = programs(options);
        let mut sockets = Self {
            cgroup,
            options,
            links: BTreeMap::new(),
            uncounted: None,
        };
        names
            .iter()
            .try_for_each(|name| sockets.attach_program(ebpf, pins, name))?;
        sockets.count_connections(ebpf, pins);
        let keeps: BTreeSet<_> = sockets.links.keys().copied().map(pin_name).collect();
        remove_links(pins, |pin| keeps.contains(pin))?;
        info!(cgroup = %sockets.cgroup, programs = sockets.links.len(), "serving sockets");
        Ok(sockets)
    }

    pub(super) fn status(&self) -> SocketsStatus {
        let Self {
            cgroup, options, ..
        } = self;
        SocketsStatus {
            scope: self.scope().to_owned(),
            udp: options.udp,
            pods: options.pods,
            cgroup: cgroup.to_string(),
            uncounted: self.uncounted.clone(),
        }
    }

    /// Returns the scope in the words of `--socket-lb`.
    pub(super) fn served(&self) -> String {
        let auto = if self.options.is_optional {
            "auto: "
        } else {
            ""
        };
        let pods = if self.options.pods { " and pods" } else { "" };
        format!("{auto}{}{pods}", self.scope())
    }

    pub(super) fn is_optional(&self) -> bool {
        self.options.is_optional
    }

    pub(super) fn cgroup(&self) -> Result<Cgroup> {
        self.cgroup.try_clone()
    }

    fn scope(&self) -> &'static str {
        if self.options.everywhere {
            "all"
        } else {
            "host"
        }
    }

    /// Attaches missing programs, and the program that counts if the kernel refused it before. Returns
    /// the number of attached programs.
    pub(super) fn repair(&mut self, ebpf: &mut Ebpf, pins: &Pins) -> Result<u64> {
        let attached = attached()?;
        let is_missing = |ebpf: &mut Ebpf, name| -> Result<bool> {
            let id = program(ebpf, name)?.info()?.id();
            Ok(!attached.contains(&id) || !pins.links().join(pin_name(name)).exists())
        };
        let mut repaired = 0;
        for name in programs(self.options) {
            if is_missing(ebpf, name)? {
                warn!(
                    program = name,
                    "the program was removed from its cgroup, reattaching"
                );
                self.attach_program(ebpf, pins, name)?;
                repaired += 1;
            }
        }
        if is_missing(ebpf, names::SOCK_OPS).unwrap_or(true) && self.count_connections(ebpf, pins) {
            repaired += 1;
        }
        Ok(repaired)
    }

    /// Attaches the program that counts connections, and returns true if that succeeds. Another program
    /// may be attached exclusively: kpx then serves sockets and counts no connections.
    fn count_connections(&mut self, ebpf: &mut Ebpf, pins: &Pins) -> bool {
        let refusal = self.attach_program(ebpf, pins, names::SOCK_OPS).err();
        let uncounted = refusal.map(|error| format!("{error:#}"));
        if let Some(why) = uncounted.as_ref().filter(|_| uncounted != self.uncounted) {
            warn!(why, "connections of translated sockets are not counted");
        }
        self.uncounted = uncounted;
        self.uncounted.is_none()
    }

    /// Detaches the programs. Connected sockets keep their backends.
    pub(super) fn detach(self) {
        for (_, link) in self.links {
            if let Err(error) = link.unpin() {
                debug!(%error, "a link's pin was missing");
            }
        }
    }

    fn attach_program(&mut self, ebpf: &mut Ebpf, pins: &Pins, name: &'static str) -> Result<()> {
        let Self { cgroup, links, .. } = self;
        let link = attach(program(ebpf, name)?, cgroup)
            .with_context(|| format!("attach {name} to the cgroup {cgroup}"))?;
        fs::create_dir_all(pins.links())
            .with_context(|| format!("create {}", pins.links().display()))?;
        let path = pins.links().join(pin_name(name));
        let next = pins.links().join(format!("{}-next", pin_name(name)));
        if next.exists() {
            remove_pin(&next)?; // A predecessor was killed at this point.
        }
        link.pin(&next)
            .with_context(|| format!("pin the link of {name}"))?;
        // The rename replaces the predecessor's pin, so the kernel frees the predecessor's link.
        fs::rename(&next, &path).with_context(|| format!("rename {}", next.display()))?;
        let pinned = PinnedLink::from_pin(&path)
            .with_context(|| format!("open the pin {}", path.display()))?;
        links.insert(name, pinned);
        Ok(())
    }
}

fn attach(program: &mut Program, cgroup: &Cgroup) -> Result<FdLink> {
    let link = match program {
        Program::CgroupSockAddr(program) => {
            let id = beside_others(|mode| program.attach(cgroup, mode))?;
            FdLink::try_from(program.take_link(id)?)
        }
        Program::SockOps(program) => {
            let id = beside_others(|mode| program.attach(cgroup, mode))?;
            FdLink::try_from(program.take_link(id)?)
        }
        _ => bail!("not a program for sockets"),
    };
    link.context("a cgroup's link")
}

/// Attaches a program next to other programs. Up to Linux 7.2 links always allow other programs,
/// and the kernel refuses the flag (EINVAL). Later kernels require the flag.
fn beside_others<L>(
    mut attach: impl FnMut(CgroupAttachMode) -> Result<L, ProgramError>,
) -> Result<L, ProgramError> {
    match attach(CgroupAttachMode::AllowMultiple) {
        Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(EINVAL) => {
            attach(CgroupAttachMode::Single)
        }
        attached => attached,
    }
}

const EINVAL: i32 = 22;

/// Removes a predecessor's links and maps that these options do not need. Attaching the remaining
/// programs replaces single links.
pub(super) fn remove_unused(pins: &Pins, options: Option<SocketOptions>) -> Result<()> {
    if options.is_none() {
        remove_links(pins, |_| false)?;
    }
    pins.remove_maps(&unused_maps(options))
}

/// Removes links, those of translating programs first: see [`programs`].
fn remove_links(pins: &Pins, keeps: impl Fn(&str) -> bool) -> Result<()> {
    let mut links = pins::names(&pins.links())?;
    links.retain(|pin| is_pin(pin) && !keeps(pin));
    links.sort_by_key(|pin| !translates(pin));
    links
        .iter()
        .map(|pin| pins.links().join(pin))
        .try_for_each(|pin| {
            info!(pin = %pin.display(), "removed a link of a socket program");
            remove_pin(&pin)
        })
}

/// Returns true for programs that translate, and for their pins. The other programs show the
/// dialled address, or count.
pub(super) fn translates(name: &str) -> bool {
    name.contains("connect") || name.contains("send")
}

fn pin_name(program: &str) -> String {
    format!("{PREFIX}{}", program.trim_start_matches("kpx_"))
}

/// Returns true for the pin of a link to a cgroup.
pub(super) fn is_pin(name: &str) -> bool {
    name.starts_with(PREFIX)
}

const PREFIX: &str = "socket-";

/// Returns the ids of the programs in this process's cgroup links. A detached link, or a link of a
/// removed cgroup, has no cgroup id.
fn attached() -> Result<BTreeSet<u32>> {
    let links = open_links()?;
    let held = links
        .iter()
        .filter(|fields| fields.get("link_type").is_some_and(|kind| kind == "cgroup"));
    let held = held.filter(|fields| fields.get("cgroup_id").is_some_and(|id| id != "0"));
    Ok(held
        .filter_map(|fields| fields.get("prog_id")?.parse().ok())
        .collect())
}
