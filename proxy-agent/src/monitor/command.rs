//! `kpx monitor`.

use std::io::{ErrorKind, Write, stdout};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use jiff::{SignedDuration, Timestamp};

use super::Limit;
use super::event::Event;
use super::filter::Filter;
use super::text;
use crate::config::duration::GoDuration;
use proxy_view::RUN_DIR;
use proxy_view::client::Client;
use proxy_view::object_name::ServiceName;
use proxy_view::select_args::NamespaceArgs;
use proxy_view::{Names, reason_parser};

/// Show packets that open flows, are dropped or are rejected, until stopped.
///
/// Packets of open flows are left out and keep their speed. Packets that arrive too fast are
/// counted as lost. --since starts with past packets, if the agent keeps them (`kpx run
/// --monitor-history`).
#[derive(Args, Debug)]
pub struct MonitorArgs {
    /// Show only packets to this Service.
    #[arg(long, value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<ServiceName>,
    #[command(flatten)]
    within: NamespaceArgs,
    /// Show only packets from this address.
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
    /// Show only packets dropped or rejected for this reason of `kpx status`.
    #[arg(long, value_name = "REASON", value_parser = reason_parser(), hide_possible_values = true, conflicts_with = "decisions")]
    reason: Option<String>,
    /// Show only dropped and rejected packets.
    #[arg(long, alias = "drops", conflicts_with = "decisions")]
    unserved: bool,
    /// Show only packets that open flows.
    #[arg(long)]
    decisions: bool,
    /// Output format: one line of text or of JSON per packet.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Output,
    /// Maximum lines per second; further packets are counted as lost.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit_per_second: u32,
    /// Start with past packets of this time: 30s, 5m, 1h30m.
    #[arg(long, value_name = "DURATION")]
    since: Option<GoDuration>,
    /// Exit after the past packets.
    #[arg(long, requires = "since")]
    no_follow: bool,
    /// Exit after N packets.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Run directory of the agent.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Text,
    Json,
}

pub async fn monitor(args: &MonitorArgs) -> Result<()> {
    let client = Client::new(&args.run_dir);
    // With a wrong name the command would wait without output.
    if let Some(name) = &args.service {
        name.clone()
            .within(args.within.namespace.as_deref())
            .find(&client.services_to_name().await?)?;
    }
    let mut namer = Namer {
        names: client.names().await?,
        asked: Instant::now(),
        client: client.clone(),
    };
    let started = Timestamp::now();
    let mut lines = client.lines(&args.path(started)?).await?;
    let filter = args.filter();
    let mut limit = Limit::new(args.limit_per_second);
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        let line = match lines.next().await? {
            Some(line) => line,
            None if args.no_follow => break,
            None => bail!("kpx has ended"),
        };
        let mut event: Event =
            serde_json::from_slice(&line).context("the running kpx has another version")?;
        namer.name(&mut event).await?;
        if !filter.wants(&event) {
            continue;
        }
        // Past events are exempt from the limit: their number is limited.
        let (lost, may) = if event.time < started {
            (0, true)
        } else {
            limit.ask()
        };
        if lost > 0 && !args.print(&Event::lost(lost))? {
            break;
        }
        if may && !args.print(&event)? {
            break;
        }
        shown += u64::from(may && event.lost == 0);
    }
    Ok(())
}

impl MonitorArgs {
    fn path(&self, now: Timestamp) -> Result<String> {
        let Some(since) = self.since else {
            return Ok("/monitor".to_owned());
        };
        let past = since.std().context("--since must not be negative")?;
        let time = now.saturating_sub(SignedDuration::try_from(past)?)?;
        Ok(format!("/monitor?since={time}&follow={}", !self.no_follow))
    }

    fn filter(&self) -> Filter {
        Filter {
            service: self.service.clone().map(|ServiceName(name)| name),
            namespace: self.within.namespace.clone(),
            client: self.client,
            reason: self.reason.clone(),
            unserved: self.unserved,
            decisions: self.decisions,
        }
    }

    /// Prints an event. Returns false if the reader has closed the pipe.
    fn print(&self, event: &Event) -> Result<bool> {
        let line = match self.output {
            Output::Text => text::line(event),
            Output::Json => serde_json::to_string(event)?,
        };
        let mut stdout = stdout().lock();
        match writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
            result => result.map(|()| true).context("write to standard output"),
        }
    }
}

struct Namer {
    client: Client,
    names: Names,
    asked: Instant,
}

impl Namer {
    /// Adds the Service's name to the event. If the Service is unknown, it may be new: reads the
    /// names again, at most once a second.
    async fn name(&mut self, event: &mut Event) -> Result<()> {
        const PERIOD: Duration = Duration::from_secs(1);
        event.name(&self.names);
        if event.lacks_name() && self.asked.elapsed() > PERIOD {
            self.asked = Instant::now();
            self.names = self.client.names().await?;
            event.name(&self.names);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn reason_must_be_a_counted_one() {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            monitor: MonitorArgs,
        }
        let read = |reason| Line::try_parse_from(["kpx", "--reason", reason]);
        assert_eq!(
            read("no_endpoints").unwrap().monitor.reason.as_deref(),
            Some("no_endpoints")
        );
        assert_eq!(
            read("forged").unwrap().monitor.reason.as_deref(),
            Some("spoofed"),
            "the name in the previous release"
        );
        let error = read("no_endpoint")
            .map(|line| line.monitor)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("similar value exists: 'no_endpoints'"),
            "{error}"
        );
    }
}
