//! The section `scale`: large clusters, with kpx and kube-proxy's rules. See `tools::scale`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tools::bench::minor;
use tools::scale::{self, By, Figure, Keep, Options, Section};

use crate::machine::Machine;
use crate::record::{self, Record, Writer};
use crate::table;

/// The pause after a start, and before and after a restart.
const CALM: Duration = Duration::from_secs(3);
/// The time of connections before first packets are measured.
const WARM_UP: Duration = Duration::from_secs(5);
/// The number of agents of an API server.
const AGENTS: usize = 4;

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// The parts to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Section::Clusters, Section::First, Section::Fan])]
    only: Vec<Section>,
    /// Sizes of clusters: Services, an x, endpoints of each
    #[arg(long, value_delimiter = ',', value_parser = size, default_values = ["5000x50", "44000x1", "100000x2"])]
    sizes: Vec<(u32, u32)>,
    /// The means beside kpx: `iptables-nft` takes minutes
    #[arg(long, value_delimiter = ',', default_values_t = [By::Nftables, By::IptablesLegacy])]
    beside: Vec<By>,
    /// Seconds that a tool may take to load its rules
    #[arg(long, default_value_t = 180)]
    limit: u64,
    /// Seconds of changes at each rate
    #[arg(long, default_value_t = 8)]
    seconds: u64,
    /// New connections a second during a restart
    #[arg(long, default_value_t = 2_000)]
    rate: u32,
    /// Numbers of Services for the latency of first packets
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 5_000, 10_000, 30_000, 100_000])]
    first: Vec<u32>,
    /// Connections for each of them
    #[arg(long, default_value_t = 12_000)]
    connections: u32,
    /// Print records, for the host of a virtual machine that may end the run
    #[arg(long, hide = true)]
    guest: bool,
    /// A kube-proxy, to be measured as well; 1.31 or later has the mode nftables
    #[arg(long)]
    kube_proxy: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, results: &Path) -> Result<()> {
    let mut beside = args.beside.clone();
    if let Some(program) = &args.kube_proxy {
        beside.push(By::KubeProxyIptables);
        beside.extend((minor(program)? >= scale::NFTABLES_SINCE).then_some(By::KubeProxyNftables));
    }
    let options = Options {
        sections: args.only.clone(),
        sizes: args.sizes.clone(),
        beside,
        limit: Duration::from_secs(args.limit),
        duration: Duration::from_secs(args.seconds),
        may_be_ended: args.guest,
        calm: CALM,
        agents: AGENTS,
        per_second: args.rate,
        warm_up: WARM_UP,
        first_services: args.first.clone(),
        first_connections: args.connections,
        kube_proxy: args.kube_proxy.clone(),
    };
    if args.guest {
        print(&Record::Machine(Machine::read()?))?;
        return scale::run(&options, &mut Printer);
    }
    let mut keeper = Keeper(Writer::add(results, "scale")?);
    scale::run(&options, &mut keeper)?;
    keeper.0.finish()?;
    record::show(results, "scale")
}

struct Keeper(Writer);

impl Keep for Keeper {
    fn figure(&mut self, figure: Figure) -> Result<()> {
        let Figure {
            by,
            services,
            endpoints,
            what,
            ..
        } = figure;
        let found = table::found(&figure);
        eprintln!("{by:<20} {services:>6} x {endpoints:<3} {what:<22} {found}");
        self.0.write(&Record::Figure(figure))
    }

    fn progress(&mut self, what: &str) {
        eprintln!("{what}");
    }
}

/// Prints each figure as it is found: the guest may be ended before the next.
struct Printer;

impl Keep for Printer {
    fn figure(&mut self, figure: Figure) -> Result<()> {
        print(&Record::Figure(figure))
    }

    fn progress(&mut self, what: &str) {
        eprintln!("{what}");
    }
}

#[expect(
    clippy::print_stdout,
    reason = "the host of the machine reads its console"
)]
fn print(record: &Record) -> Result<()> {
    println!(
        "{}",
        serde_json::to_string(record).context("write a record")?
    );
    Ok(())
}

fn size(text: &str) -> Result<(u32, u32)> {
    let (services, endpoints) = text.split_once('x').context("such as 5000x50")?;
    Ok((
        services.parse().context("the number of Services")?,
        endpoints.parse().context("the number of endpoints")?,
    ))
}
