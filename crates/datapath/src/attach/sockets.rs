//! Attaches the socket programs. If they are optional and fail, the packet programs translate
//! instead.

use anyhow::{Context, Result};
use tracing::warn;

use super::Attachments;
use crate::persistence::Persistence;
use crate::sockets::{
    Cgroup, PodRows, PodSockets, SocketOptions, Sockets, SocketsStatus, remove_unused,
};

impl Attachments {
    /// Attaches the loaded socket programs to a cgroup and removes those of a predecessor.
    pub fn attach_sockets(&mut self, cgroup: Cgroup, options: SocketOptions) -> Result<()> {
        if self.sockets_left.is_some() {
            return Ok(());
        }
        let Persistence { pins, .. } = self
            .persistence
            .as_ref()
            .context("socket programs need pins, and there is no BPF file system")?;
        match Sockets::attach(&mut self.ebpf, pins, cgroup, options) {
            Err(error) if options.is_optional => self.leave_sockets_to_packets(&error)?,
            attached => self.sockets = Some(attached?),
        }
        Ok(())
    }

    /// Detaches the socket programs. The packet programs serve the sockets from then on.
    fn leave_sockets_to_packets(&mut self, why: &anyhow::Error) -> Result<()> {
        if let Some(sockets) = self.sockets.take() {
            sockets.detach();
        }
        if let Some(Persistence { pins, .. }) = &self.persistence {
            remove_unused(pins, None)?;
            // Otherwise the next repair would report the removed pins as missing.
            self.keep_maps()?;
        }
        self.leave_sockets(format!("{why:#}"));
        Ok(())
    }

    /// Lets the packet programs serve the sockets, and records the reason.
    pub fn leave_sockets(&mut self, why: String) {
        warn!(why, "kpx translates packets instead of sockets");
        self.note_sockets_left(Some(why));
    }

    pub(crate) fn note_sockets_left(&mut self, why: Option<String>) {
        self.sockets_left = why;
    }

    /// Returns why packet programs serve the sockets, if socket programs were requested.
    pub fn sockets_left(&self) -> Option<&str> {
        self.sockets_left.as_deref()
    }

    /// Returns the scope of socket load balancing, and the reason if it differs from the options:
    /// `off`, `host`, `all`, `auto: …`.
    pub fn socket_lb(&self) -> String {
        match (&self.sockets, &self.sockets_left) {
            (Some(sockets), _) => sockets.served(),
            (None, Some(why)) => format!("auto: off, because {why}"),
            (None, None) => "off".to_owned(),
        }
    }

    /// Returns the pods' selection for socket load balancing; `None` if it is disabled or the
    /// programs are not attached.
    pub fn pod_sockets(&self, rows: Option<PodRows>) -> Result<Option<PodSockets>> {
        let (Some(sockets), Some(rows)) = (&self.sockets, rows) else {
            return Ok(None);
        };
        Ok(Some(PodSockets::new(rows, sockets.cgroup()?)))
    }

    pub fn sockets_status(&self) -> Option<SocketsStatus> {
        self.sockets.as_ref().map(Sockets::status)
    }

    /// Attaches missing socket programs again. Returns their number.
    pub fn repair_sockets(&mut self) -> Result<u64> {
        match (&mut self.sockets, &self.persistence) {
            (Some(sockets), Some(Persistence { pins, .. })) => {
                match sockets.repair(&mut self.ebpf, pins) {
                    Err(error) if sockets.is_optional() => {
                        self.leave_sockets_to_packets(&error).map(|()| 0)
                    }
                    repaired => repaired,
                }
            }
            _ => Ok(0),
        }
    }
}
