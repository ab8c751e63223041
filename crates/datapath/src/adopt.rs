//! Replaces a predecessor's programs in its links and filters by this load's programs, each
//! atomically, so every packet passes a program. Both loads use the same maps.

use std::collections::BTreeMap;
use std::io;
use std::mem::ManuallyDrop;
use std::path::Path;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::programs::TcAttachType;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::tc::SchedClassifierLink;
use nix::errno::Errno;
use nix::net::if_::if_nameindex;
use proxy_common::hook::{PacketHook, Place};
use tracing::{info, warn};

use super::attach::{CLSACT_HANDLE, EGRESS_FIRST, Mechanism, direction, loaded, remove_filters};
use super::attached::{Attached, AttachedProgram};
use super::links::link_name;
use super::persistence::Persistence;
use super::pins::{self, remove_pin};
use super::sockets;
use proxy_net::filter::PRIORITY;
use proxy_net::link::headerless;
use proxy_net::{anchor, tunnel};

pub(super) struct Adopted {
    pub(super) devices: BTreeMap<u32, Attached>,
    /// False if a device may still have a program of the predecessor.
    pub(super) is_all: bool,
}

pub(super) fn adopt(ebpf: &mut Ebpf, persistence: &Persistence) -> Result<Adopted> {
    let headerless = headerless()?;
    let mut devices = BTreeMap::new();
    let mut is_all = true;
    let links = persistence.pins.links();
    let mut unknown = pins::names(&links)?;
    unknown.retain(|pin| !sockets::is_pin(pin));
    for device in if_nameindex().context("list the devices")?.iter() {
        let ifindex = device.index();
        let name = device.name().to_string_lossy().into_owned();
        let place = place(&name, headerless.contains(&name));
        let mut attached = Attached::new(&name, place, Mechanism::Tcx);
        for attach_type in EGRESS_FIRST {
            let file = link_name(ifindex, attach_type);
            if let Some(found) = unknown.iter().position(|pin| *pin == file) {
                unknown.swap_remove(found);
                *attached.hook(attach_type) =
                    adopt_link(ebpf, &links.join(file), place, attach_type)?;
            }
        }
        if attached.is_empty() {
            attached.mechanism = Mechanism::Clsact;
            for attach_type in EGRESS_FIRST {
                match adopt_filter(ebpf, &name, place, attach_type)? {
                    Filter::Ours(program) => *attached.hook(attach_type) = Some(program),
                    Filter::None => {}
                    Filter::Left => is_all = false,
                }
            }
        } else {
            remove_filters(&name);
        }
        if !attached.is_empty() {
            info!(device = name, ifindex, by = %attached.mechanism, "taken over");
            devices.insert(ifindex, attached);
        }
    }
    unknown
        .iter()
        .try_for_each(|pin| unpin(&links.join(pin), "its device was removed"))?;
    Ok(Adopted { devices, is_all })
}

/// Returns `None` if the link is gone or cannot be taken over.
fn adopt_link(
    ebpf: &mut Ebpf,
    path: &Path,
    place: Place,
    attach_type: TcAttachType,
) -> Result<Option<AttachedProgram>> {
    let link = PinnedLink::from_pin(path)
        .map(FdLink::from)
        .and_then(SchedClassifierLink::try_from);
    let replace = |link| {
        let program = loaded(ebpf, hook_at(place, attach_type))?;
        let id = program.attach_to_link(link)?;
        program.take_link(id).context("take a link")
    };
    match link.map_err(anyhow::Error::from).and_then(replace) {
        Ok(link) => {
            drop(link);
            let pinned = PinnedLink::from_pin(path)
                .with_context(|| format!("open the pin {}", path.display()))?;
            Ok(Some(AttachedProgram::Pinned(pinned)))
        }
        // Until the shortage ends, the link keeps the predecessor's program.
        Err(error) if is_shortage(&error) => {
            Err(error).with_context(|| format!("take over the link {}", path.display()))
        }
        // The interface index belonged to another device, or the kernel refuses the program.
        // Attaching reports the kernel's reason.
        Err(error) => unpin(path, &format!("{error:#}")).map(|()| None),
    }
}

/// The filter at kpx's priority and handle.
enum Filter {
    None,
    Ours(AttachedProgram),
    /// A filter, perhaps the predecessor's, that kpx cannot replace.
    Left,
}

fn adopt_filter(
    ebpf: &mut Ebpf,
    device: &str,
    place: Place,
    attach_type: TcAttachType,
) -> Result<Filter> {
    let Ok(filter) =
        SchedClassifierLink::attached(device, attach_type, PRIORITY, CLSACT_HANDLE, None)
    else {
        return Ok(Filter::None); // The device is gone.
    };
    // Attaching reports why the kernel refuses a program.
    let Ok(program) = loaded(ebpf, hook_at(place, attach_type)) else {
        return Ok(Filter::Left);
    };
    let id = match program.attach_to_link(filter).map_err(anyhow::Error::from) {
        Ok(id) => id,
        Err(error) => {
            return Ok(if is_shortage(&error) {
                Filter::Left
            } else {
                Filter::None
            });
        }
    };
    let filter = program.take_link(id).context("take a filter")?;
    Ok(Filter::Ours(AttachedProgram::Filter(ManuallyDrop::new(
        filter,
    ))))
}

/// Returns true if `name` is kpx's program for this hook of the device, with or without Ethernet
/// headers.
pub(super) fn is_program_at(device: &str, attach_type: TcAttachType, name: &str) -> bool {
    [false, true]
        .map(|is_headerless| hook_at(place(device, is_headerless), attach_type).program())
        .contains(&name)
}

fn place(device: &str, is_headerless: bool) -> Place {
    match device {
        anchor::NAME => Place::Anchor,
        "lo" => Place::Lo,
        _ if tunnel::NAMES.contains(&device) => Place::Tunnel,
        _ if is_headerless => Place::Headerless,
        _ => Place::Device,
    }
}

/// Returns kpx's hook at a place. A place without an ingress hook gets the uplink's ingress hook,
/// because a predecessor may have treated the device as an uplink.
fn hook_at(place: Place, attach_type: TcAttachType) -> PacketHook {
    PacketHook::at(place, direction(attach_type)).unwrap_or(PacketHook::Ingress)
}

/// Returns true for errors that report a missing resource or privilege of the kernel or this
/// process. Such an error is no reason to discard the link.
pub(super) fn is_shortage(error: &anyhow::Error) -> bool {
    const SHORTAGES: [Errno; 6] = [
        Errno::EPERM,
        Errno::EINTR,
        Errno::EAGAIN,
        Errno::ENOMEM,
        Errno::ENFILE,
        Errno::EMFILE,
    ];
    let number = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<io::Error>())
        .and_then(io::Error::raw_os_error);
    number.is_some_and(|number| SHORTAGES.contains(&Errno::from_raw(number)))
}

fn unpin(path: &Path, why: &str) -> Result<()> {
    warn!(pin = %path.display(), why, "removed a link");
    remove_pin(path)
}
