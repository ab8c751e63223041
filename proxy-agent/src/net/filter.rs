//! The filters of devices' clsact qdiscs: ours, that a dead kpx left, and others'.

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption};
use rtnetlink::Handle;

/// Our place among a device's filters: "KP".
pub const PRIORITY: u16 = 0x4b50;

const CLSACT: &str = "clsact";

/// A filter with a BPF program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    pub hook: Hook,
    pub priority: u16,
    /// As its maker calls it.
    pub name: String,
    message: TcMessage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

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
}

/// Those of a device, in the order in which packets meet them.
pub async fn list(handle: &Handle, ifindex: u32) -> Result<Vec<Filter>> {
    let mut filters = Vec::new();
    for hook in Hook::ALL {
        let index = i32::try_from(ifindex).context("an interface index")?;
        let request = handle.traffic_filter(index).get();
        let request = if hook == Hook::Ingress { request.ingress() } else { request.egress() };
        let messages: Vec<TcMessage> = match request.execute().try_collect().await {
            Ok(messages) => messages,
            // Without a qdisc there is nothing to list.
            Err(rtnetlink::Error::NetlinkError(_)) => continue,
            Err(error) => return Err(error).with_context(|| format!("list the filters of device {ifindex}")),
        };
        filters.extend(messages.into_iter().filter_map(|message| filter(hook, message)));
    }
    Ok(filters)
}

/// None if it has no BPF program: the kernel also lists what stands for a whole priority.
fn filter(hook: Hook, message: TcMessage) -> Option<Filter> {
    let options = message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    });
    let name = options?.iter().find_map(|option| match option {
        TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.clone()),
        _ => None,
    })?;
    let priority = u16::try_from(message.header.info >> 16).unwrap_or_default();
    Some(Filter { hook, priority, name, message })
}

/// Takes a filter off its device.
pub async fn remove(handle: &Handle, filter: &Filter) -> Result<()> {
    let mut message = TcMessage::default();
    message.header = filter.message.header.clone();
    message.attributes = vec![TcAttribute::Kind("bpf".to_owned())];
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::DelTrafficFilter(message));
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK;
    let what = || format!("remove the {} filter {}", filter.hook.name(), filter.name);
    match handle.clone().request(request).with_context(what)?.next().await.map(|answer| answer.payload) {
        Some(NetlinkPayload::Error(error)) if error.code.is_some() => Err(error.to_io()).with_context(what),
        _ => Ok(()),
    }
}

/// Takes off a device's clsact qdisc, if it has one. False if it has none.
pub async fn remove_qdisc(handle: &Handle, ifindex: u32) -> Result<bool> {
    let index = i32::try_from(ifindex).context("an interface index")?;
    let qdiscs: Vec<TcMessage> =
        handle.qdisc().get().index(index).execute().try_collect().await.context("list qdiscs")?;
    let is_clsact = |qdisc: &&TcMessage| {
        qdisc.header.index == index && qdisc.attributes.contains(&TcAttribute::Kind(CLSACT.to_owned()))
    };
    if !qdiscs.iter().any(|qdisc| is_clsact(&qdisc)) {
        return Ok(false);
    }
    let mut request = handle.qdisc().del(index);
    request.message_mut().header.parent = TcHandle::CLSACT;
    request.execute().await.with_context(|| format!("remove the clsact qdisc of device {ifindex}"))?;
    Ok(true)
}
