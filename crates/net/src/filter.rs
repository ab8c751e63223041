//! Lists and removes filters of clsact qdiscs: those of this or an earlier kpx instance, and other
//! programs'.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use futures::StreamExt;
use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption};
use nix::net::if_::{if_nameindex, if_nametoindex};

use proxy_common::layout::LAYOUT;

use super::link::Link;
use super::netlink::{Handle, dump};

/// The priority of kpx's filters ("KP" in ASCII).
pub const PRIORITY: u16 = 0x4b50;
/// The minor number of kpx's filter handles: the layout of the maps. The filter outlives its agent,
/// and the next agent reads the layout from it.
pub const HANDLE: u16 = {
    assert!(LAYOUT > 0 && LAYOUT <= u16::MAX as u32, "a handle's number");
    LAYOUT as u16
};

const CLSACT: &str = "clsact";
/// The older qdisc, which has only an ingress hook.
const INGRESS: &str = "ingress";
/// The major number of the qdisc's handle (linux/pkt_sched.h).
const CLSACT_MAJOR: u16 = 0xffff;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    pub hook: Hook,
    pub priority: u16,
    /// The name of the filter's BPF program, or the filter's kind if it has no program.
    pub name: String,
    /// The kernel's id of the BPF program.
    pub program: Option<u32>,
    message: TcMessage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    const fn minor(self) -> u16 {
        match self {
            Self::Ingress => TcHandle::MIN_INGRESS,
            Self::Egress => TcHandle::MIN_EGRESS,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

impl Filter {
    pub fn is_ours(&self) -> bool {
        self.priority == PRIORITY
    }

    /// Returns the layout of the program's maps, from the filter's handle.
    pub fn layout(&self) -> u16 {
        self.message.header.handle.minor
    }
}

/// Returns kpx's filters on all devices of this network namespace, with device names. Devices that
/// vanish during the listing are skipped.
pub async fn ours(handle: &Handle) -> Result<Vec<(String, Filter)>> {
    let mut ours = Vec::new();
    for device in if_nameindex().context("list the devices")?.iter() {
        let name = device.name().to_string_lossy().into_owned();
        match list(handle, device.index()).await {
            Ok(filters) => ours.extend(
                filters
                    .into_iter()
                    .filter(Filter::is_ours)
                    .map(|filter| (name.clone(), filter)),
            ),
            Err(error)
                if if_nametoindex(name.as_str()).is_ok_and(|index| index == device.index()) =>
            {
                return Err(error);
            }
            Err(_) => {}
        }
    }
    Ok(ours)
}

/// Returns the filters of a device in the order in which they run.
pub async fn list(handle: &Handle, ifindex: u32) -> Result<Vec<Filter>> {
    let mut filters = Vec::new();
    for hook in Hook::ALL {
        filters.extend(at(handle, ifindex, hook).await?);
    }
    Ok(filters)
}

async fn at(handle: &Handle, ifindex: u32, hook: Hook) -> Result<Vec<Filter>> {
    let mut request = of_device(ifindex)?;
    request.header.parent = TcHandle {
        major: CLSACT_MAJOR,
        minor: hook.minor(),
    };
    let found = dump(
        handle,
        RouteNetlinkMessage::GetTrafficFilter(request),
        |message| match message {
            RouteNetlinkMessage::NewTrafficFilter(message) => filter(hook, message),
            _ => None,
        },
    );
    found
        .await
        .with_context(|| format!("list the filters of device {ifindex}"))
}

/// Updates, for these devices, whether other programs have filters at ingress and egress.
pub(super) async fn query(
    handle: &Handle,
    links: &mut BTreeMap<u32, Link>,
    which: impl IntoIterator<Item = u32>,
) -> Result<()> {
    let which: BTreeSet<u32> = which
        .into_iter()
        .filter(|index| links.contains_key(index))
        .collect();
    if which.is_empty() {
        return Ok(());
    }
    let qdiscs = qdiscs(handle).await?;
    for index in which {
        let mut filtered = false;
        let mut filtered_out = false;
        if qdiscs.contains_key(&index) {
            let has_others = |filters: Vec<Filter>| filters.iter().any(|filter| !filter.is_ours());
            // If the query fails, assume that other programs have filters.
            filtered = at(handle, index, Hook::Ingress)
                .await
                .map_or(true, has_others);
            filtered_out = at(handle, index, Hook::Egress)
                .await
                .map_or(true, has_others);
        }
        let lacks_egress = qdiscs.get(&index).is_some_and(|kind| kind == INGRESS);
        links.entry(index).and_modify(|link| {
            (link.filtered, link.filtered_out, link.lacks_egress) =
                (filtered, filtered_out, lacks_egress);
        });
    }
    Ok(())
}

/// Returns the kind of qdisc of each device with a clsact or ingress qdisc. Both kinds use the same
/// handle.
async fn qdiscs(handle: &Handle) -> Result<BTreeMap<u32, String>> {
    let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
    let qdiscs = dump(handle, request, |message| {
        let RouteNetlinkMessage::NewQueueDiscipline(qdisc) = message else {
            return None;
        };
        let kind = |attribute: &TcAttribute| match attribute {
            TcAttribute::Kind(kind) if [CLSACT, INGRESS].contains(&kind.as_str()) => {
                Some(kind.clone())
            }
            _ => None,
        };
        Some((
            u32::try_from(qdisc.header.index).ok()?,
            qdisc.attributes.iter().find_map(kind)?,
        ))
    });
    Ok(qdiscs.await.context("list qdiscs")?.into_iter().collect())
}

/// Returns the interface index in a notification about filters.
pub(super) fn named(message: &NetlinkMessage<RouteNetlinkMessage>) -> Option<u32> {
    let NetlinkPayload::InnerMessage(message) = &message.payload else {
        return None;
    };
    let message = match message {
        RouteNetlinkMessage::NewTrafficFilter(message)
        | RouteNetlinkMessage::DelTrafficFilter(message)
        | RouteNetlinkMessage::NewQueueDiscipline(message)
        | RouteNetlinkMessage::DelQueueDiscipline(message) => message,
        _ => return None,
    };
    u32::try_from(message.header.index).ok()
}

fn of_device(ifindex: u32) -> Result<TcMessage> {
    Ok(TcMessage::with_index(
        i32::try_from(ifindex).context("an interface index")?,
    ))
}

/// Reads a filter. Returns `None` for the entry of a whole priority, which the kernel lists next to
/// the priority's filters.
fn filter(hook: Hook, message: TcMessage) -> Option<Filter> {
    let priority = u16::try_from(message.header.info >> 16).unwrap_or_default();
    let mut kind = None;
    let mut program = None;
    let mut id = None;
    for attribute in &message.attributes {
        match attribute {
            TcAttribute::Kind(name) => kind = Some(name.clone()),
            TcAttribute::Options(options) => {
                program = options.iter().find_map(program_name);
                id = options.iter().find_map(program_id);
            }
            _ => {}
        }
    }
    let name = program
        .or(kind)
        .filter(|_| message.header.handle != TcHandle::UNSPEC)?;
    Some(Filter {
        hook,
        priority,
        name,
        program: id,
        message,
    })
}

fn program_name(option: &TcOption) -> Option<String> {
    match option {
        TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.clone()),
        _ => None,
    }
}

fn program_id(option: &TcOption) -> Option<u32> {
    match option {
        TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
        _ => None,
    }
}

/// Removes a filter from its device.
pub async fn remove(handle: &Handle, filter: &Filter) -> Result<()> {
    let mut message = TcMessage::default();
    message.header = filter.message.header.clone();
    message.attributes = vec![TcAttribute::Kind("bpf".to_owned())];
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::DelTrafficFilter(message));
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK;
    let what = || format!("remove the {} filter {}", filter.hook.name(), filter.name);
    match handle
        .clone()
        .request(request)
        .with_context(what)?
        .next()
        .await
        .map(|answer| answer.payload)
    {
        Some(NetlinkPayload::Error(error)) if error.code.is_some() => {
            Err(error.to_io()).with_context(what)
        }
        _ => Ok(()),
    }
}

/// Removes a device's clsact qdisc. Returns false if there is none.
pub async fn remove_qdisc(handle: &Handle, ifindex: u32) -> Result<bool> {
    let request = of_device(ifindex)?;
    let index = request.header.index;
    let qdiscs = dump(
        handle,
        RouteNetlinkMessage::GetQueueDiscipline(request),
        |message| match message {
            RouteNetlinkMessage::NewQueueDiscipline(qdisc) if qdisc.header.index == index => {
                Some(qdisc)
            }
            _ => None,
        },
    );
    let kind = TcAttribute::Kind(CLSACT.to_owned());
    if !qdiscs
        .await
        .context("list qdiscs")?
        .iter()
        .any(|qdisc| qdisc.attributes.contains(&kind))
    {
        return Ok(false);
    }
    let mut request = handle.qdisc().del(index);
    request.message_mut().header.parent = TcHandle::CLSACT;
    request
        .execute()
        .await
        .with_context(|| format!("remove the clsact qdisc of device {ifindex}"))?;
    Ok(true)
}
