//! `kpx sysdump` on a node.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use testbed::agent::kpx;

use crate::node::{Node, namespace};

/// Unpacks an archive into its folder, and returns a reader of its parts.
fn unpacked(archive: &Path) -> Result<impl Fn(&str) -> Result<String> + use<>> {
    let folder = archive.with_extension("d");
    fs::create_dir(&folder)?;
    let tar = Command::new("tar")
        .arg("-xzf")
        .arg(archive)
        .arg("-C")
        .arg(&folder)
        .status()?;
    ensure!(tar.success(), "tar: {tar}");
    Ok(move |part: &str| {
        fs::read_to_string(folder.join(part)).with_context(|| format!("read {part}"))
    })
}

#[test]
fn sysdump_gathers_what_the_node_shows() -> Result<()> {
    let node = Node::start("dump", "--socket-lb off")?;
    let _connection = node.connect()?;
    let home = TempDir::new()?;
    let archive = home.path().join("dump.tgz");
    node.text(&format!("sysdump --flows --output {}", archive.display()))?;
    let mode = fs::metadata(&archive)?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "others may read the archive: {mode:o}");
    let read = unpacked(&archive)?;
    let holds = [
        ("CONTENTS", "kpx status -o wide"),
        ("status.txt", "MAP"),
        ("check.txt", "LEVEL"),
        ("services.json", "kube-dns"),
        ("backends.txt", "10.244."),
        ("metrics.txt", "kpx_map_entries"),
        ("config.json", "KpxConfiguration"),
        ("kernel.txt", "Linux version"),
        ("links.txt", "kpx0"),
        ("rules4.txt", "lookup"),
        ("flows.jsonl", "192.0.2.1:"),
        ("flow-counts.json", "TCP established"),
    ];
    for (part, text) in holds {
        let content = read(part)?;
        ensure!(content.contains(text), "no {text} in {part}:\n{content}");
    }
    Ok(())
}

/// Sysdumps are most needed on a node whose agent has died.
#[test]
fn sysdump_without_agent_names_what_is_missing() -> Result<()> {
    let ns = namespace("dead")?;
    let home = TempDir::new()?;
    let archive = home.path().join("dump.tgz");
    let run_dir = home.path().join("run");
    let output = kpx(
        &ns,
        &format!(
            "sysdump --output {} --run-dir {}",
            archive.display(),
            run_dir.display()
        ),
    )?;
    ensure!(output.status.success(), "{output:?}");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        words.contains("kpx.sock: is `kpx run` running?\nit lacks status.txt, status.json"),
        "{words}"
    );
    let read = unpacked(&archive)?;
    let contents = read("CONTENTS")?;
    let line = contents
        .lines()
        .find(|line| line.starts_with("status.json "))
        .context("a line of status.json")?;
    ensure!(
        line.contains(" missing ") && line.contains("no kpx answers at"),
        "{line}"
    );
    ensure!(read("kernel.txt")?.contains("Linux version") && read("check.txt")?.contains("LEVEL"));
    Ok(())
}
