//! kpx accepts kube-proxy's command line and configuration file.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use proxy_view::status::Status;
use serde_json::Value;
use tempfile::TempDir;
use testbed::agent::{Agent, DEADLINE, binary, wait_until};
use testbed::netns::NetNs;

/// The log line about the future default of a file without a mode.
const DEFAULT_MODE: &str = "default changes to nftables in Kubernetes 1.40: set one";

#[test]
fn kube_proxys_file_rules_a_renamed_kpx_until_it_changes() -> Result<()> {
    let fixture = Fixture::new("rules")?;
    fixture
        .write_config("mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}\noomScoreAdj: 321\nnodePortAddresses: [10.0.0.0/8]\niptables: {masqueradeAll: true, new: 1}")?;
    fixture.put_service("web", "10.96.0.10")?;
    let mut agent = fixture.start(
        "--hostname-override=Node-7 --cluster-cidr=10.0.0.0/8 --ipvs-scheduler=rr --enable-dsr --v=2 --cleanup-on-exit",
    )?;
    wait(&agent, |status| status.healthy)?;
    let status = agent.typed_status()?;
    ensure!(
        status.node_name == "node-7" && status.options.masquerade == "compat",
        "{status:?}"
    );
    ensure!(
        status.options.masquerade_all && status.options.node_port_addresses == "10.0.0.0/8",
        "{status:?}"
    );
    ensure!(
        status.options.local_pods == "none",
        "the file overrules --cluster-cidr: {status:?}"
    );
    let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", agent.pid()))?;
    ensure!(score.trim() == "321", "{score}");

    let config = fixture.config().display().to_string();
    let doubtful = format!("KubeProxyConfiguration.iptables.new ({config}:7): unknown field");
    ensure!(
        logged(&agent, "fields").as_deref() == Some(&doubtful),
        "{}",
        agent.log()
    );
    ensure!(
        agent.log().contains("cluster-cidr") && agent.log().contains("ipvs-scheduler"),
        "{}",
        agent.log()
    );
    ensure!(!agent.log().contains(DEFAULT_MODE), "{}", agent.log());
    // KEP-5495, KEP-5100.
    ensure!(
        agent.log().contains("KubeProxyIPVS is off") && agent.log().contains("enable-dsr"),
        "{}",
        agent.log()
    );
    ensure!(
        logged(&agent, "from").as_deref() == Some(&config),
        "{}",
        agent.log()
    );
    ensure!(
        logged(&agent, "masquerade").as_deref() == Some("compat"),
        "{}",
        agent.log()
    );

    // The kubelet mounts the ConfigMap again with the same content.
    fixture.replace_config(|text| text.to_owned())?;
    fixture.put_service("more", "10.96.0.11")?;
    wait(&agent, |status| status.tables["IPv4"].services == 2)?;
    fixture.replace_config(|text| text.replace("321", "322"))?;
    let code = agent.ended(DEADLINE)?.code().context("an exit code")?;
    ensure!(
        code == 1 && agent.log().contains(&format!("{config} has changed")),
        "{code}: {}",
        agent.log()
    );
    let links = fixture
        .node
        .exec(Command::new("ip").args(["-brief", "link"]))?;
    ensure!(
        !links.contains("kpx"),
        "it takes everything off the node: {links}"
    );
    Ok(())
}

#[test]
fn changes_wait_for_the_least_period() -> Result<()> {
    let fixture = Fixture::new("period")?;
    fixture.write_config("iptables: {minSyncPeriod: 2s}")?;
    fixture.put_service("web", "10.96.0.10")?;
    let agent = fixture.start("")?;
    wait(&agent, |status| status.tables["IPv4"].services == 1)?;
    // KEP-5343: the file has no mode.
    ensure!(agent.log().contains(DEFAULT_MODE), "{}", agent.log());
    let first = agent.typed_status()?.last_sync.context("a sync")?;
    fixture.put_service("more", "10.96.0.11")?;
    wait(&agent, |status| status.tables["IPv4"].services == 2)?;
    let apart = agent
        .typed_status()?
        .last_sync
        .context("a sync")?
        .duration_since(first);
    // The interval runs from the start of a pass, the log line from its end; the first pass is the
    // longest.
    ensure!(apart.as_millis() >= 1_500, "{apart:?}");
    Ok(())
}

#[test]
fn invalid_configuration_ends_kpx_at_once() -> Result<()> {
    let fixture = Fixture::new("refused")?;
    fixture.write_config("mode: userspace\noomScoreAdj: 2000")?;
    let output = fixture.run("")?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1), "{}", output.status);
    for field in [
        "KubeProxyConfiguration.mode: Invalid value: \"userspace\"",
        "oomScoreAdj: Invalid value: 2000",
    ] {
        ensure!(error.contains(field), "{error}");
    }
    let output = fixture.run("--proxymode=iptables")?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(
        output.status.code() == Some(2) && error.contains("'--proxy-mode'"),
        "{error}"
    );
    Ok(())
}

#[test]
fn kpx_reads_the_configuration_it_writes() -> Result<()> {
    let fixture = Fixture::new("writes")?;
    fixture.write_config("mode: nftables")?;
    let [first, second] = ["first", "second"].map(|name| fixture.dir.path().join(name));
    let output = fixture.run(&format!("--write-config-to={} -v=3", first.display()))?;
    ensure!(
        output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(),
        "{output:?}"
    );
    let line = format!(
        "run --config {} --write-config-to {}",
        first.display(),
        second.display()
    );
    let output = Command::new(binary()?).args(line.split(' ')).output()?;
    ensure!(output.status.success(), "{output:?}");
    let written = fs::read_to_string(&first)?;
    ensure!(written == fs::read_to_string(second)?, "{written}");
    ensure!(
        written.contains("nodePortAddresses:\n- primary\n") && written.contains("verbosity: 3\n"),
        "{written}"
    );

    let version = fixture.run("--version")?;
    ensure!(
        version.status.success() && version.stdout.starts_with(b"kpx "),
        "{version:?}"
    );
    Ok(())
}

#[test]
fn cleanup_leaves_nothing() -> Result<()> {
    let fixture = Fixture::new("clean")?;
    fixture.write_config("")?;
    fixture.put_service("web", "10.96.0.10")?;
    let mut agent = fixture.start("")?;
    wait(&agent, |status| status.healthy)?;
    let refused = fixture.run("--cleanup")?;
    ensure!(
        !refused.status.success(),
        "an agent that runs is left alone"
    );
    agent.kill()?;
    let links = || {
        fixture
            .node
            .exec(Command::new("ip").args(["-brief", "link"]))
    };
    ensure!(
        links()?.contains("kpx0"),
        "a killed agent leaves its anchor"
    );
    let cleaned = fixture.run("--cleanup=true")?;
    ensure!(
        cleaned.status.success(),
        "{}",
        String::from_utf8_lossy(&cleaned.stderr)
    );
    ensure!(!links()?.contains("kpx"), "{}", links()?);
    ensure!(!fixture.dir.path().join("run/kpx.sock").exists());
    Ok(())
}

#[test]
fn init_only_does_what_needs_privileges() -> Result<()> {
    let fixture = Fixture::new("init")?;
    fixture.write_config("conntrack: {maxPerCore: 0, tcpCloseWaitTimeout: 30m}")?;
    let key = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait";
    let timeout = || fixture.node.exec(Command::new("cat").arg(key));
    ensure!(timeout()?.trim() != "1800", "it would say nothing");
    let done = fixture.run("--init-only")?;
    ensure!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    ensure!(
        timeout()?.trim() == "1800",
        "{}: {}",
        timeout()?,
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(())
}

/// A node, and the files that a DaemonSet mounts for kube-proxy.
struct Fixture {
    node: NetNs,
    dir: TempDir,
}

impl Fixture {
    fn new(name: &str) -> Result<Self> {
        let node = NetNs::machine_v4(&format!("config-{name}"))?;
        let dir = TempDir::with_prefix("kpx-config-")?;
        fs::create_dir(dir.path().join("manifests"))?;
        fs::create_dir(dir.path().join("config"))?;
        symlink(binary()?, dir.path().join("kube-proxy"))?;
        Ok(Self { node, dir })
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("config/config.conf")
    }

    fn write_config(&self, fields: &str) -> Result<()> {
        let dir = self.dir.path().display();
        let text = format!(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{fields}\nlogging: {{format: json}}\n\
             ---\napiVersion: kpx.dev/v1alpha1\nkind: KpxConfiguration\nmasquerade: compat\n\
             manifests: {dir}/manifests\nrunDir: {dir}/run\nbpfDir: {}\n",
            self.node.bpf_dir().display()
        );
        Ok(fs::write(self.config(), text)?)
    }

    fn replace_config(&self, change: impl FnOnce(&str) -> String) -> Result<()> {
        let new = self.dir.path().join("config/new");
        fs::write(&new, change(&fs::read_to_string(self.config())?))?;
        Ok(fs::rename(new, self.config())?)
    }

    fn put_service(&self, name: &str, cluster_ip: &str) -> Result<()> {
        let object = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
             spec: {{clusterIP: {cluster_ip}, clusterIPs: [{cluster_ip}], ipFamilies: [IPv4], ports: [{{port: 80}}]}}\n"
        );
        let new = self.dir.path().join("new");
        fs::write(&new, object)?;
        Ok(fs::rename(
            new,
            self.dir.path().join(format!("manifests/{name}.yaml")),
        )?)
    }

    /// Returns the command of kube-proxy's manifest.
    fn command(&self, flags: &str) -> Command {
        let mut command = Command::new(self.dir.path().join("kube-proxy"));
        command.arg0("/usr/local/bin/kube-proxy");
        command
            .arg(format!("--config={}", self.config().display()))
            .args(flags.split_whitespace());
        command.env_remove("RUST_LOG");
        command
    }

    fn run(&self, flags: &str) -> Result<Output> {
        self.node
            .run(|| self.command(flags).output())
            .context("run kube-proxy")
    }

    fn start(&self, flags: &str) -> Result<Agent<'_>> {
        let log = self.dir.path().join("log");
        let _old = fs::remove_file(&log);
        Agent::spawn(
            &self.node,
            self.command(flags),
            &self.dir.path().join("run"),
            &log,
        )
    }
}

/// Waits until kpx reports a status for which `holds` returns true.
fn wait(kpx: &Agent, holds: impl Fn(&Status) -> bool) -> Result<()> {
    wait_until(DEADLINE, "the status is as it should be", || {
        Ok(kpx.typed_status().is_ok_and(|status| holds(&status)))
    })
    .with_context(|| kpx.log())
}

/// Returns a field of the first log line that has it. Every line must be JSON.
fn logged(kpx: &Agent, field: &str) -> Option<String> {
    let log = kpx.log();
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter_map(|line| line["fields"][field].as_str().map(str::to_owned))
        .next()
}
