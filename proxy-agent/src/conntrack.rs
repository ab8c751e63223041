//! The kernel's own connection tracking, on which kpx does not depend, but beside which it works.
//!
//! Between kpx's hooks netfilter sees every flow from a pod or from outside translated, client to backend, and the host's
//! own untranslated, client to frontend, on their way into the anchor. So connections count against
//! `nf_conntrack_max`, are subject to its timeouts, and NetworkPolicies may go by their state: kube-proxy's settings of
//! all that ([`sysctl`]) mean what they meant. Only `tcp_be_liberal` has lost the reason that it had with kube-proxy,
//! whose rules drop what conntrack takes for invalid; kpx has no such rule, but others may.
//!
//! What kube-proxy has translated it goes on to translate after its end ([`stale`]): for UDP, whose flows have no end of
//! their own, those entries have to go.

pub mod stale;
pub mod sysctl;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use proxy_common::addr::Proto;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use proxy_core::desired::Desired;
use proxy_core::diff::{Change, ServiceKey};
use proxy_core::ip_family::IpFamily;
use stale::Frontends;

/// What became of the entries of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconciled {
    pub ip_family: IpFamily,
    pub deleted: u64,
    pub duration: Duration,
}

/// At most one look through the table in this time.
const PAUSE: Duration = Duration::from_secs(1);
/// And after one that failed.
const RETRY: Duration = Duration::from_secs(30);

/// What was looked for, and what became of it.
type Look = (Arc<Frontends>, Result<Vec<Reconciled>>);

/// Removes stale entries on a task of its own: the table may be large.
#[derive(Debug, Default)]
pub struct Reconciler {
    /// What is to be looked for next.
    due: Option<Arc<Frontends>>,
    /// What was last to be looked for, and of which revision it is: most changes are of endpoints, and leave it as it is.
    known: Option<(u64, Arc<Frontends>)>,
    /// When the next look may begin.
    not_before: Option<Instant>,
    work: Option<JoinHandle<Look>>,
}

impl Reconciler {
    /// Looks soon for entries of what clients may dial now; `own` are this node's addresses.
    pub fn set_due(&mut self, desired: &Desired, own: BTreeSet<IpAddr>) {
        let revision = desired.revision();
        let known = self.known.take().filter(|(of, known)| *of == revision && *known.own() == own);
        let (_, frontends) =
            self.known.insert(known.unwrap_or_else(|| (revision, Arc::new(Frontends::of(desired.tables(), own)))));
        self.due = Some(Arc::clone(frontends));
    }

    /// Waits for the end of the next look. May be cancelled: it goes on and is waited for the next time.
    pub async fn next(&mut self) -> Result<Vec<Reconciled>> {
        if self.work.is_none() {
            if self.due.is_none() {
                std::future::pending::<()>().await;
            }
            if let Some(not_before) = self.not_before {
                sleep_until(not_before).await;
            }
            let frontends = self.due.take().unwrap_or_default();
            self.not_before = Some(Instant::now() + PAUSE);
            self.work = Some(tokio::spawn(async move {
                let removed = stale::remove(&frontends).await;
                (frontends, removed)
            }));
        }
        let Some(work) = &mut self.work else { return Ok(Vec::new()) };
        let ended = work.await;
        self.work = None;
        let (frontends, removed) = ended.context("look through the kernel's connections")?;
        if removed.is_err() {
            self.due.get_or_insert(frontends);
            self.not_before = Some(Instant::now() + RETRY);
        }
        removed
    }
}

/// Whether a change may make entries stale.
pub fn concerns(change: &Change) -> bool {
    change.services().any(|service| match service {
        ServiceKey::V4(key) => key.proto == Proto::UDP,
        ServiceKey::V6(key) => key.proto == Proto::UDP,
    })
}
