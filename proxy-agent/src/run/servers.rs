//! The servers on the network: health, metrics and the web page.

use std::convert::Infallible;
use std::net::SocketAddr;

use anyhow::{Context, Error, Result};
use axum::Router;
use tokio::task::JoinSet;

use crate::http_server::keep_serving;
use crate::run::Reporting;
use crate::settings::Settings;
use crate::ui::Sources;
use crate::{healthz, metrics_server, ui};
use proxy_source::events::Events;
use proxy_source::health::{Health, Problem};

/// A function that reports a failed server as an Event.
type Failed = fn(&Events, &Error);

pub(super) struct Servers {
    servers: Vec<(Problem, SocketAddr, Router, Failed)>,
    hard_fail: bool,
    health: Health,
    events: Events,
}

impl Servers {
    pub(super) fn new(settings: &Settings, reporting: &Reporting) -> Self {
        let Reporting {
            watchers,
            metrics,
            liveness,
            health,
            source_health,
            agent,
            events,
            ..
        } = reporting;
        let healthz = healthz::router(
            liveness.clone(),
            metrics.clone(),
            [health.clone(), source_health.clone()],
        );
        let page = if settings.ui {
            let sources = Sources::new(agent, watchers, &settings.run_dir);
            ui::router(sources, &settings.node_name)
        } else {
            Router::new()
        };
        let metrics = metrics_server::router(agent.clone(), metrics.clone(), settings, page);
        let servers = [
            (
                Problem::HealthServer,
                settings.healthz_address,
                healthz,
                Events::healthz_failed as Failed,
            ),
            (
                Problem::MetricsServer,
                settings.metrics_address,
                metrics,
                Events::metrics_failed,
            ),
        ];
        Self {
            servers: servers
                .into_iter()
                .filter_map(|(what, address, router, failed)| {
                    Some((what, address?, router, failed))
                })
                .collect(),
            hard_fail: settings.bind_address_hard_fail,
            health: health.clone(),
            events: events.clone(),
        }
    }

    /// Serves until dropped. Fails if an address is required and listening fails. The servers have
    /// their own threads, so that they answer while the agent hangs.
    pub(super) async fn run(self) -> Result<Infallible> {
        let mut tasks = JoinSet::new();
        for (what, address, router, failed) in self.servers {
            let hard_fail = self.hard_fail;
            let health = self.health.clone();
            let events = self.events.clone();
            tasks.spawn(async move {
                let ended = keep_serving(&what, address, router, hard_fail, &health).await;
                ended.inspect_err(|error| failed(&events, error))
            });
        }
        match tasks.join_next().await {
            Some(ended) => ended.context("a server has failed")?,
            None => std::future::pending().await,
        }
    }
}
