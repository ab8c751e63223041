//! Measures large clusters: kpx, and kube-proxy's rules, loaded by kube-proxy's tools.
//!
//! A node is a network namespace with one pod, which dials. Another namespace is the rest of the
//! cluster: it has every endpoint's address, so that any Service may be dialled. All variants get
//! the same cluster on the same machine.

mod fan;
mod figure;
mod first;
mod kpx;
mod kube_proxy;
mod load;
mod place;
mod rules;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;

pub use self::figure::{By, Figure, Found, What};
pub use crate::bench::NFTABLES_SINCE;
use crate::control::cluster::Cluster;

/// A kind of measurement, which a run may leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Section {
    /// Starts, changes and restarts in clusters of each size
    Clusters,
    /// First packets by the number of Services
    First,
    /// The bytes and events that one API server sends for a change
    Fan,
}

/// The size of all of it.
#[derive(Clone, Debug)]
pub struct Options {
    /// The selected kinds of measurements.
    pub sections: Vec<Section>,
    /// Numbers of Services, each with the number of endpoints per Service.
    pub sizes: Vec<(u32, u32)>,
    /// The variants other than kpx.
    pub beside: Vec<By>,
    /// Time limit for a tool to load its rules; it is killed afterwards.
    pub limit: Duration,
    /// The duration of changes at each rate.
    pub duration: Duration,
    /// True if the run may be ended from outside, like that of a guest. Each cluster then begins
    /// with a figure that marks the run as unfinished.
    pub may_be_ended: bool,
    /// The pause after a start, and before and after a restart.
    pub calm: Duration,
    /// The number of agents of an API server.
    pub agents: usize,
    /// New connections per second during a restart.
    pub per_second: u32,
    /// The time of unmeasured connections before first packets: an agent's first seconds are
    /// slower.
    pub warm_up: Duration,
    /// The numbers of Services for the latency of first packets, and the number of measured
    /// connections for each.
    pub first_services: Vec<u32>,
    pub first_connections: u32,
    pub kube_proxy: Option<PathBuf>,
}

/// Receives each figure as it is found.
pub trait Keep {
    fn figure(&mut self, figure: Figure) -> Result<()>;
    fn progress(&mut self, what: &str);
}

/// Runs all measurements. Needs root.
pub fn run(options: &Options, keep: &mut impl Keep) -> Result<()> {
    let wants = |section| options.sections.contains(&section);
    for &size in options.sizes.iter().filter(|_| wants(Section::Clusters)) {
        for by in [By::Kpx].into_iter().chain(options.beside.iter().copied()) {
            start(options, by, size, keep)?;
        }
    }
    if wants(Section::First) {
        first::measure(options, keep)?;
    }
    if wants(Section::Fan) {
        fan::measure(options, keep)?;
    }
    Ok(())
}

/// Measures a cluster. A failure is a figure too.
fn start(options: &Options, by: By, size: (u32, u32), keep: &mut impl Keep) -> Result<()> {
    keep.progress(&format!(
        "{by}, {} Services with {} endpoints each",
        size.0, size.1
    ));
    if options.may_be_ended {
        let of_kpx = [What::Change100P50, What::Restart]
            .into_iter()
            .filter(|_| by == By::Kpx);
        for what in [What::Programmed, What::FirstFollowsP50]
            .into_iter()
            .chain(of_kpx)
        {
            keep.figure(Figure::new(by, size, what, Found::Unfinished))?;
        }
    }
    let mut is_programmed = false;
    let mut kept = Ok(());
    let mut put = |what, value: Found| {
        is_programmed |= what == What::Programmed;
        if kept.is_ok() {
            kept = keep.figure(Figure::new(by, size, what, value));
        }
    };
    let cluster = Cluster {
        services: size.0,
        endpoints: size.1,
    };
    let done = match by {
        By::Kpx => kpx::measure(options, &cluster, &mut put),
        By::KubeProxyIptables | By::KubeProxyNftables => {
            kube_proxy::measure(options, by, &cluster, &mut put)
        }
        By::Nftables | By::IptablesLegacy | By::IptablesNft => {
            rules::measure(options, by, &cluster, &mut put)
        }
    };
    kept?;
    if let Err(error) = done {
        let what = match by {
            _ if !is_programmed => What::Programmed,
            By::Kpx => What::Restart,
            _ => What::FirstFollowsP50,
        };
        keep.figure(Figure::new(
            by,
            size,
            what,
            Found::Failed(format!("{error:#}")),
        ))?;
    }
    Ok(())
}
