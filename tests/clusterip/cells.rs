//! The table: one cell is a client, what it dials, and what must come of it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kpx_tests::echo::{Dial, Fault, Protocol, pattern};
use kpx_tests::lab::{Family, Lab};

use crate::tally::Tally;
use crate::{Setting, frontend};

#[derive(Clone, Copy)]
struct Cell {
    id: &'static str,
    client: &'static str,
    service: &'static str,
    /// The port it dials.
    port: u16,
    expect: Expect,
}

#[derive(Clone, Copy)]
enum Expect {
    /// This backend answers, and sees the client as `source`.
    Answer { backend: &'static str, source: Seen },
    /// An RST or an ICMP error at once.
    Refused,
    /// Nothing at all.
    Silence,
}

/// The address with which a backend sees its client.
#[derive(Clone, Copy)]
enum Seen {
    /// The primary address of this host.
    As(&'static str),
    /// The address of the device through which n1 reaches the other node's pods.
    AsDeviceTowardsPods,
}

const fn answers(id: &'static str, client: &'static str, backend: &'static str, source: Seen) -> Cell {
    Cell { id, client, service: backend, port: 80, expect: Expect::Answer { backend, source } }
}

const fn refuses(id: &'static str, client: &'static str, service: &'static str, port: u16) -> Cell {
    Cell { id, client, service, port, expect: Expect::Refused }
}

const CELLS: [Cell; 18] = [
    answers("C01", "p1a", "p1b", Seen::As("p1a")),
    answers("C02", "p1a", "p1a", Seen::As("n1")),
    answers("C03", "p1a", "p2a", Seen::As("p1a")),
    answers("C03", "p2b", "p1b", Seen::As("p2b")),
    answers("C04", "p1a", "n1", Seen::As("p1a")),
    answers("C05", "p1a", "n2", Seen::As("n1")), // The CNI's masquerade, after kpx.
    answers("C06", "p1a", "ext", Seen::As("n1")), // As well.
    answers("C07", "n1", "p1b", Seen::As("n1")),
    answers("C08", "n1", "p2a", Seen::AsDeviceTowardsPods),
    answers("C09", "n1", "n1", Seen::As("n1")),
    answers("C10", "n1", "n2", Seen::As("n1")),
    answers("C10", "n2", "n1", Seen::As("n2")),
    refuses("C13", "p1a", "nowhere", 80),
    refuses("C13", "n1", "nowhere", 80),
    Cell { id: "C14", client: "p1a", service: "elsewhere", port: 80, expect: Expect::Silence },
    Cell { id: "C14", client: "n1", service: "elsewhere", port: 80, expect: Expect::Silence },
    refuses("C16", "p1a", "p1b", 81),
    refuses("C16", "n1", "p1b", 81),
];

/// How long a packet that must be dropped is waited for.
const SILENCE: Duration = Duration::from_millis(400);
/// A refusal is a message, not a time-out.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Conversations at a time.
const WORKERS: usize = 16;

/// Runs every cell over both protocols, both families and all sizes.
pub(crate) fn run(lab: &Lab, setting: &Setting, tally: &mut Tally) {
    let rows = rows();
    let next = AtomicUsize::new(0);
    let shared = Mutex::new(tally);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = row.check(lab, setting);
                    let mut tally = shared.lock().expect("no worker panics while it tallies");
                    tally.add(row.cell.id, &format!("{row}, {setting}"), result);
                }
            });
        }
    });
}

struct Row {
    cell: Cell,
    protocol: Protocol,
    family: Family,
    /// Bytes.
    size: usize,
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for cell in CELLS {
        for protocol in Protocol::ALL {
            for family in Family::ALL {
                for size in sizes(cell.expect, protocol, family) {
                    rows.push(Row { cell, protocol, family, size });
                }
            }
        }
    }
    rows
}

/// One byte; one more than a TCP segment takes; what the kernel cuts up as late as it can.
fn sizes(expect: Expect, protocol: Protocol, family: Family) -> Vec<usize> {
    let segment = match family {
        Family::V4 => 1500 - 20 - 20,
        Family::V6 => 1500 - 40 - 20,
    };
    let burst = match protocol {
        Protocol::Tcp => 64 << 10,
        Protocol::Udp => 60_000, // At most 65,507 in one write.
    };
    match expect {
        Expect::Answer { .. } => vec![1, segment + 1, burst],
        Expect::Refused | Expect::Silence => vec![1],
    }
}

impl Row {
    fn check(&self, lab: &Lab, setting: &Setting) -> Result<()> {
        let mut to = frontend(self.cell.service, self.family);
        to.set_port(self.cell.port);
        let dial = Dial::new(self.protocol, to);
        let ns = &lab.host(self.cell.client).ns;
        match self.cell.expect {
            Expect::Answer { backend, source } => {
                let answer = dial.exchange(ns, &pattern(self.size)).with_context(|| format!("dial {to}"))?;
                ensure!(answer.backend == backend, "{} answers", answer.backend);
                let expected = match source {
                    Seen::As(name) => lab.host(name).addrs,
                    Seen::AsDeviceTowardsPods => lab.n1.towards_pods(setting.pod_route),
                };
                let expected = expected.ip(self.family);
                ensure!(answer.source.ip() == expected, "{backend} sees {}, not {expected}", answer.source);
                Ok(())
            }
            Expect::Refused => {
                let started = Instant::now();
                match dial.exchange(ns, &[0]) {
                    Err(Fault::Refused) if started.elapsed() < AT_ONCE => Ok(()),
                    Err(fault) => bail!("not refused at once: {fault} after {:?}", started.elapsed()),
                    Ok(answer) => bail!("{} answers", answer.backend),
                }
            }
            Expect::Silence => match dial.deadline(SILENCE).exchange(ns, &[0]) {
                Err(Fault::TimedOut(_)) => Ok(()),
                Err(fault) => bail!("not silence: {fault}"),
                Ok(answer) => bail!("{} answers", answer.backend),
            },
        }
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { cell, protocol, family, size } = self;
        write!(
            f,
            "{}: {} dials {}:{}, {protocol} {family}, {size} bytes",
            cell.id, cell.client, cell.service, cell.port
        )
    }
}
