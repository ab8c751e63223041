//! `kpx services`.

use std::cmp::Reverse;

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::agent_args::AgentArgs;
use proxy_view::list::{WatchArgs, show};
use proxy_view::output::NamedOutputArgs;
use proxy_view::select_args::SelectArgs;
use proxy_view::{PortCounts, ServiceView};

/// List Services and the parts that are programmed.
///
/// CONNECT-P50 and CONNECT-P99 are the median and the 99th percentile of the TCP connect time, for
/// the slowest port. FAILED counts connections that a backend refused or did not answer, and UDP
/// datagrams that it refused. UDP-ANSWERED counts answered UDP flows among those that were
/// answered, ended without an answer or were refused, since the agent started.
#[derive(Args, Debug)]
pub(super) struct ServicesArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// The column to sort by.
    #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
    sort_by: Order,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: NamedOutputArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Order {
    /// By namespace, then by name.
    #[default]
    Name,
    /// Fewest backends in use first.
    Backends,
    /// Most flows first.
    Flows,
    /// Most dropped and rejected packets first.
    Unserved,
    /// The oldest first.
    Age,
}

pub(super) async fn services(args: &ServicesArgs) -> Result<()> {
    let client = args.agent.client();
    let read = async |is_first| {
        let mut services = args.select.read(&client, is_first).await?;
        sort(&mut services, args.sort_by);
        Ok(services)
    };
    let nothing = args.select.nothing("Services");
    show(&client, args.output.kind(), &args.watch, &nothing, read).await
}

/// Sorts Services; the sort is stable, so equal Services stay sorted by name.
fn sort(services: &mut [ServiceView], order: Order) {
    let sum = |service: &ServiceView, count: fn(&PortCounts) -> u64| -> u64 {
        service
            .ports
            .iter()
            .map(|port| count(&port.counts))
            .fold(0, u64::saturating_add)
    };
    match order {
        Order::Name => {}
        Order::Backends => services.sort_by_key(|service| service.backends_in_use().0),
        Order::Flows => {
            services.sort_by_key(|service| Reverse(sum(service, |counts| counts.flows)))
        }
        Order::Unserved => {
            services.sort_by_key(|service| Reverse(sum(service, PortCounts::unserved)))
        }
        Order::Age => services.sort_by_key(|service| (service.created.is_none(), service.created)),
    }
}
