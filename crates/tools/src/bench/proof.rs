//! Proves that a lab's clients are served by its variant.

use std::collections::BTreeSet;
use std::net::SocketAddrV4;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::fixture::{By, Fixture};
use super::{Mode, Path, Variant, services};
use testbed::agent::{DEADLINE, wait_until};

/// The length of a slice that only has to work.
const SHORT: Duration = Duration::from_millis(20);
/// Paths on which kpx's new connections bypass the node's stack by default.
const SHORTCUT: [Path; 2] = [Path::Local, Path::Routable];
/// Paths on which open connections skip the stack.
const OPEN: [Path; 4] = [Path::Local, Path::Routable, Path::Calico, Path::KubeRouter];

impl Fixture<'_> {
    /// Checks that clients reach their backend by this variant's means, and by no other.
    pub fn prove(&self, path: Path) -> Result<()> {
        if path == Path::Routable && matches!(self.by, By::Nobody | By::Kpx(_)) {
            self.prove_untracked(path)?;
        }
        let frontend = services::frontend(self.lab, path);
        let before = self.counts()?;
        let known = self.tracked()?;
        if self.by.is_nobody() {
            let done = self.slice_to(path, frontend, SHORT).run(Mode::TcpCrr);
            ensure!(
                done.is_err(),
                "{frontend} is served without anybody who serves it"
            );
            return self.slice(path, SHORT).run(Mode::TcpCrr).map(drop);
        }
        let connections = self.run(path, SHORT, Mode::TcpCrr)?.amount;
        let mut fresh = self.tracked()?;
        fresh.retain(|connection| !known.contains(connection));
        let tracked = fresh
            .iter()
            .any(|connection| connection.is_translated(frontend, self.backend(path)));
        let counts = self.counts()?;
        let news = |name: &str| sum(&counts, name) - sum(&before, name);
        match self.variant {
            Variant::Kpx | Variant::KpxB | Variant::KpxOff => {
                ensure!(
                    !tracked,
                    "connection tracking translates {frontend}, not kpx"
                );
                let served = news("flow_opened") + news("socket_translated");
                ensure!(
                    served >= connections,
                    "kpx served {served} connections of {connections}"
                );
                let shortcuts = news("fast") + news("socket_translated");
                match self.variant {
                    Variant::KpxOff => {
                        ensure!(shortcuts == 0, "{shortcuts} packets took a shortcut")
                    }
                    _ if SHORTCUT.contains(&path) => {
                        ensure!(shortcuts > 0, "no packet took a shortcut")
                    }
                    _ => {}
                }
            }
            Variant::KpxSocketAll => {
                ensure!(
                    news("flow_opened") == 0,
                    "packets were translated, not sockets"
                );
                ensure!(
                    news("socket_translated") >= connections,
                    "kpx did not lead {connections} sockets"
                );
            }
            Variant::Beside => {
                let served = news("flow_opened") + news("socket_translated");
                ensure!(
                    served == 0,
                    "kpx served {served} connections that are none of its"
                );
            }
            _ => ensure!(
                tracked,
                "connection tracking translates no connection to {frontend}"
            ),
        }
        if self.variant == Variant::Ipvs {
            let known = self
                .lab
                .n1
                .host
                .ns
                .read("/proc/thread-self/net/ip_vs_conn")?;
            let [to, at] = [frontend, self.backend(path)].map(hex);
            ensure!(
                known
                    .lines()
                    .any(|line| line.contains(&format!("{to} {at}"))),
                "IPVS knows none:\n{known}"
            );
        }
        Ok(())
    }

    /// Checks that an open connection skips the stack where kpx reports it. `run` measures a slice
    /// over it.
    pub(super) fn prove_open(
        &self,
        path: Path,
        mut run: impl FnMut(Duration) -> Result<()>,
    ) -> Result<()> {
        if !matches!(self.variant, Variant::Kpx | Variant::KpxB) || !OPEN.contains(&path) {
            return Ok(());
        }
        // A connection takes the stack once in some seconds, so that conntrack keeps it.
        wait_until(DEADLINE, "an open connection skips the stack", || {
            let before = self.counts()?;
            run(SHORT)?;
            Ok(sum(&self.counts()?, "fast") > sum(&before, "fast"))
        })
    }

    fn prove_untracked(&self, path: Path) -> Result<()> {
        let known = self.tracked()?;
        self.slice(path, SHORT).run(Mode::TcpCrr)?;
        let tracked = self.tracked()?.difference(&known).count();
        ensure!(
            tracked == 0,
            "{tracked} connections were tracked without need"
        );
        Ok(())
    }

    /// Returns kpx's counters by name; empty for another proxy.
    fn counts(&self) -> Result<Vec<(String, u64)>> {
        let agent = match &self.by {
            By::Kpx(agent) => agent,
            By::Nobody | By::Rules | By::KubeProxy(_) => return Ok(Vec::new()),
        };
        let status = agent.status()?;
        let events = status["events"]
            .as_object()
            .context("a status without events")?;
        Ok(events
            .iter()
            .filter_map(|(name, count)| Some((name.clone(), count.as_u64()?)))
            .collect())
    }

    /// Returns the node's conntrack entries.
    fn tracked(&self) -> Result<BTreeSet<Tracked>> {
        // The process is in another namespace.
        let text = self
            .lab
            .n1
            .host
            .ns
            .read("/proc/thread-self/net/nf_conntrack")?;
        Ok(text.lines().map(Tracked::of).collect())
    }
}

/// A conntrack entry's addresses and ports, as the kernel lists them.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Tracked {
    /// In the original direction.
    sent: Vec<String>,
    answered: Vec<String>,
}

impl Tracked {
    fn of(line: &str) -> Self {
        let is_tuple = |word: &&str| {
            ["src=", "dst=", "sport=", "dport="]
                .iter()
                .any(|name| word.starts_with(name))
        };
        let mut words = line.split_whitespace().filter(is_tuple).map(str::to_owned);
        Self {
            sent: words.by_ref().take(4).collect(),
            answered: words.collect(),
        }
    }

    /// Returns true if the entry translates `frontend` to `backend`.
    fn is_translated(&self, frontend: SocketAddrV4, backend: SocketAddrV4) -> bool {
        let sent = [
            format!("dst={}", frontend.ip()),
            format!("dport={}", frontend.port()),
        ];
        sent.iter().all(|word| self.sent.contains(word))
            && self.answered.contains(&format!("src={}", backend.ip()))
    }
}

/// Sums all counters whose names contain a text.
fn sum(counts: &[(String, u64)], name: &str) -> u64 {
    counts
        .iter()
        .filter(|(counter, _)| counter.contains(name))
        .map(|(_, count)| count)
        .sum()
}

/// Formats an address as in the kernel's list of IPVS connections.
fn hex(at: SocketAddrV4) -> String {
    format!("{:08X} {:04X}", u32::from(*at.ip()), at.port())
}
