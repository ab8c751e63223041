//! Follows the rules that the fast path depends on: netfilter's, IPsec's, and the routing rules.
//!
//! The watch reads the state once a second, by a few numbers and short lists, and at once when the
//! kernel tells of a change. Legacy iptables tells nothing, and of nftables only the end of a
//! change is heard: the other messages carry every rule.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::StreamExt;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkPayload};
use rtnetlink::proto::ConnectionHandle;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::debug;

use super::foreign_rule::{self, ForeignRule};
use super::netfilter::{Legacy, follows_connections};
use super::netlink::{Handle, kernel};
use super::raw::{self, Asker, Message};
use super::rule_news::RuleNews;
use super::xfrm;

/// The time between two looks without news, and the shortest one with news.
const PERIOD: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);
/// The time between two reports of a state that was not judged.
const REMINDER: Duration = Duration::from_secs(2);

/// The type of a request for the number of the rules' state (linux/netfilter/nf_tables.h), and
/// `struct nfgenmsg` before it.
const NFT_MSG_GETGEN: u16 = 0x0a10;
const HEAD: [u8; 4] = [0; 4];
/// The place of the attribute NFTA_GEN_ID in the answer: the first one. The others name the program
/// that asks.
const GEN_ID: Range<usize> = HEAD.len()..HEAD.len() + 8;

/// The mark that tells one state of the rules from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleState {
    /// The number that nftables counts up with each change, as the kernel sends it; none from a
    /// kernel without nftables.
    nftables: Option<Vec<u8>>,
    legacy: Legacy,
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

/// Tells `hold`, again and again, whether the present state has been judged, and reports others to
/// be judged. Ends when the receiver is gone, or when `hold` fails.
pub async fn watch_rules(
    handle: Handle,
    judged: JudgedRules,
    changes: mpsc::Sender<()>,
    mut hold: impl FnMut(bool) -> Result<()>,
) -> Result<()> {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Changes after the first look are heard.
    let mut news = RuleNews::subscribe();
    let mut reader = Reader::new(handle);
    let mut reported = None;
    let mut reminder = Instant::now();
    let mut not_before = Instant::now();
    loop {
        let look = async {
            tokio::select! {
                _ = ticks.tick() => {}
                () = judged.0.news.notified() => {}
                () = news.next() => sleep_until(not_before).await,
            }
            reader.read().await
        };
        let read = tokio::select! {
            // Before a runtime that shuts down fails the sockets.
            biased;
            () = changes.closed() => return Ok(()),
            read = look => read,
        };
        not_before = Instant::now() + PAUSE;
        // A state that cannot be read, for want of memory or file descriptors, may be any.
        let state = read
            .inspect_err(|error| debug!("the state of rules: {error:#}"))
            .ok();
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
        Reader::new(handle.clone()).read().await
    }
}

/// A reader of the state, whose sockets stay open.
struct Reader {
    handle: Handle,
    sockets: Option<Sockets>,
}

struct Sockets {
    nftables: Asker,
    /// None on a kernel without IPsec.
    xfrm: Option<Asker>,
}

impl Reader {
    const fn new(handle: Handle) -> Self {
        Self {
            handle,
            sockets: None,
        }
    }

    async fn read(&mut self) -> Result<RuleState> {
        // Sockets that fail, or whose questions were left, make room for others.
        let mut sockets = self.sockets.take().map_or_else(Sockets::open, Ok)?;
        let legacy = Legacy::read(true)?;
        // The kernel follows connections only where some rule asks for it.
        let tracks = follows_connections()?;
        let nftables = sockets
            .nftables
            .ask(number)
            .await
            .context("read the nftables ruleset generation")?;
        let policies = xfrm::forwarding_policies_by(&mut sockets.xfrm).await?;
        let routing = foreign_rule::unasked(&self.handle).await?;
        self.sockets = Some(sockets);
        Ok(RuleState {
            nftables,
            legacy,
            tracks,
            policies,
            routing,
        })
    }
}

impl Sockets {
    fn open() -> Result<Self> {
        Ok(Self {
            nftables: Asker::open(NETLINK_NETFILTER).context("open a netlink socket")?,
            xfrm: xfrm::open()?,
        })
    }
}

/// Returns the number as the kernel sends it; None from a kernel without nftables.
async fn number(handle: &ConnectionHandle<Message>) -> io::Result<Option<Vec<u8>>> {
    let request = raw::request(NFT_MSG_GETGEN, NLM_F_REQUEST, HEAD.to_vec());
    let mut answers = handle
        .clone()
        .request(request, kernel())
        .map_err(io::Error::other)?;
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => {
                return Ok(message.bytes.get(GEN_ID).map(<[u8]>::to_vec));
            }
            NetlinkPayload::Error(error) if error.to_io().kind() == ErrorKind::InvalidInput => {
                return Ok(None);
            }
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
    }
    Err(ErrorKind::UnexpectedEof.into())
}
