//! Reports changes of netfilter's rules, by the number that nftables counts up with each, and by the tables of legacy iptables.
//! The first connection that conntrack follows counts as one.

use std::fs;
use std::io::{self, ErrorKind};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkPayload};
use rtnetlink::proto::{ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;

use super::forward::{LEGACY, TRACKED};
use super::netlink::kernel;
use super::raw::{self, Message};
use super::sysctl;

/// The time between two looks. Notifications would carry every rule of every change.
const PERIOD: Duration = Duration::from_millis(200);

/// The type of a request for the number of the rules' state (linux/netfilter/nf_tables.h), and `struct nfgenmsg` before it.
const NFT_MSG_GETGEN: u16 = 0x0a10;
const HEAD: [u8; 4] = [0; 4];

/// What tells one state of the rules from another.
#[derive(Debug, Default, PartialEq, Eq)]
struct State {
    /// The kernel's answer; none from a kernel without nftables.
    nftables: Option<Vec<u8>>,
    legacy: Vec<Option<String>>,
    tracks: bool,
}

/// Reports changes until the receiver is gone.
pub async fn watch_rules(changes: mpsc::Sender<()>) -> Result<()> {
    let (connection, handle, _) = new_connection::<Message>(NETLINK_NETFILTER).context("open a netlink socket")?;
    tokio::select! {
        () = connection => bail!("the netlink socket for changes of rules failed"),
        result = follow(&handle, changes) => result,
    }
}

async fn follow(handle: &ConnectionHandle<Message>, changes: mpsc::Sender<()>) -> Result<()> {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut known = State::read(handle).await.ok();
    loop {
        tokio::select! {
            () = changes.closed() => return Ok(()),
            _ = ticks.tick() => {}
        }
        // A state that cannot be read, for want of memory or file descriptors, may be any. Who looks then finds out.
        let state = State::read(handle).await.inspect_err(|error| debug!("the rules' state: {error:#}")).ok();
        if state != known {
            known = state;
            // A report that waits already stands for this one.
            let _sent = changes.try_send(());
        }
    }
}

impl State {
    async fn read(handle: &ConnectionHandle<Message>) -> Result<Self> {
        let legacy = LEGACY.map(|(_, path)| match fs::read_to_string(path) {
            Ok(tables) => Ok(Some(tables)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {path}")),
        });
        // The number of connections, which the kernel follows only where some rule asks for it.
        let tracks = sysctl::read(TRACKED)?.is_some_and(|number| number != "0");
        let nftables = number(handle).await.context("ask nftables for the number of its rules' state")?;
        Ok(Self { nftables, legacy: legacy.into_iter().collect::<Result<_>>()?, tracks })
    }
}

/// Returns the number as the kernel sends it; None from a kernel without nftables.
async fn number(handle: &ConnectionHandle<Message>) -> io::Result<Option<Vec<u8>>> {
    let request = raw::request(NFT_MSG_GETGEN, NLM_F_REQUEST, HEAD.to_vec());
    let mut answers = handle.clone().request(request, kernel()).map_err(io::Error::other)?;
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => return Ok(Some(message.bytes)),
            NetlinkPayload::Error(error) if error.to_io().kind() == ErrorKind::InvalidInput => return Ok(None),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
    }
    Err(ErrorKind::UnexpectedEof.into())
}
