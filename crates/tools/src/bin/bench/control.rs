//! The section `control`: the agent's cost of a large cluster. See `tools::control`.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tools::control::{self, Memory, Options, Report};

use crate::record::{self, Record, Table, Writer};

#[derive(clap::Parser)]
pub(crate) struct Args {
    #[arg(long, default_value_t = 10_000)]
    services: u32,
    /// Number of endpoints of each service
    #[arg(long, default_value_t = 10)]
    endpoints: u32,
    /// Changes a second
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1_000])]
    rates: Vec<u32>,
    /// Seconds of each rate
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Seconds in which nothing happens
    #[arg(long, default_value_t = 60)]
    idle: u64,
    /// More arguments for kpx
    #[arg(last = true)]
    args: Vec<String>,
}

pub(crate) fn run(args: &Args, results: &Path) -> Result<()> {
    let options = Options {
        services: args.services,
        endpoints: args.endpoints,
        rates: args.rates.clone(),
        duration: Duration::from_secs(args.seconds),
        idle: Duration::from_secs(args.idle),
        args: args.args.clone(),
    };
    let mut writer = Writer::create(results, "control")?;
    let table = table(&control::run(&options)?);
    writer.write(&Record::Table(table))?;
    writer.finish()?;
    record::show(results, "control")
}

fn table(report: &Report) -> Table {
    let mut rows = Vec::new();
    let mut row = |what: &str, value: String| rows.push(vec![what.to_owned(), value]);
    let start = &report.start;
    row("start: lists", format!("{:.0} ms", start.lists_ms));
    row(
        "start: lists in to maps written",
        format!("{:.0} ms", start.programmed_ms),
    );
    row("start: CPU", format!("{:.0} ms", start.cpu_ms));
    row("start: sent by the server", mebibytes(start.bytes_sent));
    row("start: memory", memory(&start.memory));
    for changes in &report.changes {
        let rate = format!("{}/s: ", changes.per_second);
        let times = [changes.p50_ms, changes.p99_ms, changes.max_ms]
            .map(|ms| format!("{ms:.2}"))
            .join(", ");
        row(
            &format!("{rate}event to map, p50, p99, max of {}", changes.count),
            format!("{times} ms"),
        );
        let cpu = format!(
            "{:.1} % of a core, {:.0} µs a change",
            changes.cpu_percent, changes.cpu_us_per_change
        );
        row(&format!("{rate}CPU"), cpu);
        row(
            &format!("{rate}sent by the server"),
            format!("{:.0} bytes a change", changes.bytes_per_change),
        );
        row(&format!("{rate}memory"), memory(&changes.memory));
    }
    row(
        "idle: CPU",
        format!(
            "{:.3} % of a core, over {:.0} s",
            report.idle.cpu_percent, report.idle.seconds
        ),
    );
    row(
        "idle: sent by the server",
        format!("{} bytes", report.idle.bytes_sent),
    );
    row("at the end: memory", memory(&report.memory));
    let size = format!(
        "{} services, {} endpoints",
        report.services, report.endpoints
    );
    Table {
        header: vec![size, String::new()],
        rows,
    }
}

fn memory(memory: &Memory) -> String {
    let [resident, anonymous, peak] =
        [memory.resident, memory.anonymous, memory.peak].map(mebibytes);
    format!("{resident} resident, {anonymous} of it anonymous; peak {peak}")
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
