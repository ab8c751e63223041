//! `kpx top`: the live traffic of each Service.

mod backends;
mod data;
mod keys;
mod rows;
mod screen;

use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use crossterm::event::EventStream;
use futures::StreamExt;
use tokio::time::{MissedTickBehavior, interval, sleep};

use proxy_view::client::{Client, WAITS};
use proxy_view::object_name::{ServiceName, full_name};
use proxy_view::output::{Data, Form, json, print, yaml};
use proxy_view::select_args::NamespaceArgs;
use proxy_view::{RUN_DIR, Selector};

use backends::backends;
use keys::Act;
use rows::{Sample, Sort, View, rows};
use screen::Screen;

/// Show the traffic of each Service per second: flows opened, packets, bytes, unserved packets; and
/// its flows.
///
/// In a terminal the view is updated until `q` is pressed; Enter shows the backends of a Service,
/// and Escape all Services again. Elsewhere, or with --once, one table is printed. Packets and
/// bytes count both directions. A packet is unserved if it would have opened a flow, and was
/// dropped or rejected. CONN-P50 and CONN-P99 are the times within which backends answered that
/// part of the TCP connections of the interval. REFUSED/S and SILENT/S count connections that a
/// backend refused or did not answer.
#[derive(Args, Debug)]
pub(super) struct TopArgs {
    /// Show the backends of this Service.
    #[arg(value_name = "[svc/][NAMESPACE/]NAME", conflicts_with_all = ["filter", "selector"])]
    service: Option<ServiceName>,
    /// Seconds between samples.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = seconds)]
    interval: f64,
    /// The column to sort by.
    #[arg(
        long,
        visible_alias = "sort-by",
        value_enum,
        default_value_t,
        value_name = "COLUMN"
    )]
    sort: Sort,
    #[command(flatten)]
    within: NamespaceArgs,
    /// Show only Services whose namespace or name contains this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Show only Services with these labels, as in kubectl: app=web,tier!=db,env in (a,b),!old.
    #[arg(long, short = 'l', value_name = "LABELS")]
    selector: Option<Selector>,
    /// Print one table for one interval, and exit.
    #[arg(long)]
    once: bool,
    /// Output format; data is printed once.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Data,
    /// Run directory of the agent.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

fn seconds(text: &str) -> Result<f64> {
    let seconds: f64 = text.parse().context("not a number")?;
    ensure!(
        (0.5..=3600.0).contains(&seconds),
        "not between 0.5 and 3600"
    );
    Ok(seconds)
}

pub(super) async fn top(args: &TopArgs) -> Result<()> {
    let client = Client::new(&args.run_dir);
    let period = Duration::from_secs_f64(args.interval);
    let namespace = args.within.namespace.clone();
    let filter = args.filter.clone();
    let selector = args.selector.clone().unwrap_or_default();
    let first = sample(&client).await?;
    let name = args
        .service
        .clone()
        .map(|name| name.within(namespace.as_deref()));
    let waits = first.services.is_empty() && !first.status.complete;
    ensure!(name.is_none() || !waits, "no Services yet: {WAITS}");
    let open = name
        .map(|name| name.find(&first.services).map(full_name))
        .transpose()?;
    let view = View {
        sort: args.sort,
        filter,
        selector,
        namespace,
        open,
        ..View::default()
    };
    if args.once || args.output != Data::Text || !stdout().is_terminal() {
        sleep(period).await;
        let second = sample(&client).await?;
        let opened = view
            .open
            .as_deref()
            .map(|service| backends(&first, &second, service));
        // The filter also matches Services whose full name contains the selected name.
        let mut rows = rows(&first, &second, &view);
        rows.services
            .retain(|row| view.open.as_ref().is_none_or(|open| row.name == *open));
        let traffic = data::Traffic::of(&rows, opened.as_ref());
        return print(&match (args.output, &opened) {
            (Data::Text, Some(opened)) => backends::text(opened, Form::of_stdout(false, false)),
            (Data::Text, None) => rows::text(&rows, Form::of_stdout(false, false)),
            (Data::Json, _) => json(&traffic)?,
            (Data::Yaml, _) => yaml(&traffic)?,
        });
    }
    let mut screen = Screen::open()?;
    watch(&client, &mut screen, period, first, view).await
}

async fn watch(
    client: &Client,
    screen: &mut Screen,
    period: Duration,
    first: Sample,
    mut view: View,
) -> Result<()> {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut keys = EventStream::new();
    let mut before = first.clone();
    let mut now = first;
    loop {
        let rows = rows(&before, &now, &view);
        let opened = view
            .open
            .as_deref()
            .map(|service| backends(&before, &now, service));
        screen.draw(&rows, opened.as_ref(), &mut view)?;
        tokio::select! {
            _ = ticks.tick() => match sample(client).await {
                Ok(sample) => (before, now) = (now, sample),
                // The loop continues, because an agent that restarts answers again soon.
                Err(error) => now.problem = Some(format!("{error:#}")),
            },
            key = keys.next() => {
                let key = key.context("the terminal was closed")?.context("read from the terminal")?;
                if keys::press(&key, &mut view) == Act::Quit {
                    return Ok(());
                }
            }
        }
    }
}

async fn sample(client: &Client) -> Result<Sample> {
    let (status, services) = tokio::try_join!(client.status(), client.services())?;
    Ok(Sample {
        at: Instant::now(),
        status,
        services,
        problem: None,
    })
}
