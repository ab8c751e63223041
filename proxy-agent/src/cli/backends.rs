//! `kpx backends`.

use anyhow::Result;
use clap::Args;

use super::agent_args::AgentArgs;
use proxy_view::list::{BackendOrder, BackendRow, WatchArgs, show};
use proxy_view::output::NamedOutputArgs;
use proxy_view::select_args::SelectArgs;

/// List the endpoints of Services and which of them take traffic.
///
/// SETS lists the sets that new flows select a backend from: `cluster` for clients of the whole
/// cluster, `local` under a traffic policy Local. A drained backend has weight 0: it keeps its
/// flows and gets no new flows. STATE is `silent` if the backend does not answer this node, and
/// `ejected` if new connections avoid it for that reason. CONNECT-P50 and CONNECT-P99 are the
/// times within which the backend answered that part of the TCP connections. UDP-ANSWERED counts
/// answered UDP flows among those that were answered, ended without an answer or were refused,
/// since the agent started.
#[derive(Args, Debug)]
pub(super) struct BackendsArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// The column to sort by.
    #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
    sort_by: BackendOrder,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: NamedOutputArgs,
}

pub(super) async fn backends(args: &BackendsArgs) -> Result<()> {
    let client = args.agent.client();
    let read = async |is_first| {
        let services = args.select.read(&client, is_first).await?;
        let mut rows: Vec<_> = services.into_iter().flat_map(BackendRow::of).collect();
        args.sort_by.sort(&mut rows, |row| row);
        Ok(rows)
    };
    let nothing = args.select.nothing("backends");
    show(&client, args.output.kind(), &args.watch, &nothing, read).await
}
