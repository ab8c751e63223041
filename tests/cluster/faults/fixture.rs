//! A lab with an API server in its fabric, kpx on node n1, and the checks that hold through every
//! failure.

use std::cell::{Cell, RefCell};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use proxy_core::tables::Tables;
use testbed::agent::{Agent, DEADLINE, Service, kpx, wait_until};
use testbed::apiserver::ApiServer;
use testbed::echo::{Connection, Dial, Protocol};
use testbed::http::{self, HEALTH};
use testbed::kernel_tables;
use testbed::lab::Family;
use testbed::watched_lab::WatchedLab;

/// The port of all servers of the lab.
pub(crate) const PORT: u16 = 8080;
/// The limit of the time from the server's recovery until the tables match its objects: less than
/// the longest pause between two attempts. The time itself is printed.
const RECOVERY: Duration = Duration::from_secs(15);

pub(crate) struct Run<'a> {
    pub(crate) fixture: &'a WatchedLab,
    agent: Agent<'a>,
    /// A connection from before all faults.
    open: RefCell<Connection>,
    changes: Cell<u8>,
}

impl<'a> Run<'a> {
    /// Starts with a Service `web` with the backend p1b, and a connection to it.
    pub(crate) fn start(fixture: &'a WatchedLab) -> Result<Self> {
        Self::start_by(fixture, None)
    }

    /// Starts kpx by a command that executes it.
    pub(crate) fn start_by(fixture: &'a WatchedLab, by: Option<Command>) -> Result<Self> {
        // kpx reports its start as an Event, which is denied here.
        fixture.api().fail("create", "events", 403);
        let host = &fixture.lab.n1.host;
        let agent =
            Agent::launch_by(by, &fixture.lab, host, fixture.source(), &[""; 0])?.healthy()?;
        fixture.put_service(&web())?;
        let client = &fixture.lab.host("p1a").ns;
        let mut open = None;
        wait_until(DEADLINE, "web is served", || {
            open = dial().connect(client).ok();
            Ok(open.is_some())
        })?;
        let open = RefCell::new(open.context("a connection")?);
        Ok(Self {
            fixture,
            agent,
            open,
            changes: Cell::new(0),
        })
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.agent.stop()
    }

    pub(crate) fn api(&self) -> std::cell::Ref<'_, ApiServer> {
        self.fixture.api()
    }

    /// Changes one of six Services.
    pub(crate) fn change(&self) -> Result<()> {
        const BACKENDS: [&[&str]; 3] = [&["p1b"], &["p1b", "p2a", "p2b"], &["p2a", "n2"]];
        const NAMES: [&str; 6] = ["s0", "s1", "s2", "s3", "s4", "s5"];
        let count = self.changes.replace(self.changes.get().wrapping_add(1));
        let nth = usize::from(count) % NAMES.len();
        let backends = BACKENDS[usize::from(count) / NAMES.len() % BACKENDS.len()];
        let service = Service::new(NAMES[nth], 20 + nth as u8, backends, PORT);
        self.fixture.put_service(&service)
    }

    /// Checks that packets pass, on the old connection and on new ones.
    pub(crate) fn serves(&self) -> Result<()> {
        self.open
            .borrow_mut()
            .exchange(b"still there")
            .context("the open connection")?;
        let answer = dial()
            .exchange(&self.fixture.lab.host("p1a").ns, b"hello")
            .context("a new connection")?;
        ensure!(answer.backend == "p1b", "{} answered", answer.backend);
        Ok(())
    }

    /// Lets time pass, with packets, while `happens` runs repeatedly.
    pub(crate) fn pass(
        &self,
        time: Duration,
        mut happens: impl FnMut(Duration) -> Result<()>,
    ) -> Result<()> {
        let started = Instant::now();
        wait_until(DEADLINE, "time has passed", || {
            self.serves()?;
            happens(started.elapsed())?;
            Ok(started.elapsed() >= time)
        })
    }

    /// Checks that the problem is in the status, the log, /healthz and the metrics, and that the
    /// node keeps its traffic.
    pub(crate) fn reports(&self, limit: Duration, what: &str, why: &str) -> Result<()> {
        let reported = || -> Result<bool> {
            let status = self.agent.status()?;
            let problems = status["problems"].as_array().cloned().unwrap_or_default();
            Ok(problems.iter().any(|p| {
                p["what"] == what && p["why"].as_str().is_some_and(|text| text.contains(why))
            }))
        };
        wait_until(limit, &format!("{what}: {why}"), reported).with_context(|| {
            self.agent
                .status()
                .map(|status| status["problems"].to_string())
                .unwrap_or_default()
        })?;
        ensure!(self.agent.log().contains(why), "the log does not say {why}");
        let health = http::ask(&self.fixture.lab.n1.host.ns, HEALTH, "GET", "/healthz")?;
        ensure!(
            health.code == 200 && health.body.contains(why),
            "{health:?}"
        );
        ensure!(
            self.metric("kpx_problems", "")? >= 1.0,
            "no problem in the metrics"
        );
        Ok(())
    }

    /// Returns the output of `kpx status`, which must succeed.
    pub(crate) fn status(&self) -> Result<String> {
        let output = kpx(
            self.agent.ns(),
            &format!("status --run-dir {}", self.agent.run_dir().display()),
        )?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    pub(crate) fn is_well(&self) -> Result<()> {
        wait_until(DEADLINE, "nothing is wrong", || {
            Ok(self.agent.status()?["problems"] == serde_json::json!([]))
        })
        .with_context(|| {
            self.agent
                .status()
                .map(|status| status["problems"].to_string())
                .unwrap_or_default()
        })
    }

    /// Checks that the tables match the objects soon after the end of `fault`.
    pub(crate) fn recovers(&self, fault: &str) -> Result<()> {
        self.recovers_within(RECOVERY, fault)
    }

    /// The same, where a wrong reaction to the fault recovers within [`RECOVERY`] as well.
    pub(crate) fn recovers_within(&self, limit: Duration, fault: &str) -> Result<()> {
        let since = Instant::now();
        let want = self.fixture.wanted("n1")?;
        let settled = wait_until(limit, "the tables are as wanted", || {
            Ok(self.tables()? == want)
        });
        let took = since.elapsed();
        println!("{fault}: {} ms", took.as_millis());
        settled.with_context(|| {
            let found = self
                .tables()
                .map(|tables| tables.to_string())
                .unwrap_or_default();
            format!("{fault}: wants\n{want}\nand has\n{found}")
        })?;
        self.serves().with_context(|| format!("after {fault}"))
    }

    pub(crate) fn tables(&self) -> Result<Tables> {
        kernel_tables::of(self.agent.pid())
    }

    /// Returns the sum of a metric's samples that have `label` among their label values; all
    /// samples if it is empty.
    pub(crate) fn metric(&self, name: &str, label: &str) -> Result<f64> {
        let metrics = http::scrape(&self.fixture.lab.n1.host.ns)?;
        let samples = &metrics
            .get(name)
            .with_context(|| format!("no metric {name}"))?
            .samples;
        let meant = samples
            .iter()
            .filter(|sample| label.is_empty() || sample.labels.values().any(|v| v == label));
        Ok(meant.map(|sample| sample.value).sum())
    }

    pub(crate) fn pid(&self) -> Pid {
        self.agent.pid()
    }

    pub(crate) fn log(&self) -> String {
        self.agent.log()
    }
}

fn web() -> Service {
    Service::new("web", 10, &["p1b"], PORT)
}

fn dial() -> Dial {
    Dial::new(Protocol::Tcp, web().frontend(Family::V4))
}
