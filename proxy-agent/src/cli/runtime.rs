//! The runtime of a command.

use anyhow::{Context, Result};
use tokio::runtime::Runtime;

/// Runs a future to its end on a new runtime.
pub(crate) fn wait_for<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = Runtime::new().context("start the runtime")?;
    let result = runtime.block_on(work);
    // A task that waits for a name server or a credential plugin must not delay the exit.
    runtime.shutdown_background();
    result
}
