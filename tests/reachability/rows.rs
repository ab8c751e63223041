//! Runs the table: every case over all protocols, both families and all sizes.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use testbed::echo::{Answer, Dial, Fault, Protocol, kernel_speaks_sctp, pattern};
use testbed::kernel;
use testbed::lab::{Family, Lab};

use super::case::{Case, Expect, Seen};
use super::fixture::from_unused_port;
use super::results::Results;
use super::services;
use super::setting::Setting;

/// The waiting time for a packet that must be dropped.
const SILENCE: Duration = Duration::from_millis(400);
/// The timeout of a refusal, which is a message and comes at the second try at the latest.
const AT_ONCE: Duration = Duration::from_millis(2_400);
/// The number of parallel conversations.
const WORKERS: usize = 16;

pub(crate) fn run<'a>(
    lab: &Lab,
    setting: &Setting,
    cases: impl IntoIterator<Item = &'a Case>,
    results: &mut Results,
) {
    let rows: Vec<Row> = cases
        .into_iter()
        .flat_map(|case| rows(*case, setting))
        .collect();
    let next = AtomicUsize::new(0);
    let shared = Mutex::new(results);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = row.check(lab, setting);
                    let mut results = shared.lock().expect("no worker panics while it tallies");
                    results.add(row.case.id, &format!("{row}, {setting}"), result);
                }
            });
        }
    });
}

struct Row {
    case: Case,
    expect: Expect,
    protocol: Protocol,
    family: Family,
    size: Size,
}

/// The size of a client's request.
#[derive(Clone, Copy)]
enum Size {
    Bytes(usize),
    /// One UDP datagram, which IP fragments.
    Fragments(usize),
}

fn rows(case: Case, setting: &Setting) -> Vec<Row> {
    let mtu = setting.layout.mtu() as usize;
    let mut rows = Vec::new();
    for protocol in Protocol::ALL {
        let expect = match case.expect(setting.compat) {
            Expect::Seen(_)
                if !setting.compat && protocol == Protocol::Tcp && case.is_by_socket() =>
            {
                Expect::Seen(Seen::Routed)
            }
            expect => expect,
        };
        for family in Family::ALL {
            let mut sizes = sizes(expect, protocol, family, mtu);
            sizes.retain(|size| !is_left_out(case, protocol, *size, mtu));
            rows.extend(sizes.into_iter().map(|size| Row {
                case,
                expect,
                protocol,
                family,
                size,
            }));
        }
    }
    rows
}

/// See `NOT_RUN`. The kernel's own SCTP sets DF on packets that it sends whole.
fn is_left_out(case: Case, protocol: Protocol, size: Size, mtu: usize) -> bool {
    let is_long_message = match size {
        Size::Fragments(_) => false,
        Size::Bytes(size) => protocol == Protocol::Sctp && kernel_speaks_sctp() && size > mtu,
    };
    let is_in_fragments = matches!(size, Size::Fragments(_));
    is_long_message && case.starts_on_lo()
        || (is_long_message || is_in_fragments)
            && case.is_answered_on_lo()
            && kernel::version().is_ok_and(|version| version < (5, 12))
}

/// Returns one byte; one more than a TCP segment; the most that the kernel segments late;
/// fragments.
fn sizes(expect: Expect, protocol: Protocol, family: Family, mtu: usize) -> Vec<Size> {
    use Size::{Bytes, Fragments};
    if !matches!(expect, Expect::Seen(_) | Expect::Other(..)) {
        return vec![Bytes(1)];
    }
    let segment = match family {
        Family::V4 => mtu - 20 - 20,
        Family::V6 => mtu - 40 - 20,
    };
    match protocol {
        Protocol::Tcp => vec![Bytes(1), Bytes(segment + 1), Bytes(64 << 10)],
        // At most 65,507 in one write.
        Protocol::Udp => vec![
            Bytes(1),
            Bytes(segment + 1),
            Bytes(60_000),
            Fragments(2000),
            Fragments(9000),
        ],
        Protocol::Sctp => vec![Bytes(1), Bytes(5000)],
    }
}

impl Row {
    fn check(&self, lab: &Lab, setting: &Setting) -> Result<()> {
        let dial = Dial::new(self.protocol, self.case.addr(lab, self.family));
        let ns = &lab.host(self.case.client).ns;
        match self.expect {
            Expect::Seen(seen) => self.is_answered(
                dial,
                lab,
                setting,
                services::backend(self.case.service),
                seen,
            ),
            Expect::Other(name, seen) => self.is_answered(dial, lab, setting, name, seen),
            Expect::Refused => {
                let started = Instant::now();
                match from_unused_port(dial).exchange(ns, &[0]) {
                    Err(Fault::Refused) if started.elapsed() < AT_ONCE => Ok(()),
                    Err(fault) => {
                        bail!("not refused at once: {fault} after {:?}", started.elapsed())
                    }
                    Ok(answer) => bail!("{} answers", answer.backend),
                }
            }
            Expect::Silence => match from_unused_port(dial).deadline(SILENCE).exchange(ns, &[0]) {
                Err(Fault::TimedOut(_)) => Ok(()),
                Err(fault) => bail!("not silence: {fault}"),
                Ok(answer) => bail!("{} answers", answer.backend),
            },
        }
    }

    /// Checks two exchanges of one connection, the last one over half-closed TCP.
    fn is_answered(
        &self,
        dial: Dial,
        lab: &Lab,
        setting: &Setting,
        backend: &str,
        seen: Seen,
    ) -> Result<()> {
        let source = self.case.source(seen, backend, lab, setting, self.family);
        let (dial, size) = match self.size {
            Size::Bytes(size) => (dial, size),
            Size::Fragments(size) => (dial.fragments(), size),
        };
        let converse = |dial: Dial| -> Result<[Answer; 2], Fault> {
            // A second conversation gets its own port, since answers to the first one may come
            // late.
            let mut connection = from_unused_port(dial).connect(&lab.host(self.case.client).ns)?;
            Ok([
                connection.exchange(&[0])?,
                connection.exchange_last(&pattern(size))?,
            ])
        };
        for answer in dial
            .learning(lab.layout, converse)
            .with_context(|| format!("dial {}", dial.to))?
        {
            ensure!(
                answer.backend == backend,
                "{} answers, not {backend}",
                answer.backend
            );
            ensure!(
                answer.source.ip() == source,
                "{backend} sees {}, not {source}",
                answer.source
            );
        }
        Ok(())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            case,
            protocol,
            family,
            size,
            ..
        } = self;
        write!(
            f,
            "{}: {} dials {} by {:?}, {protocol} {family}, ",
            case.id, case.client, case.service, case.to
        )?;
        match size {
            Size::Bytes(size) => write!(f, "{size} bytes"),
            Size::Fragments(size) => write!(f, "{size} bytes in fragments"),
        }
    }
}
