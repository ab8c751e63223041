//! The threads on which a command waits.

use anyhow::{Context, Result};
use tokio::runtime::Runtime;

/// Runs to its end what waits for others, on threads of its own.
pub(crate) fn wait_for<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = Runtime::new().context("start the runtime")?;
    let result = runtime.block_on(work);
    // Whoever still waits for a name server or a credential plugin is not waited for.
    runtime.shutdown_background();
    result
}
