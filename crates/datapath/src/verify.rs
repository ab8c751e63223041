//! Checks that programs are still attached to their devices. Any privileged process can delete a
//! qdisc or a filter, or detach a link.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use proxy_common::hook::{Direction, PacketHook};

use super::attach::Mechanism;
use super::attached::Attached;
use super::links::{Fields, open_links};
use proxy_net::Handle;
use proxy_net::filter::{self, Filter, Hook};

/// A program that is missing on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingProgram {
    pub ifindex: u32,
    pub hook: Hook,
}

/// A TCX link: interface index, hook, program id.
type TcxLink = (u32, Hook, u32);

/// Returns kpx's programs that are missing on their devices. Each clsact device costs two requests.
/// All TCX devices together cost one read of this process's fdinfo, which needs no privilege; a
/// query of a device requires `CAP_SYS_ADMIN`. `id` returns the id of a loaded program.
pub(super) async fn missing(
    handle: &Handle,
    devices: &BTreeMap<u32, Attached>,
    id: impl Fn(&str) -> Result<Option<u32>>,
) -> Result<Vec<MissingProgram>> {
    let programs = BTreeMap::from([
        (
            Hook::Ingress,
            PacketHook::programs_at(Direction::Ingress).collect::<Vec<_>>(),
        ),
        (
            Hook::Egress,
            PacketHook::programs_at(Direction::Egress).collect(),
        ),
    ]);
    let links = tcx_links()?;
    let mut missing = Vec::new();
    for (&ifindex, attached) in devices {
        let filters = match attached.mechanism {
            Mechanism::Tcx => Vec::new(),
            Mechanism::Clsact => filter::list(handle, ifindex).await?,
        };
        for hook in Hook::ALL.into_iter().filter(|hook| attached.has(*hook)) {
            let programs = &programs[&hook];
            let is_there = match attached.mechanism {
                Mechanism::Tcx => {
                    let ids = programs.iter().filter_map(|name| id(name).transpose());
                    let ids = ids.collect::<Result<Vec<u32>>>()?;
                    ids.iter().any(|id| links.contains(&(ifindex, hook, *id)))
                }
                Mechanism::Clsact => {
                    let is_it = |filter: &Filter| filter.is_ours() && filter.hook == hook;
                    filters
                        .iter()
                        .any(|filter| is_it(filter) && programs.contains(&filter.name.as_str()))
                }
            };
            missing.extend((!is_there).then_some(MissingProgram { ifindex, hook }));
        }
    }
    Ok(missing)
}

/// Returns the hooks of this process's TCX links. A detached link, or a link of a removed device,
/// has interface index 0.
fn tcx_links() -> Result<BTreeSet<TcxLink>> {
    Ok(open_links()?.iter().filter_map(tcx_link).collect())
}

fn tcx_link(fields: &Fields) -> Option<TcxLink> {
    if fields.get("link_type")? != "tcx" {
        return None;
    }
    // The field reads `46 (ingress)`, with other words on other kernels. The numbers are
    // BPF_TCX_INGRESS and BPF_TCX_EGRESS of linux/bpf.h.
    let hook = match fields.get("attach_type")?.split(' ').next()? {
        "46" => Hook::Ingress,
        "47" => Hook::Egress,
        _ => return None,
    };
    Some((
        fields.get("ifindex")?.parse().ok()?,
        hook,
        fields.get("prog_id")?.parse().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::links::fields;
    use super::*;

    #[test]
    fn links_are_told_from_other_files() {
        let tcx = "pos:\t0\nflags:\t02000002\nmnt_id:\t17\nino:\t1057\nlink_type:\ttcx\nlink_id:\t12\nprog_tag:\tb0d59a\n\
                   prog_id:\t340\nifindex:\t7\nattach_type:\t46 (ingress)\n";
        assert_eq!(tcx_link(&fields(tcx)), Some((7, Hook::Ingress, 340)));
        let detached = tcx
            .replace("ifindex:\t7", "ifindex:\t0")
            .replace("46 (ingress)", "47 (egress)");
        assert_eq!(tcx_link(&fields(&detached)), Some((0, Hook::Egress, 340)));
        assert_eq!(tcx_link(&fields(&tcx.replace("\ttcx", "\txdp"))), None);
        assert_eq!(
            tcx_link(&fields("pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t3\n")),
            None
        );
    }
}
