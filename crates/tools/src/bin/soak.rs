//! Runs operators' actions on a busy node, and reports their effect on clients.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use tools::soak::{self, Greed, Place, Report, Room, Scale};

/// Injects faults under load, prints what was seen, and fails if a promise is broken. Needs root.
#[derive(Parser)]
#[command(name = "kpx-soak")]
struct Args {
    #[arg(value_enum, default_value = "all")]
    scenarios: Vec<Scenario>,
    /// kpx runs in kubeadm's DaemonSet for kube-proxy with the image swapped, and not as a process
    /// of the node.
    #[arg(long)]
    swapped: bool,
    /// Each scenario goes on for so long at least.
    #[arg(long, default_value_t = 0)]
    minutes: u64,
    /// New connections a second.
    #[arg(long, default_value_t = 2_000)]
    rate: u32,
    /// How often kpx is restarted or upgraded, how often rules come and go, and how often a Service
    /// is created beside a greedy namespace.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// How many EndpointSlices are changed.
    #[arg(long, default_value_t = 10_000)]
    changes: u32,
    /// How many devices come and go at once.
    #[arg(long, default_value_t = 1_000)]
    devices: u32,
    /// How many endpoints a greedy namespace has.
    #[arg(long, default_value_t = 100_000)]
    endpoints: u32,
    /// How long the API server is gone each time, in seconds.
    #[arg(long, default_value_t = 20)]
    outage: u64,
    /// Kernel programs to upgrade to, and back.
    #[arg(long, env = "KPX_OTHER_OBJECT")]
    object: Option<PathBuf>,
}

const IDLE: usize = 1_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// kpx is killed and started again.
    Restart,
    /// kpx ends and starts with other kernel programs.
    Upgrade,
    /// Backends come and go.
    Endpoints,
    /// Devices come and go by the hundred, while backends change.
    Devices,
    /// The API server goes away, forgets and hangs up.
    Outage,
    /// SYNs and datagrams from random sources, for a minute.
    Flood,
    /// Direct connections that netfilter masquerades with random ports, beside those of clients
    /// outside, for a minute.
    Ports,
    /// Rules and filters of others come and go where connections skip the stack.
    Rules,
    /// A thousand silent connections, and a minute of packets in their names that would end them.
    Idle,
    /// A greedy namespace takes all the room that it can get, and another one creates Services.
    Tenants,
    All,
}

impl Scenario {
    fn run(self, args: &Args) -> Result<Report> {
        let at_least = Duration::from_secs(60 * args.minutes);
        let place = if args.swapped {
            Place::SwappedPod
        } else {
            Place::Node
        };
        let scale = Scale {
            place,
            rate: args.rate,
            rounds: args.rounds,
            at_least,
        };
        match self {
            Self::Restart => soak::restart(scale),
            Self::Upgrade => soak::upgrade(
                scale,
                args.object
                    .as_deref()
                    .context("upgrade to which --object?")?,
            ),
            Self::Endpoints => soak::endpoints(Scale {
                rounds: args.changes,
                ..scale
            }),
            Self::Devices => soak::devices(scale, args.devices),
            Self::Outage => soak::outage(scale, Duration::from_secs(args.outage)),
            Self::Flood => soak::flood(Scale {
                at_least: at_least.max(Duration::from_secs(60)),
                ..scale
            }),
            Self::Ports => soak::ports(Scale {
                at_least: at_least.max(Duration::from_secs(60)),
                rate: args.rate.min(300),
                ..scale
            }),
            Self::Rules => soak::rules(scale),
            Self::Idle => soak::idle(IDLE, at_least.max(Duration::from_secs(60))),
            Self::Tenants => {
                let greed = Greed {
                    services: 15,
                    ports: 15_000,
                    endpoints: args.endpoints,
                    changes: 50,
                };
                soak::tenants(args.rounds, greed, &[Room::OF_4_GIB, Room::OF_THIS_MACHINE])
            }
            Self::All => bail!("not one scenario"),
        }
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        // The reports have the failures.
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all scenarios, and returns true if all promises were kept.
fn run(args: &Args) -> Result<bool> {
    let all = Scenario::value_variants()
        .iter()
        .copied()
        .filter(|scenario| *scenario != Scenario::All);
    let is_chosen = |scenario| {
        args.scenarios
            .iter()
            .any(|chosen| [Scenario::All, scenario].contains(chosen))
    };
    let mut kept = true;
    for scenario in all.filter(|scenario| is_chosen(*scenario)) {
        let report = scenario.run(args)?;
        println!("{report}");
        kept &= report.check().is_ok();
    }
    Ok(kept)
}
