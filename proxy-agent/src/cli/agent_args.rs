//! The flags that select the agent that a command queries.

use std::path::PathBuf;

use clap::Args;

use proxy_view::RUN_DIR;
use proxy_view::client::Client;

#[derive(Args, Debug)]
pub(super) struct AgentArgs {
    /// Run directory of the agent.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

impl AgentArgs {
    pub(super) fn client(&self) -> Client {
        Client::new(&self.run_dir)
    }
}
