//! `kpx events`.

use anyhow::Result;
use clap::Args;

use super::agent_args::AgentArgs;
use proxy_view::EventView;
use proxy_view::list::{WatchArgs, show};
use proxy_view::object_name::ServiceName;
use proxy_view::output::OutputArgs;
use proxy_view::select_args::NamespaceArgs;

/// Show recent events and problems, newest last.
///
/// Shows the Events that the agent sent to the API server. In host mode, and with
/// manifests in place of an API server, it only records them. The agent keeps the last 1,000 until it exits, and counts
/// repetitions.
#[derive(Args, Debug)]
pub(super) struct EventsArgs {
    /// Show only Events of this Service, its EndpointSlices, redirects and health check.
    #[arg(value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<ServiceName>,
    #[command(flatten)]
    within: NamespaceArgs,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn events(args: &EventsArgs) -> Result<()> {
    let client = args.agent.client();
    let service = args
        .service
        .clone()
        .map(|name| name.within(args.within.namespace.as_deref()));
    let read = async |_is_first| {
        let mut events: Vec<EventView> = client.get("/events").await?;
        events.retain(|event| event.is_within(|namespace| args.within.has(namespace)));
        events.retain(|event| {
            service
                .as_ref()
                .is_none_or(|service| event.concerns(service))
        });
        Ok(events)
    };
    let nothing = args.within.nothing("Events");
    show(&client, args.output.kind(), &args.watch, &nothing, read).await
}
