//! Watches the rules that the fast path depends on: netfilter, IPsec policies, routing rules.
//!
//! The watch reads the state every second, as a few numbers and short lists, and immediately after
//! a notification. Legacy iptables sends no notifications, and for nftables the watch receives only
//! the end of a transaction: the other messages carry every rule. the end of a transaction: the
//! other messages carry every rule.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use netlink_packet_core::NLM_F_REQUEST;
use rtnetlink::proto::ConnectionHandle;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::debug;

use super::foreign_rule::{self, ForeignRule};
use super::netfilter::{Legacy, tracks_connections};
use super::netlink::Handle;
use super::raw::{self, Asker, Message};
use super::rule_changes::RuleChanges;
use super::xfrm;

/// The time between periodic checks, and the minimum pause before a check that a notification
/// causes.
const PERIOD: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);
/// The time between two reports of a state that is not evaluated yet.
const REMINDER: Duration = Duration::from_secs(2);

/// The request for the generation of the rules (linux/netfilter/nf_tables.h), and the request's
/// `struct nfgenmsg`.
const NFT_MSG_GETGEN: u16 = 0x0a10;
const HEAD: [u8; 4] = [0; 4];
/// The position of NFTA_GEN_ID, the first attribute of the answer. The other attributes identify
/// the requesting program.
const GEN_ID: Range<usize> = HEAD.len()..HEAD.len() + 8;

/// A fingerprint of the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleState {
    /// The generation of nftables, as the kernel sends it; `None` if there is no nftables.
    nftables: Option<Vec<u8>>,
    legacy: Legacy,
    /// True if conntrack tracks a connection.
    tracks: bool,
    policies: Vec<xfrm::Policy>,
    routing: Vec<ForeignRule>,
}

/// The last evaluated ("judged") state; `None` if a new evaluation is due.
#[derive(Clone, Debug, Default)]
pub struct JudgedRules(Arc<Judged>);

#[derive(Debug, Default)]
struct Judged {
    state: Mutex<Option<RuleState>>,
    /// Notified when a state is set.
    news: Notify,
}

impl JudgedRules {
    /// Sets the evaluated state, which must be read before the evaluation.
    pub fn set(&self, state: Option<RuleState>) {
        *self.0.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.0.news.notify_one();
    }

    fn is(&self, state: Option<&RuleState>) -> bool {
        let judged = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_some() && judged.as_ref() == state
    }
}

/// Calls `hold` repeatedly: with true if the current state has been evaluated. Reports other
/// states. Ends when the receiver is gone, or when `hold` fails.
pub async fn watch_rules(
    handle: Handle,
    judged: JudgedRules,
    changes: mpsc::Sender<()>,
    mut hold: impl FnMut(bool) -> Result<()>,
) -> Result<()> {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Subscribe before the first check, so that no later change is missed.
    let mut news = RuleChanges::subscribe();
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
            // Check this first, because the sockets fail when a runtime shuts down.
            biased;
            () = changes.closed() => return Ok(()),
            read = look => read,
        };
        not_before = Instant::now() + PAUSE;
        // An unreadable state (no memory, no file descriptors) counts as not evaluated.
        let state = read
            .inspect_err(|error| debug!("the state of rules: {error:#}"))
            .ok();
        let is_judged = judged.is(state.as_ref());
        hold(is_judged)?;
        if !is_judged && (state != reported || reminder <= Instant::now()) {
            (reported, reminder) = (state, Instant::now() + REMINDER);
            // A report that is already queued covers this state.
            let _sent = changes.try_send(());
        }
    }
}

impl RuleState {
    pub async fn read(handle: &Handle) -> Result<Self> {
        Reader::new(handle.clone()).read().await
    }
}

/// A reader of the state with persistent sockets.
struct Reader {
    handle: Handle,
    sockets: Option<Sockets>,
}

struct Sockets {
    nftables: Asker,
    /// `None` if the kernel has no IPsec.
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
        // Failed sockets, and sockets with abandoned requests, are replaced.
        let mut sockets = self.sockets.take().map_or_else(Sockets::open, Ok)?;
        let legacy = Legacy::read(true)?;
        // The kernel tracks connections only if a rule requires it.
        let tracks = tracks_connections()?;
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

/// Returns the generation as the kernel sends it; `None` if there is no nftables.
async fn number(handle: &ConnectionHandle<Message>) -> io::Result<Option<Vec<u8>>> {
    let request = raw::request(NFT_MSG_GETGEN, NLM_F_REQUEST, HEAD.to_vec());
    match raw::first(handle, request).await {
        Ok(message) => Ok(message.bytes.get(GEN_ID).map(<[u8]>::to_vec)),
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(None),
        Err(error) => Err(error),
    }
}
