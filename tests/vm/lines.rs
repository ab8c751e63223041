//! Old kernels' verifiers keep every instruction that the host's kernel keeps.

use std::{env, fs};

use anyhow::{Context, Result, ensure};
use testbed::kept_lines::{Lines, kept_lines};

/// The file in the guest with the lines that the host's kernel has kept.
const OF_HOST: &str = "/lines";

/// `cargo xtask vmtest` runs this on the host to write the file.
#[test]
fn kernel_keeps_the_lines_that_the_host_keeps() -> Result<()> {
    let kept = kept_lines()?;
    if let Ok(file) = env::var("KPX_LINES") {
        return Ok(fs::write(file, serde_json::to_vec(&kept)?)?);
    }
    let of_host = fs::read(OF_HOST).with_context(|| format!("read {OF_HOST}"))?;
    let of_host: Lines = serde_json::from_slice(&of_host)?;
    let count = |line: &String| kept.get(line).copied().unwrap_or(0);
    let removed: Vec<_> = of_host
        .iter()
        .filter(|(line, of_host)| count(line) < **of_host)
        .collect();
    ensure!(
        removed.is_empty(),
        "this kernel has removed lines that the host's keeps: {removed:#?}"
    );
    Ok(())
}
