//! Clients that open one connection after the other, and count unanswered ones.

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

/// The pause between two connections of a client. Four clients share a guest's one processor with a
/// starting agent.
const PAUSE: Duration = Duration::from_millis(20);
/// The timeout of each step of a connection: below one second, after which TCP sends a lost SYN
/// again.
const STEP: Duration = Duration::from_millis(900);
/// The timeout of each step where the kernel itself drops packets: it covers one lost SYN, not two.
const STEP_BY_CLSACT: Duration = Duration::from_millis(1_900);
/// The first kernel with TCX. Older ones drop a device's output at the moment at which a clsact
/// qdisc comes or goes (`qdisc_graft` in net/sched/sch_api.c).
const HAS_TCX: (u32, u32) = (6, 6);
/// The minimum number of connections of each kind per phase.
const EACH: usize = 5;
/// The datagrams that a client sends before it gives up, if it may retry.
const TRIES: usize = 3;

/// A client, and the addresses that it dials in turn.
pub(super) struct Client<'a> {
    pub(super) host: &'a Host,
    pub(super) dials: Vec<Dial>,
    /// True if the client retries from another socket, as UDP clients do.
    pub(super) asks_again: bool,
}

/// The counts of all clients.
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
    /// Answered connections whose first SYN was lost.
    slow: usize,
    lost: Vec<String>,
}

impl Dialling {
    /// Runs clients until `work` ends, and fails if a connection was lost. Returns a line of
    /// counts.
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

    /// Enters a phase, and waits until each client has been answered often enough in it by each of
    /// its paths.
    pub(super) fn enter(&self, phase: &'static str) -> Result<()> {
        let before = {
            let mut account = self.account();
            account.phase = phase;
            account.answered.clone()
        };
        wait_until(DEADLINE, phase, || {
            let account = self.account();
            // One more, because the previous phase may have begun one of them.
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
