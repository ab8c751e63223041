//! Applies backend health: reads the programs' counters, ejects unresponsive backends and reports
//! them to their Services.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use proxy_common::counter::Event;
use proxy_core::desired::Desired;
use proxy_core::health::{Change, Judge};
use proxy_core::input::ObjectName;
use proxy_datapath::{Counters, VoteReader};
use proxy_source::health::Problem;
use proxy_view::status::SilentStatus;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::Agent;
use crate::lost_nodes::EndpointPlaces;

/// The time between two reads of the programs' counters: normally, and while no connection opens.
const PERIOD: Duration = Duration::from_millis(200);
const REST: Duration = Duration::from_secs(1);
/// The time without a new connection after which reads become rare: longer than a client's SYN
/// retry.
const CALM: Duration = Duration::from_secs(10);
/// The counters that grow with each new and each failed connection.
const SIGNS: [Event; 3] = [Event::FlowOpened, Event::SocketLed, Event::BackendFailed];
/// The reads take at most 1/20 of the time.
const SHARE: u32 = 20;

/// The maximum number of log lines of one evaluation, and of backends that each line names.
const LINES: usize = 20;
const NAMED: usize = 3;

#[derive(Debug)]
pub(super) struct BackendHealth {
    judge: Judge,
    votes: VoteReader,
    started: Instant,
    due: Instant,
    /// The count of failures at the last read, if any.
    counted: Option<u64>,
    /// The sum of all [`SIGNS`] at the last read, and the time of its last growth.
    signs: (u64, Option<Instant>),
    /// The places of endpoints, if the agent ends connections to lost nodes.
    places: Option<EndpointPlaces>,
}

impl BackendHealth {
    pub(super) fn new(votes: VoteReader, places: Option<EndpointPlaces>) -> Self {
        let now = Instant::now();
        let judge = Judge::default();
        let signs = (0, None);
        Self {
            judge,
            votes,
            started: now,
            due: now,
            counted: None,
            signs,
            places,
        }
    }

    pub(super) fn changed(&mut self) {
        self.places.iter_mut().for_each(EndpointPlaces::changed);
    }

    pub(super) async fn due(&self) {
        sleep_until(self.due).await;
    }

    /// Returns the time until the next read: short while connections open or a backend is silent.
    fn pace(&mut self, counters: &Counters) -> Result<Duration> {
        let signs = SIGNS
            .into_iter()
            .map(|sign| counters.event(sign))
            .sum::<Result<u64>>()?;
        if signs != self.signs.0 {
            self.signs = (signs, Some(Instant::now()));
        }
        let is_calm = self.signs.1.is_none_or(|last| last.elapsed() >= CALM);
        Ok(if self.judge.waits() || !is_calm {
            PERIOD
        } else {
            REST
        })
    }

    /// Reads the votes if the counters have grown or an evaluation is due without new votes.
    fn read(&mut self, counters: &Counters, desired: &Desired) -> Result<Vec<Change>> {
        let counted = counters.event(Event::BackendFailed)?;
        if self.counted == Some(counted) && !self.judge.waits() {
            return Ok(Vec::new());
        }
        let Self { judge, votes, .. } = self;
        let readings = votes.read()?;
        self.counted = Some(counted);
        Ok(judge.read(&readings, self.started.elapsed(), |path| {
            desired.is_backend(path)
        }))
    }
}

impl Agent {
    /// Evaluates all backends, and ejects the unresponsive backends from the tables.
    pub(super) async fn judge_backends(&mut self) -> Result<()> {
        let _work = self.reports.liveness.work();
        let Self {
            backend_health,
            counters,
            desired,
            passes,
            ..
        } = self;
        if !passes.has_synced {
            backend_health.due = Instant::now() + REST;
            return Ok(());
        }
        let began = Instant::now();
        backend_health
            .places
            .iter_mut()
            .for_each(|places| places.report(desired));
        let read = backend_health.read(counters, desired);
        let concerns_any = desired.set_silent(backend_health.judge.silent());
        // The read above has reported unreadable counters.
        let pace = backend_health.pace(counters).unwrap_or(PERIOD);
        backend_health.due = began + pace.max(began.elapsed() * SHARE);
        let reported = read.map(|changes| self.report_changes(&changes));
        self.record(&Problem::BackendHealth, reported);
        if concerns_any && self.passes.schedule.request() {
            self.sync().await
        } else {
            Ok(())
        }
    }

    /// Reports to each Service which backends became unresponsive or answer again, once per
    /// evaluation.
    fn report_changes(&self, changes: &[Change]) {
        let mut reported = BTreeMap::<_, Vec<String>>::new();
        for change in changes {
            let (path, is_silent) = match change {
                Change::Silent(path) => (path, true),
                Change::Answers(path) => (path, false),
            };
            if let Some(service) = self.desired.service_at(path) {
                reported
                    .entry((service, path.service.port(), is_silent))
                    .or_default()
                    .push(path.backend.to_string());
            }
        }
        let unlogged = reported.len().saturating_sub(LINES);
        for (nth, ((service, port, is_silent), backends)) in reported.into_iter().enumerate() {
            if nth < LINES {
                log_change(&service.name, port, is_silent, &backends);
            }
            self.reports.events.backends_changed(
                &service,
                self.desired.uid(&service),
                port,
                is_silent,
                &backends,
            );
        }
        if unlogged > 0 {
            warn!(
                ports = unlogged,
                "backends of further service ports became silent or answer again, and are not logged one by one"
            );
        }
    }

    pub(super) fn silent_status(&self) -> Vec<SilentStatus> {
        let silent = self.desired.silent().iter().filter_map(|path| {
            let service = self.desired.service_at(path)?.name.to_string();
            let port = path.service.port();
            let backend = path.backend;
            let is_ejected = self.desired.is_ejected(path);
            Some(SilentStatus {
                service,
                port,
                backend,
                is_ejected,
                is_aside: is_ejected,
            })
        });
        silent.collect()
    }
}

fn log_change(service: &ObjectName, port: u16, is_silent: bool, backends: &[String]) {
    let number = backends.len();
    let some = backends[..number.min(NAMED)].join(", ");
    if is_silent {
        warn!(%service, port, number, backends = some, "backends are silent");
    } else {
        info!(%service, port, number, backends = some, "backends answer again");
    }
}
