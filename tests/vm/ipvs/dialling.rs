//! Clients that open one connection after the other, and keep account of those without an answer.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use proxy_net::kernel::version;
use testbed::agent::{DEADLINE, wait_until};
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::Host;

/// The time between two connections of a client. There are four clients, and a guest's one
/// processor has an agent to start as well.
const PAUSE: Duration = Duration::from_millis(20);
/// The time for each step of a connection: shorter than a second, after which a client of TCP sends
/// a lost SYN again.
const STEP: Duration = Duration::from_millis(900);
/// The time for each step where the kernel drops packets itself: one SYN may be lost, and no second
/// one.
const STEP_BY_CLSACT: Duration = Duration::from_millis(1_900);
/// The first kernel with TCX. An older one drops what a device is to send at the moment at which a
/// clsact qdisc comes or goes (`qdisc_graft` in net/sched/sch_api.c).
const HAS_TCX: (u32, u32) = (6, 6);
/// The connections of each kind that a phase takes at least.
const EACH: usize = 5;
/// The datagrams that a client sends before it gives up, where it may send again.
const TRIES: usize = 3;

/// A client, and what it dials in turn.
pub(super) struct Client<'a> {
    pub(super) host: &'a Host,
    pub(super) dials: Vec<Dial>,
    /// True if it asks again with another socket, as clients of UDP do.
    pub(super) asks_again: bool,
}

/// The account.
pub(super) struct Dialling {
    account: Mutex<Account>,
    /// Devices may drop a packet when kpx comes or goes.
    drops: bool,
}

#[derive(Default)]
struct Account {
    phase: &'static str,
    answered: BTreeMap<String, usize>,
    asked_again: usize,
    /// The connections whose first SYN was lost, as far as they were answered.
    slow: usize,
    lost: Vec<String>,
}

impl Dialling {
    /// Has clients dial until `work` ends. Returns a line about the connections; no connection was
    /// lost.
    pub(super) fn during(
        clients: &[Client],
        backends: &[&str],
        work: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<String> {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")
            .context("read the kernel's release")?;
        let drops = version(&release).is_some_and(|version| version < HAS_TCX);
        let dialling = Self {
            account: Mutex::default(),
            drops,
        };
        dialling.account().answered = clients
            .iter()
            .flat_map(Client::names)
            .map(|name| (name, 0))
            .collect();
        let result = thread::scope(|scope| {
            // A client ends with its sender.
            let _senders: Vec<_> = clients
                .iter()
                .map(|client| {
                    let (sender, ends) = mpsc::channel::<()>();
                    let dialling = &dialling;
                    scope.spawn(move || dialling.dial(client, backends, &ends));
                    sender
                })
                .collect();
            work(&dialling)
        });
        let Account {
            answered,
            asked_again,
            slow,
            lost,
            ..
        } = dialling
            .account
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        ensure!(
            lost.is_empty(),
            "lost connections:\n{}\n{result:?}",
            lost.join("\n")
        );
        result?;
        let number: usize = answered.values().sum();
        ensure!(
            slow * 100 <= number,
            "{slow} of {number} connections took more than one SYN"
        );
        Ok(format!(
            "{number} connections, none lost; {asked_again} datagrams were sent again, and {slow} connections took two SYNs"
        ))
    }

    /// Enters a phase, and waits until each client has been answered in it some times by each of
    /// its ways.
    pub(super) fn enter(&self, phase: &'static str) -> Result<()> {
        let before = {
            let mut account = self.account();
            account.phase = phase;
            account.answered.clone()
        };
        wait_until(DEADLINE, phase, || {
            let account = self.account();
            // One more, which the phase before may have begun.
            let is_dialled = |(who, count): (&String, &usize)| {
                *count > before.get(who).copied().unwrap_or(0) + EACH
            };
            Ok(!account.lost.is_empty() || account.answered.iter().all(is_dialled))
        })?;
        let lost = self.account().lost.join("\n");
        ensure!(lost.is_empty(), "{phase}:\n{lost}");
        Ok(())
    }

    fn dial(&self, client: &Client, backends: &[&str], ends: &Receiver<()>) {
        for (dial, name) in client.dials.iter().zip(client.names()).cycle() {
            if ends.recv_timeout(PAUSE) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let dial = dial.deadline(if self.drops { STEP_BY_CLSACT } else { STEP });
            let started = Instant::now();
            let mut answer = dial.exchange(&client.host.ns, b"hello");
            let is_slow = dial.protocol == Protocol::Tcp && started.elapsed() > STEP;
            let asks_again = client.asks_again || self.drops && dial.protocol == Protocol::Udp;
            for _ in 1..TRIES {
                if asks_again && matches!(answer, Err(Fault::TimedOut(_))) {
                    self.account().asked_again += 1;
                    answer = dial.exchange(&client.host.ns, b"hello");
                }
            }
            let mut account = self.account();
            let phase = account.phase;
            match answer {
                Ok(answer) if backends.contains(&answer.backend.as_str()) => {
                    *account.answered.entry(name).or_default() += 1;
                    account.slow += usize::from(is_slow);
                }
                Ok(answer) => account
                    .lost
                    .push(format!("{name} while {phase}: {}", answer.backend)),
                Err(fault) => account.lost.push(format!("{name} while {phase}: {fault}")),
            }
        }
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Client<'_> {
    fn names(&self) -> impl Iterator<Item = String> + Clone {
        self.dials
            .iter()
            .map(|dial| format!("{} to {}/{}", self.host.name, dial.to, dial.protocol))
    }
}
