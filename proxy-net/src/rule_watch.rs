//! Follows the rules that the fast path depends on: netfilter's, IPsec's, and the routing rules.
//!
//! Notifications of nftables carry every rule of every change, and legacy iptables sends none. So the watch reads the state five times a
//! second, by a few numbers.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkPayload};
use rtnetlink::proto::new_connection;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::debug;

use super::foreign_rule::{self, ForeignRule};
use super::netfilter::{follows_connections, legacy_tables};
use super::netlink::{Handle, kernel};
use super::raw::{self, Message};
use super::xfrm;

/// The time between two looks, and between two reports of a state that was not judged.
const PERIOD: Duration = Duration::from_millis(200);
const REMINDER: Duration = Duration::from_secs(2);

/// The type of a request for the number of the rules' state (linux/netfilter/nf_tables.h), and `struct nfgenmsg` before it.
const NFT_MSG_GETGEN: u16 = 0x0a10;
const HEAD: [u8; 4] = [0; 4];
/// The place of the attribute NFTA_GEN_ID in the answer: the first one. The others name the program that asks.
const GEN_ID: Range<usize> = HEAD.len()..HEAD.len() + 8;

/// The mark that tells one state of the rules from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleState {
    /// The number that nftables counts up with each change, as the kernel sends it; none from a kernel without nftables.
    nftables: Option<Vec<u8>>,
    legacy: Vec<String>,
    /// Conntrack follows a connection.
    tracks: bool,
    policies: Vec<xfrm::Policy>,
    routing: Vec<ForeignRule>,
}

/// The state that was judged last; none if it has to be judged again.
#[derive(Clone, Debug, Default)]
pub struct JudgedRules(Arc<Judged>);

#[derive(Debug, Default)]
struct Judged {
    state: Mutex<Option<RuleState>>,
    /// Another state was judged.
    news: Notify,
}

impl JudgedRules {
    /// Notes the state from before the judgement.
    pub fn set(&self, state: Option<RuleState>) {
        *self.0.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.0.news.notify_one();
    }

    fn is(&self, state: Option<&RuleState>) -> bool {
        let judged = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_some() && judged.as_ref() == state
    }
}

/// Tells `hold`, again and again, whether the present state has been judged, and reports others to be judged. Ends when the receiver is
/// gone, or when `hold` fails.
pub async fn watch_rules(
    handle: Handle,
    judged: JudgedRules,
    changes: mpsc::Sender<()>,
    mut hold: impl FnMut(bool) -> Result<()>,
) -> Result<()> {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut reported, mut reminder) = (None, Instant::now());
    loop {
        tokio::select! {
            () = changes.closed() => return Ok(()),
            _ = ticks.tick() => {}
            () = judged.0.news.notified() => {}
        }
        let read = tokio::select! {
            () = changes.closed() => return Ok(()),
            read = RuleState::read(&handle) => read,
        };
        // A state that cannot be read, for want of memory or file descriptors, may be any.
        let state = read.inspect_err(|error| debug!("the state of rules: {error:#}")).ok();
        let is_judged = judged.is(state.as_ref());
        hold(is_judged)?;
        if !is_judged && (state != reported || reminder <= Instant::now()) {
            (reported, reminder) = (state, Instant::now() + REMINDER);
            // A report that waits already stands for this one.
            let _sent = changes.try_send(());
        }
    }
}

impl RuleState {
    /// Reads the state of this network namespace.
    pub async fn read(handle: &Handle) -> Result<Self> {
        let legacy = legacy_tables();
        // The kernel follows connections only where some rule asks for it.
        let tracks = follows_connections()?;
        let nftables = number().await.context("ask nftables for the number of its rules' state")?;
        let policies = xfrm::forwarding_policies().await?;
        let routing = foreign_rule::unasked(handle).await?;
        Ok(Self { nftables, legacy: legacy.into_iter().collect::<Result<_>>()?, tracks, policies, routing })
    }
}

/// Returns the number as the kernel sends it; None from a kernel without nftables.
async fn number() -> Result<Option<Vec<u8>>> {
    let (connection, handle, _) = new_connection::<Message>(NETLINK_NETFILTER).context("open a netlink socket")?;
    let ask = async {
        let request = raw::request(NFT_MSG_GETGEN, NLM_F_REQUEST, HEAD.to_vec());
        let mut answers = handle.request(request, kernel()).map_err(io::Error::other)?;
        while let Some(answer) = answers.next().await {
            match answer.payload {
                NetlinkPayload::InnerMessage(message) => return Ok(message.bytes.get(GEN_ID).map(<[u8]>::to_vec)),
                NetlinkPayload::Error(error) if error.to_io().kind() == ErrorKind::InvalidInput => return Ok(None),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                _ => {}
            }
        }
        Err(ErrorKind::UnexpectedEof.into())
    };
    tokio::select! {
        number = ask => Ok(number?),
        () = connection => bail!("the netlink socket for netfilter has failed"),
    }
}
