//! Whether devices still carry what was put onto them: anybody may delete a qdisc or a filter, detach a link, or remove
//! its pin.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, ensure};
use aya::programs::TcAttachType;
use nix::net::if_::if_nametoindex;
use proxy_common::hook::{Direction, PacketHook};

use super::attach::{Attached, Attachments, Mechanism, Stays, link_name};
use crate::net::Handle;
use crate::net::changes::Changes;
use crate::net::filter::{self, Filter, Hook};

/// What the kernel shows of the files that this process has open (proc(5)); of links, where they hang.
const FILES: &str = "/proc/self/fdinfo";

/// A device that does not carry a program that it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    pub ifindex: u32,
    pub hook: Hook,
}

/// By name.
type Fields = BTreeMap<String, String>;

/// A TCX link: interface index, hook, program id.
type TcxLink = (u32, Hook, u32);

impl Attachments {
    /// Asks the kernel which of our programs somebody has taken off. Two requests for each device with clsact, and for all
    /// with TCX a look at our own files, which takes no privilege (to ask about a device takes `CAP_SYS_ADMIN`).
    pub async fn verify(&self, handle: &Handle) -> Result<Vec<Missing>> {
        let programs = BTreeMap::from([
            (Hook::Ingress, PacketHook::programs_at(Direction::Ingress).collect::<Vec<_>>()),
            (Hook::Egress, PacketHook::programs_at(Direction::Egress).collect()),
        ]);
        let links = tcx_links()?;
        let mut missing = Vec::new();
        for (&ifindex, attached) in self.devices() {
            let filters = match attached.mechanism {
                Mechanism::Tcx => Vec::new(),
                Mechanism::Clsact => filter::list(handle, ifindex).await?,
            };
            for hook in Hook::ALL.into_iter().filter(|hook| attached.has(*hook)) {
                let programs = &programs[&hook];
                let is_there = match attached.mechanism {
                    Mechanism::Tcx => {
                        let ids = programs.iter().map(|name| Ok(self.program(name)?.info()?.id()));
                        let ids = ids.collect::<Result<Vec<u32>>>()?;
                        ids.iter().any(|id| links.contains(&(ifindex, hook, *id))) && self.is_pinned(ifindex, hook)
                    }
                    Mechanism::Clsact => {
                        let is_it = |filter: &Filter| filter.is_ours() && filter.hook == hook;
                        filters.iter().any(|filter| is_it(filter) && programs.contains(&filter.name.as_str()))
                    }
                };
                missing.extend((!is_there).then_some(Missing { ifindex, hook }));
            }
        }
        Ok(missing)
    }

    /// Where changes of this host are noted, if they outlive the agent.
    pub fn changes(&self) -> Option<&Changes> {
        self.stays.as_ref().map(|stays| &stays.changes)
    }

    /// If links are pinned at all.
    fn is_pinned(&self, ifindex: u32, hook: Hook) -> bool {
        let attach_type = match hook {
            Hook::Ingress => TcAttachType::Ingress,
            Hook::Egress => TcAttachType::Egress,
        };
        let is_there = |stays: &Stays| stays.pins.links().join(link_name(ifindex, attach_type)).exists();
        self.stays.as_ref().is_none_or(is_there)
    }
}

impl Attached {
    /// It was given a program at this hook.
    fn has(&self, hook: Hook) -> bool {
        match hook {
            Hook::Ingress => self.ingress.is_some(),
            Hook::Egress => self.egress.is_some(),
        }
    }
}

/// A name may pass to another device while we attach by it.
pub(super) fn same_device(name: &str, ifindex: u32) -> Result<()> {
    let found = if_nametoindex(name).with_context(|| format!("find device {name}"))?;
    ensure!(found == ifindex, "device {ifindex} is not called {name} any more");
    Ok(())
}

/// Where this process's TCX links hang. One that was detached, or whose device is gone, has the interface index 0.
fn tcx_links() -> Result<BTreeSet<TcxLink>> {
    Ok(open_links()?.iter().filter_map(tcx_link).collect())
}

/// What the kernel shows of the BPF links that this process has open.
pub(super) fn open_links() -> Result<Vec<Fields>> {
    let files = fs::read_dir(FILES).with_context(|| format!("read {FILES}"))?;
    let mut links = Vec::new();
    for file in files {
        let path = file.with_context(|| format!("read {FILES}"))?.path();
        // It may have been closed since.
        let Ok(text) = fs::read_to_string(path) else { continue };
        links.extend(Some(fields(&text)).filter(|fields| fields.contains_key("link_type")));
    }
    Ok(links)
}

fn fields(text: &str) -> Fields {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

fn tcx_link(fields: &Fields) -> Option<TcxLink> {
    if fields.get("link_type")? != "tcx" {
        return None;
    }
    // As `46 (ingress)`, in other words on other kernels: BPF_TCX_INGRESS and BPF_TCX_EGRESS of linux/bpf.h.
    let hook = match fields.get("attach_type")?.split(' ').next()? {
        "46" => Hook::Ingress,
        "47" => Hook::Egress,
        _ => return None,
    };
    Some((fields.get("ifindex")?.parse().ok()?, hook, fields.get("prog_id")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_told_from_other_files() {
        let tcx = "pos:\t0\nflags:\t02000002\nmnt_id:\t17\nino:\t1057\nlink_type:\ttcx\nlink_id:\t12\nprog_tag:\tb0d59a\n\
                   prog_id:\t340\nifindex:\t7\nattach_type:\t46 (ingress)\n";
        assert_eq!(tcx_link(&fields(tcx)), Some((7, Hook::Ingress, 340)));
        let detached = tcx.replace("ifindex:\t7", "ifindex:\t0").replace("46 (ingress)", "47 (egress)");
        assert_eq!(tcx_link(&fields(&detached)), Some((0, Hook::Egress, 340)));
        assert_eq!(tcx_link(&fields(&tcx.replace("\ttcx", "\txdp"))), None);
        assert_eq!(tcx_link(&fields("pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t3\n")), None);
    }
}
