//! kpx's programs on a device, and the handles that keep them attached.

use std::mem::ManuallyDrop;
use std::path::Path;

use anyhow::{Context as _, Result};
use aya::programs::TcAttachType;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::tc::SchedClassifierLink;
use proxy_common::hook::{Direction, PacketHook, Place};
use tracing::debug;

use super::attach::Mechanism;
use proxy_net::filter::Hook;

/// A device with kpx's programs.
pub struct Attached {
    pub name: String,
    pub(super) place: Place,
    pub mechanism: Mechanism,
    ingress: Option<AttachedProgram>,
    egress: Option<AttachedProgram>,
}

impl Attached {
    pub(super) fn new(name: &str, place: Place, mechanism: Mechanism) -> Self {
        Self {
            name: name.to_owned(),
            place,
            mechanism,
            ingress: None,
            egress: None,
        }
    }

    pub(super) fn hook(&mut self, attach_type: TcAttachType) -> &mut Option<AttachedProgram> {
        if attach_type == TcAttachType::Ingress {
            &mut self.ingress
        } else {
            &mut self.egress
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ingress.is_none() && self.egress.is_none()
    }

    pub(super) fn has(&self, hook: Hook) -> bool {
        match hook {
            Hook::Ingress => self.ingress.is_some(),
            Hook::Egress => self.egress.is_some(),
        }
    }

    pub(super) fn is_whole(&self, place: Place) -> bool {
        let is_due = |direction| PacketHook::at(place, direction).is_some();
        self.egress.is_some() == is_due(Direction::Egress)
            && self.ingress.is_some() == is_due(Direction::Ingress)
    }

    /// Pins a link again if its pin is gone. The program is attached in any case. Returns true if
    /// the pin was gone.
    pub(super) fn restore_pin(&mut self, attach_type: TcAttachType, path: &Path) -> Result<bool> {
        let hook = self.hook(attach_type);
        if !matches!(hook, Some(AttachedProgram::Pinned(_))) || path.exists() {
            return Ok(false);
        }
        if let Some(AttachedProgram::Pinned(link)) = hook.take() {
            let pinned = FdLink::from(link)
                .pin(path)
                .with_context(|| format!("pin the link {}", path.display()))?;
            *hook = Some(AttachedProgram::Pinned(pinned));
        }
        Ok(true)
    }

    /// Detaches ingress, then egress. In the reverse order, flows would open without translation of
    /// their replies.
    pub(super) fn detach(&mut self) {
        for program in [self.ingress.take(), self.egress.take()]
            .into_iter()
            .flatten()
        {
            program.detach();
        }
    }
}

pub(super) enum AttachedProgram {
    /// A TCX link, which outlives this value.
    Pinned(PinnedLink),
    /// A clsact filter, which outlives this value.
    Filter(ManuallyDrop<SchedClassifierLink>),
    /// A link that a drop of this value detaches.
    Own { _link: SchedClassifierLink },
}

impl AttachedProgram {
    pub(super) fn detach(self) {
        match self {
            Self::Pinned(link) => {
                // This was the last handle, unless the kernel still uses the file.
                if let Err(error) = link.unpin() {
                    debug!(%error, "a link's pin was missing");
                }
            }
            Self::Filter(link) => drop(ManuallyDrop::into_inner(link)),
            Self::Own { .. } => {}
        }
    }
}
