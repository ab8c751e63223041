//! Takes over what a predecessor attached. Its links and filters get our programs, each in one step, so that no packet
//! goes without a program. Both agents' programs use the same maps.

use std::io;
use std::mem::ManuallyDrop;
use std::path::Path;

use anyhow::{Context, Result};
use aya::programs::TcAttachType;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::tc::SchedClassifierLink;
use nix::errno::Errno;
use nix::net::if_::if_nameindex;
use proxy_common::names;
use tracing::{info, warn};

use super::attach::{Attached, Attachments, CLSACT_HANDLE, Held, Hooks, Mechanism, link_name, remove_filters};
use super::pins::{self, remove_pin};
use super::{program, sockets};
use crate::net::anchor;
use crate::net::filter::PRIORITY;

const BOTH: [TcAttachType; 2] = [TcAttachType::Egress, TcAttachType::Ingress];

impl Attachments {
    /// Takes over every link and filter that can be taken over, and removes the pins of devices that are gone.
    pub(super) fn adopt(&mut self) -> Result<()> {
        let Some(stays) = &self.stays else { return Ok(()) };
        let links = stays.pins.links();
        let mut unknown = pins::names(&links)?;
        unknown.retain(|pin| !sockets::is_pin(pin));
        for device in if_nameindex().context("list the devices")?.iter() {
            let (ifindex, name) = (device.index(), device.name().to_string_lossy().into_owned());
            let mut attached = Attached::new(&name, Mechanism::Tcx);
            for attach_type in BOTH {
                let file = link_name(ifindex, attach_type);
                if let Some(place) = unknown.iter().position(|pin| *pin == file) {
                    unknown.swap_remove(place);
                    *attached.hook(attach_type) = self.adopt_link(&links.join(file), &name, attach_type)?;
                }
            }
            if attached.is_empty() {
                attached.mechanism = Mechanism::Clsact;
                for attach_type in BOTH {
                    *attached.hook(attach_type) = self.adopt_filter(&name, attach_type)?;
                }
            } else {
                remove_filters(&name);
            }
            if !attached.is_empty() {
                info!(device = name, ifindex, by = %attached.mechanism, "taken over");
                self.devices.insert(ifindex, attached);
            }
        }
        unknown.iter().try_for_each(|pin| unpin(&links.join(pin), "its device is gone"))
    }

    /// Takes over a link. Returns None if the link is gone.
    fn adopt_link(&mut self, path: &Path, device: &str, attach_type: TcAttachType) -> Result<Option<Held>> {
        let link = PinnedLink::from_pin(path).map(FdLink::from).and_then(SchedClassifierLink::try_from);
        let program = program(&mut self.ebpf, program_at(device, attach_type))?;
        let replaced = link.map_err(anyhow::Error::from).and_then(|link| Ok(program.attach_to_link(link)?));
        match replaced {
            Ok(id) => {
                drop(program.take_link(id).context("take a link")?);
                let pinned = PinnedLink::from_pin(path).with_context(|| format!("open the pin {}", path.display()))?;
                Ok(Some(Held::Pinned(pinned)))
            }
            // The link serves on until the agent has the resources for a start.
            Err(error) if is_shortage(&error) => {
                Err(error).with_context(|| format!("take over the link {}", path.display()))
            }
            // The link's device had the same number and is gone.
            Err(error) => unpin(path, &format!("{error:#}")).map(|()| None),
        }
    }

    /// Takes over a filter. Returns None if there is no filter at our place.
    fn adopt_filter(&mut self, device: &str, attach_type: TcAttachType) -> Result<Option<Held>> {
        let program = program(&mut self.ebpf, program_at(device, attach_type))?;
        let Ok(filter) = SchedClassifierLink::attached(device, attach_type, PRIORITY, CLSACT_HANDLE, None) else {
            return Ok(None); // The device is gone.
        };
        let Ok(id) = program.attach_to_link(filter) else { return Ok(None) };
        let filter = program.take_link(id).context("take a filter")?;
        Ok(Some(Held::Filter(ManuallyDrop::new(filter))))
    }
}

impl Attached {
    fn hook(&mut self, attach_type: TcAttachType) -> &mut Option<Held> {
        if attach_type == TcAttachType::Ingress { &mut self.ingress } else { &mut self.egress }
    }

    fn is_empty(&self) -> bool {
        self.ingress.is_none() && self.egress.is_none()
    }
}

/// Returns the name of our program at a hook of a device.
pub(super) fn program_at(device: &str, attach_type: TcAttachType) -> &'static str {
    let hooks = match device {
        anchor::NAME => Hooks::Anchor,
        "lo" => Hooks::Loopback,
        _ => Hooks::Both,
    };
    if attach_type == TcAttachType::Ingress { names::INGRESS } else { hooks.at_egress() }
}

/// Returns true if the kernel or this process has run out of something, or lacks a permission. Such an error does not
/// mean that the link is bad.
fn is_shortage(error: &anyhow::Error) -> bool {
    const SHORTAGES: [Errno; 6] =
        [Errno::EPERM, Errno::EINTR, Errno::EAGAIN, Errno::ENOMEM, Errno::ENFILE, Errno::EMFILE];
    let number = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>()).and_then(io::Error::raw_os_error);
    number.is_some_and(|number| SHORTAGES.contains(&Errno::from_raw(number)))
}

fn unpin(path: &Path, why: &str) -> Result<()> {
    warn!(pin = %path.display(), why, "removed a link");
    remove_pin(path)
}
