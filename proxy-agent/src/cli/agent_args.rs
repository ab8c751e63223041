//! The flags by which a command finds its agent.

use std::path::PathBuf;

use clap::Args;

use crate::control::client::Client;
use crate::settings::RUN_DIR;

/// Which agent is asked.
#[derive(Args, Debug)]
pub(super) struct AgentArgs {
    /// The run directory of the agent to ask.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

impl AgentArgs {
    pub(super) fn client(&self) -> Client {
        Client::new(&self.run_dir)
    }
}
