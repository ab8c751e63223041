//! The section `dead-backends`, see `tools::dead_backends`.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tools::dead_backends::{self, Means, Options, Place};

use crate::record::{Record, Writer, show};
use crate::report::dead;

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Runs, one after the other; the report shows each
    #[arg(long, default_value_t = 2)]
    runs: u32,
}

pub(crate) fn run(args: &Args, results: &Path) -> Result<()> {
    let options = Options {
        means: vec![Means::Nftables, Means::KpxOff, Means::KpxOn],
        places: vec![Place::OneNode, Place::EachNode],
        clients: vec![2, 10],
        per_second: 500,
        before: Duration::from_secs(2),
        after: Duration::from_secs(10),
        patience: Duration::from_secs(8),
    };
    let mut writer = Writer::create(results, "dead-backends")?;
    let mut rows = Vec::new();
    for _ in 0..args.runs {
        dead_backends::run(&options, &mut |row| {
            eprintln!("{row:?}");
            rows.push(row.clone());
            writer.write(&Record::DeadBackends(row))
        })?;
    }
    writer.finish()?;
    show(&dead::table(&rows));
    Ok(())
}
