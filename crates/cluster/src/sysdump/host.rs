//! The parts of a node: output of kpx, the kernel and installed tools.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, ensure};
use flate2::read::GzDecoder;
use proxy_net::netfilter::Netfilter;
use proxy_view::FlowView;
use proxy_view::client::Client;
use tokio::process::Command;
use tokio::time::timeout;

use super::archive::Archive;

/// Time limit for a part.
const PART: Duration = Duration::from_secs(30);
/// The maximum number of listed flows.
const FLOWS: usize = 1_000_000;

/// kpx's own commands: the file, and the command without `--run-dir`.
const COMMANDS: [(&str, &str); 10] = [
    ("status.txt", "status -o wide"),
    ("status.json", "status -o json"),
    ("check.txt", "check"),
    ("check.json", "check -o json"),
    ("services.json", "services -o json"),
    ("backends.json", "backends -o json"),
    ("backends.txt", "backends"),
    ("devices.txt", "devices"),
    ("events.txt", "events -o wide"),
    ("events.json", "events -o json"),
];

/// The parts that come from the agent's socket.
const PATHS: [(&str, &str); 2] = [("metrics.txt", "/metrics"), ("config.json", "/configz")];

/// The output of installed tools. kpx's image has none of them; the node usually has.
const TOOLS: [(&str, &str); 12] = [
    ("nft.txt", "nft list ruleset"),
    ("iptables.txt", "iptables-save"),
    ("ip6tables.txt", "ip6tables-save"),
    ("iptables-legacy.txt", "iptables-legacy-save"),
    ("ip6tables-legacy.txt", "ip6tables-legacy-save"),
    ("links.txt", "ip -details -statistics link"),
    ("addresses.txt", "ip address"),
    ("rules4.txt", "ip rule"),
    ("rules6.txt", "ip -6 rule"),
    ("routes4.txt", "ip route show table all"),
    ("routes6.txt", "ip -6 route show table all"),
    ("filters.txt", "tc -statistics filter show dev kpx0 egress"),
];

/// The kernel's version. The kernel's command line is omitted, because it may contain credentials.
const KERNEL: [&str; 2] = ["/proc/version", "/proc/sys/kernel/osrelease"];

/// The prefixes of the kernel's configuration options that matter to kpx.
const CONFIG: [&str; 12] = [
    "CONFIG_BPF",
    "CONFIG_CGROUP_BPF",
    "CONFIG_DEBUG_INFO_BTF",
    "CONFIG_IP_MULTIPLE_TABLES",
    "CONFIG_IPV6",
    "CONFIG_NET_CLS_BPF",
    "CONFIG_NET_SCH_INGRESS",
    "CONFIG_NETFILTER",
    "CONFIG_NF_",
    "CONFIG_PREEMPT",
    "CONFIG_VETH",
    "CONFIG_VXLAN",
];

/// Adds all parts. Fails only if the archive cannot be written. Returns the reason if the agent
/// does not answer.
pub(super) async fn gather(
    archive: &mut Archive,
    run_dir: &Path,
    all_flows: bool,
) -> Result<Option<Error>> {
    let kpx = std::env::current_exe().context("find kpx itself");
    let kpx = kpx
        .map(|path| path.display().to_string())
        .unwrap_or_else(|_| "kpx".to_owned());
    archive.add(
        "version.txt",
        "kpx --version",
        run(&kpx, &["--version"]).await,
    )?;
    let run_dir_flag = format!("--run-dir={}", run_dir.display());
    for (name, command) in COMMANDS {
        let mut arguments: Vec<_> = command.split(' ').collect();
        // `kpx check` describes the host, independent of the agent.
        if !command.starts_with("check") {
            arguments.push(&run_dir_flag);
        }
        archive.add(name, &format!("kpx {command}"), run(&kpx, &arguments).await)?;
    }
    let client = Client::new(run_dir);
    let no_agent = client.status().await.err();
    for (name, path) in PATHS {
        let text = client.text(path).await.map(|text| text.to_vec());
        archive.add(name, &format!("GET {path} of the agent's socket"), text)?;
    }
    let flows = flows(&client, all_flows).await;
    let (counts, listed) = match flows {
        Ok((counts, listed)) => (
            serde_json::to_vec_pretty(&counts).context("write the counts"),
            Ok(listed),
        ),
        Err(error) => (Err(anyhow!("{error:#}")), Err(error)),
    };
    archive.add(
        "flow-counts.json",
        "kpx flows --limit 0 -o json, counted by Service, protocol and state",
        counts,
    )?;
    if all_flows {
        archive.add(
            "flows.jsonl",
            &format!("kpx flows --limit {FLOWS} -o json, a line for each"),
            listed,
        )?;
    }
    archive.add("kernel.txt", &KERNEL.join(", "), kernel())?;
    archive.add(
        "kernel-config.txt",
        "/proc/config.gz or /boot/config-RELEASE, the lines that matter to kpx",
        config(),
    )?;
    let rules = Netfilter::read()
        .await
        .map(|rules| rules.listing().into_bytes());
    archive.add(
        "netfilter.txt",
        "the rules of netfilter by netlink, as far as kpx reads them",
        rules,
    )?;
    for (name, command) in TOOLS {
        let words: Vec<_> = command.split(' ').collect();
        archive.add(name, command, run(words[0], &words[1..]).await)?;
    }
    Ok(no_agent)
}

/// Returns the output of a program. A failing exit status is not an error: `kpx status` fails on an
/// unhealthy node.
async fn run(program: &str, arguments: &[&str]) -> Result<Vec<u8>> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .env_remove("RUST_LOG")
        .env("NO_COLOR", "1")
        .kill_on_drop(true);
    let output = timeout(PART, command.output())
        .await
        .map_err(|_| anyhow!("did not end within {PART:?}"))?;
    let output = output.with_context(|| format!("start {program}"))?;
    let mut text = output.stdout;
    ensure!(
        output.status.success() || !text.is_empty(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    // JSON must stay parseable; standard error follows only text.
    if !arguments.contains(&"json") {
        text.extend(output.stderr);
    }
    Ok(text)
}

/// Counts the flows by Service, protocol and state, and lists them if `list`.
async fn flows(client: &Client, list: bool) -> Result<(BTreeMap<String, u64>, Vec<u8>)> {
    let mut counts = BTreeMap::new();
    let mut listed = Vec::new();
    let mut number = 0;
    let mut lines = client.lines("/flows").await?;
    while let Some(line) = lines.next().await? {
        let flow: FlowView = serde_json::from_slice(&line).context("read a flow")?;
        let service = flow
            .service
            .map(|service| format!("{}/{}", service.namespace, service.name));
        let service = service.as_deref().unwrap_or("no Service");
        *counts
            .entry(format!("{service} {} {}", flow.protocol, flow.state))
            .or_default() += 1;
        number += 1;
        if list && number <= FLOWS {
            listed.extend_from_slice(&line);
            listed.push(b'\n');
        }
    }
    Ok((counts, listed))
}

fn kernel() -> Result<Vec<u8>> {
    let mut text = String::new();
    for path in KERNEL {
        let content = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        text += &format!("{path}: {content}");
    }
    Ok(text.into_bytes())
}

fn config() -> Result<Vec<u8>> {
    let mut text = String::new();
    let unpacked = std::fs::File::open("/proc/config.gz")
        .and_then(|file| GzDecoder::new(file).read_to_string(&mut text));
    if unpacked.is_err() {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")
            .context("read the kernel's release")?;
        let path = format!("/boot/config-{}", release.trim());
        text = std::fs::read_to_string(&path)
            .with_context(|| format!("read /proc/config.gz, and then {path}"))?;
    }
    Ok(matter(&text).into_bytes())
}

/// Returns the lines that matter to kpx, including `is not set` lines.
fn matter(config: &str) -> String {
    let matters = |line: &&str| {
        CONFIG
            .iter()
            .any(|option| line.trim_start_matches("# ").starts_with(option))
    };
    config
        .lines()
        .filter(matters)
        .map(|line| format!("{line}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_matter_are_kept_set_or_not() {
        let config = "CONFIG_BPF=y\nCONFIG_SOUND=m\n# CONFIG_PREEMPT_RT is not set\n# a comment\nCONFIG_NF_TABLES=m\n";
        assert_eq!(
            matter(config),
            "CONFIG_BPF=y\n# CONFIG_PREEMPT_RT is not set\nCONFIG_NF_TABLES=m\n"
        );
    }
}
