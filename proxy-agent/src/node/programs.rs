//! The programs on this node's devices and sockets.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use nix::net::if_::if_indextoname;
use proxy_common::hook::Place;
use proxy_datapath::{Attachments, MissingProgram};
use proxy_net::link::{Link, LinkHeader};
use proxy_net::role::Role;
use proxy_net::{Handle, anchor};
use tracing::{debug, info, warn};

use super::devices::Devices;
use super::relapses::Relapses;
use proxy_metrics::Repairs;
use proxy_source::health::{Health, Problem};

pub(super) struct DevicePrograms {
    pub(super) attachments: Attachments,
    anchor: u32,
    /// Set if lo carries a program. In host mode lo needs one only if a backend is a socket of this
    /// host.
    pub(super) hooks_lo: bool,
    /// Set if the tunnel devices carry programs, to take over packets of external clients.
    pub(super) takes_over: bool,
    /// The problems in [`Health`] about devices without programs.
    failing: BTreeSet<Problem>,
}

impl DevicePrograms {
    /// Attaches the anchor's program. `is_node`: this host is a node, so lo always carries a
    /// program.
    pub(super) fn start(mut attachments: Attachments, anchor: u32, is_node: bool) -> Result<Self> {
        attachments.attach(anchor, anchor::NAME, Place::Anchor)?;
        let hooks_lo = is_node
            || attachments
                .devices()
                .values()
                .any(|device| device.name == "lo");
        Ok(Self {
            attachments,
            anchor,
            hooks_lo,
            takes_over: false,
            failing: BTreeSet::new(),
        })
    }

    /// Attaches to every device the programs of its role. The next event retries failures.
    pub(super) fn attach(&mut self, devices: &Devices, health: &Health) {
        let without_egress = devices
            .links()
            .values()
            .filter(|link| link.lacks_egress)
            .map(|link| link.index);
        self.attachments
            .set_without_egress(without_egress.collect());
        let mut carried = BTreeSet::from([self.anchor]);
        let mut failing = BTreeSet::new();
        for link in devices.links().values() {
            let place = match devices.role_of(link) {
                Role::Loopback if self.hooks_lo => Place::Lo,
                Role::Device { .. } if link.header == LinkHeader::None => Place::Headerless,
                Role::Device { .. } => Place::Device,
                Role::Tunnel if self.takes_over => Place::Tunnel,
                Role::Loopback | Role::Anchor | Role::Tunnel | Role::Ignored(_) => continue,
            };
            carried.insert(link.index);
            if let Err(error) = self.attach_to(link, place) {
                let problem = Problem::Device(link.name.clone());
                health.begin(&problem, format!("{error:#}"));
                failing.insert(problem);
            }
        }
        self.detach_all_but(&carried);
        self.failing
            .difference(&failing)
            .for_each(|problem| health.end(problem));
        self.failing = failing;
    }

    /// Attaches programs to a device. A vanished device is not a failure: pods come and go, and the
    /// next event reports it.
    fn attach_to(&mut self, link: &Link, place: Place) -> Result<()> {
        let known = self.attachments.devices().contains_key(&link.index);
        let result = self.attachments.attach(link.index, &link.name, place);
        if let Err(error) = &result
            && !is_there(link)
        {
            debug!(
                device = link.name,
                ifindex = link.index,
                error = format!("{error:#}"),
                "a device was removed"
            );
            return Ok(());
        }
        if !known && let Some(attached) = self.attachments.devices().get(&link.index) {
            info!(device = link.name, ifindex = link.index, by = %attached.mechanism, "attached");
        }
        result
    }

    /// Detaches programs from devices that are gone or have another role.
    fn detach_all_but(&mut self, carried: &BTreeSet<u32>) {
        let gone = self
            .attachments
            .devices()
            .keys()
            .filter(|ifindex| !carried.contains(ifindex))
            .copied();
        for ifindex in gone.collect::<Vec<_>>() {
            if let Some(attached) = self.attachments.detach(ifindex) {
                info!(device = attached.name, ifindex, "detached");
            }
        }
    }

    pub(super) fn move_anchor(&mut self, ifindex: u32) -> Result<()> {
        self.attachments.detach(self.anchor);
        self.attachments
            .attach(ifindex, anchor::NAME, Place::Anchor)?;
        self.anchor = ifindex;
        Ok(())
    }

    /// Reattaches detached programs, and returns their names. kpx detaches a device's second
    /// program before it reattaches both: a device with one program serves no client anyway.
    pub(super) async fn verify(
        &mut self,
        handle: &Handle,
        devices: &Devices,
        repairs: &mut Repairs,
        relapses: &Relapses,
        health: &Health,
    ) -> Result<BTreeSet<String>> {
        let mut gone = BTreeSet::new();
        let missing = self
            .attachments
            .verify(handle)
            .await
            .context("look for programs that were taken off")?;
        for MissingProgram { ifindex, hook } in &missing {
            if let Some(attached) = self.attachments.detach(*ifindex) {
                let what = format!("the programs of {}", attached.name);
                if relapses.is_news(&what) {
                    warn!(
                        device = attached.name,
                        hook = hook.name(),
                        "the program was removed, reattaching"
                    );
                }
                gone.insert(what);
            }
            repairs.programs += 1;
        }
        if !missing.is_empty() {
            self.attach(devices, health);
            self.attachments
                .attach(self.anchor, anchor::NAME, Place::Anchor)?;
        }
        let pins = self
            .attachments
            .restore_pins()
            .context("look for pins that were removed")?;
        if pins > 0 && relapses.is_news("pin") {
            warn!(pins, "pins were removed, pinning again");
        }
        repairs.pins += pins;
        self.attachments
            .restore_slow_path()
            .context("restore the slow path")?;
        // This check comes last, because no later check finds the programs detached above.
        repairs.programs += self
            .attachments
            .repair_sockets()
            .context("look for programs that were taken off sockets")?;
        Ok(gone)
    }

    /// Updates the list of this host's changes, and restores undone changes. Returns the number of
    /// restored changes.
    pub(super) fn verify_changes(&self, devices: &Devices) -> Result<u64> {
        let Some(changes) = self.attachments.changes() else {
            return Ok(0);
        };
        changes.keep_qdiscs(|ifindex| devices.links().contains_key(&ifindex))?;
        Ok(u64::from(changes.reserve_ports()?))
    }
}

/// Returns false if the device is gone or renamed.
fn is_there(link: &Link) -> bool {
    if_indextoname(link.index).is_ok_and(|name| name.to_bytes() == link.name.as_bytes())
}
