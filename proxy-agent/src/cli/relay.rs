//! `kpx relay`: connects its own input and output to the agent's socket. `kubectl kpx ui` runs it
//! in the pods of kpx, and speaks HTTP/2 with the agents through it.

use anyhow::{Context, Result};
use clap::Args;
use tokio::io::{copy, stdin, stdout};

use super::agent_args::AgentArgs;

/// Connect standard input and output to the agent's socket.
#[derive(Args, Debug)]
pub(super) struct RelayArgs {
    #[command(flatten)]
    agent: AgentArgs,
}

/// Copies until either side ends. A client that is gone closes this process's input or output.
pub(super) async fn relay(args: &RelayArgs) -> Result<()> {
    let (mut from_agent, mut to_agent) = args.agent.client().stream().await?.into_split();
    let (mut stdin, mut stdout) = (stdin(), stdout());
    let copied = tokio::select! {
        copied = copy(&mut stdin, &mut to_agent) => copied,
        copied = copy(&mut from_agent, &mut stdout) => copied,
    };
    copied.map(drop).context("relay")
}
