//! The section `openers`: SYNs in distinct clients' names on one CPU and on two, see
//! `tools::openers`.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tools::openers::{Row, Speed, median, openers};

use crate::record::{Record, Table, Writer, show};

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Rounds; each measures every row on each CPU alone, and on both
    #[arg(long, default_value_t = 15)]
    rounds: usize,
}

pub(crate) fn run(args: &Args, results: &Path) -> Result<()> {
    let table = table(&openers(args.rounds)?);
    show(&table);
    let mut writer = Writer::create(results, "openers")?;
    writer.write(&Record::Table(table))?;
    writer.finish()
}

fn table(rows: &[Row]) -> Table {
    let header = [
        "SYNs to a Service",
        "one CPU, 1/s",
        "two CPUs, 1/s",
        "two / 2 × one",
        "in the program on one, ns",
        "on two, ns",
    ];
    let rate = |rounds: &[Speed]| format!("{:.0}", median(rounds, |speed| speed.per_second));
    let time = |rounds: &[Speed]| format!("{:.0}", median(rounds, |speed| nanos(speed.in_program)));
    let rows = rows.iter().map(|row| {
        let alone = &row.alone;
        let together = &row.together;
        let scaling = format!("{:.2}", row.scaling());
        vec![
            row.what.to_owned(),
            rate(alone),
            rate(together),
            scaling,
            time(alone),
            time(together),
        ]
    });
    Table {
        header: header.map(str::to_owned).to_vec(),
        rows: rows.collect(),
    }
}

fn nanos(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}
