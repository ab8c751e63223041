//! `kpx check` reports the features of this kernel.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::kpx;
use testbed::kernel;
use testbed::netns::NetNs;

/// The first kernel with TCX.
const TCX: (u32, u32) = (6, 6);

/// The first kernel whose socket programs can set the error of a call and recognize kernel workers.
const LEADS_SOCKETS: (u32, u32) = (6, 1);

#[test]
fn this_kernel_fits_kpx() -> Result<()> {
    let ns = NetNs::create(format!("kpx-check-{}", std::process::id()))?;
    let output = kpx(&ns, "check --output json")?;
    let report: Value =
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
    let finding = |what: &str| {
        let findings = report["findings"].as_array().into_iter().flatten();
        findings
            .into_iter()
            .find(|finding| finding["what"] == what)
            .cloned()
            .unwrap_or_default()
    };
    for what in ["capabilities", "programs", "memlock", "kernel"] {
        ensure!(finding(what)["level"] == "ok", "{report:#}");
    }
    // A kernel with socket programs also accepts the programs that choose pods.
    let sockets = finding("sockets")["found"].to_string();
    ensure!(
        kernel::version()? < LEADS_SOCKETS || !sockets.contains("load program"),
        "{sockets}"
    );
    println!("sockets: {sockets}");
    let (level, found) = if kernel::version()? >= TCX {
        ("ok", "by TCX")
    } else {
        ("warn", "by clsact: this kernel has no TCX")
    };
    ensure!(
        finding("attach")["level"] == level && finding("attach")["found"] == found,
        "{report:#}"
    );
    Ok(())
}
