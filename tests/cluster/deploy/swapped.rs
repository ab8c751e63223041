//! kpx in kubeadm's DaemonSet for kube-proxy, whose container lacks the node's BPF file system: the
//! state that stays on the node after its end, and the kpx that takes it over.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use json_patch::Patch;
use k8s_openapi::api::apps::v1::DaemonSet;
use proxy_agent::privileges::NEEDED;
use proxy_common::layout::LAYOUT;
use serde_json::Value;
use tempfile::TempDir;
use testbed::agent::{Agent, DEADLINE, Service, Source, wait_until};
use testbed::echo::{Connection, Dial, Protocol};
use testbed::http::{self, METRICS};
use testbed::lab::Family;
use testbed::pod::{Running, Supplies, swapped};

use crate::deploy::cluster::Cluster;
use crate::deploy::own::{container, overlay};
use crate::deploy::render::deploy_dir;

/// The text of docs/migration.md.
const MIGRATION: &str = include_str!("../../../docs/migration.md");

#[test]
fn a_container_finds_what_the_one_before_has_left() -> Result<()> {
    let fixture = Fixture::start()?;
    let kpx = fixture.kpx(&[])?;
    fixture.is_kept_by(&kpx, "filters")?;
    let mut open = fixture.connections()?;
    let before = fixture.maps(&kpx)?;
    let made = fixture.programs(&kpx)?;
    drop(kpx); // By SIGKILL.
    answer(&mut open).context("without an agent")?;
    fixture.cluster.serves("n1").context("without an agent")?;
    let mut while_dead = fixture.connections()?;

    let kpx = fixture.kpx(&[])?;
    answer(&mut open)
        .and(answer(&mut while_dead))
        .context("with the next agent")?;
    let after = fixture.maps(&kpx)?;
    let now = fixture.programs(&kpx)?;
    let same = |name: &str| before[name] == after[name];
    ensure!(
        same("FLOWS4") && same("FLOWS6") && same("SERVICES4") && same("NODE"),
        "{before}, then {after}"
    );
    ensure!(made != now, "the programs are the next agent's own: {now}");
    kpx.stop()?;
    answer(&mut open).context("after SIGTERM")
}

#[test]
fn a_flow_table_of_another_size_takes_over_the_flows() -> Result<()> {
    let fixture = Fixture::start()?;
    fixture.kpx(&["--flow-table-size=4096"])?.stop()?;
    let mut open = fixture.connections()?;
    for size in ["--flow-table-size=8192", "--flow-table-size=1024"] {
        drop(fixture.kpx(&[size])?);
        answer(&mut open).context(size)?;
    }
    Ok(())
}

/// After the start, all threads have dropped the capabilities that only the start needs.
#[test]
fn a_container_keeps_no_capability_for_which_it_looked_for_maps() -> Result<()> {
    let fixture = Fixture::start()?;
    fixture.kpx(&[])?.stop()?;
    let kpx = fixture.kpx(&[])?;
    let needed = NEEDED
        .iter()
        .fold(0, |mask, need| mask | need.capability.bitmask());
    for thread in fs::read_dir(format!("/proc/{}/task", kpx.pid()))? {
        let text = fs::read_to_string(thread?.path().join("status"))?;
        let mask = text
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .context("CapEff")?;
        ensure!(u64::from_str_radix(mask.trim(), 16)? == needed, "{text}");
    }
    kpx.stop()
}

/// Socket programs end with the container; packets of new sockets are still translated.
#[test]
fn each_container_translates_sockets_again() -> Result<()> {
    let fixture = Fixture::start()?;
    let kpx = fixture.kpx(&["--socket-lb=host"])?;
    fixture.is_kept_by(&kpx, "filters")?;
    let mut open = fixture.connections()?;
    drop(kpx);
    answer(&mut open)
        .and(fixture.cluster.serves("n1"))
        .context("without an agent")?;
    let kpx = fixture.kpx(&["--socket-lb=host"])?;
    answer(&mut open)
        .and(fixture.cluster.serves("n1"))
        .context("with the next agent")?;
    kpx.stop()
}

#[test]
fn kpx_with_cleanup_on_exit_leaves_nothing() -> Result<()> {
    let fixture = Fixture::start()?;
    let kpx = fixture.kpx(&["--cleanup-on-exit"])?;
    fixture.cluster.serves("n1")?;
    kpx.stop()?;
    fixture.cluster.serves_no_more("n1")?;
    fixture.has_no_anchor()
}

/// With `--attach tcx` the links end with the container, so each restart interrupts service.
#[test]
fn container_with_tcx_links_reports_restart_gap() -> Result<()> {
    let fixture = Fixture::start()?;
    let kpx = fixture.kpx(&["--attach=tcx"])?;
    fixture.is_kept_by(&kpx, "nothing")?;
    kpx.stop()?;
    fixture.cluster.serves_no_more("n1")?;
    fixture.has_no_anchor()
}

#[test]
fn the_documented_patch_moves_all_into_the_nodes_file_system() -> Result<()> {
    let fixture = Fixture::start()?;
    fixture.kpx(&[])?.stop()?;
    let mut open = fixture.connections()?;
    let patched = patched(&fixture.set)?;
    let kpx = Running::ready(
        &fixture.cluster.lab,
        &fixture.cluster.lab.n1,
        &patched,
        &fixture.supplies,
    )?;
    fixture.is_kept_by(&kpx, "pins")?;
    answer(&mut open).context("with the node's BPF file system")?;
    ensure!(
        fixture
            .cluster
            .lab
            .n1
            .host
            .ns
            .bpf_dir()
            .join("kpx/v2/maps/FLOWS4")
            .exists(),
        "nothing is pinned there"
    );
    kpx.stop()?;
    // kpx's own DaemonSet takes over from here; it lacks the right to open maps by id.
    let objects = overlay("kubeadm")?;
    let own = objects.daemon_set.context("a DaemonSet")?;
    let kpx = Running::ready(
        &fixture.cluster.lab,
        &fixture.cluster.lab.n1,
        &own,
        &fixture.supplies,
    )?;
    answer(&mut open).context("with kpx's own DaemonSet")?;
    kpx.stop()
}

/// The mount in the container is not kpx's.
#[test]
fn bpf_file_system_of_a_container_alone_is_not_taken_for_the_nodes() -> Result<()> {
    const MOUNT: &str = r#"mount -t bpf -o mode=0700 bpf /sys/fs/bpf && exec "$0" "$@""#;
    let fixture = Fixture::start()?;
    let lab = &fixture.cluster.lab;
    let n1 = &fixture.cluster.lab.n1.host;
    let container = || {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", MOUNT]);
        Agent::launch_by(
            Some(command),
            lab,
            n1,
            Source::Kubeconfig(&fixture.cluster.kubeconfig),
            &[""; 0],
        )?
        .healthy()
    };
    let kpx = container()?;
    ensure!(
        kpx.status()?["keptBy"] == "filters",
        "{}",
        kpx.status()?["keptBy"]
    );
    let mut open = fixture.connections()?;
    kpx.crash()?;
    answer(&mut open).context("without an agent")?;
    let kpx = container()?;
    answer(&mut open).context("with the next agent")?;
    kpx.stop()
}

#[test]
fn a_container_that_does_not_see_another_ones_links_refuses_to_start() -> Result<()> {
    let fixture = Fixture::start()?;
    let own = overlay("kubeadm")?.daemon_set.context("a DaemonSet")?;
    Running::ready(
        &fixture.cluster.lab,
        &fixture.cluster.lab.n1,
        &own,
        &fixture.supplies,
    )?
    .stop()?;
    let mut open = fixture.connections()?;
    let said = fixture.is_refused()?;
    ensure!(
        said.contains("through TCX links, and this container does not see their pins"),
        "{said}"
    );
    answer(&mut open).context("they serve on")
}

#[test]
fn one_of_two_containers_serves() -> Result<()> {
    let fixture = Fixture::start()?;
    let kpx = fixture.kpx(&[])?;
    let mut open = fixture.connections()?;
    let said = fixture.is_refused()?;
    ensure!(
        said.contains("another kpx is running on this host"),
        "{said}"
    );
    answer(&mut open)
        .and(fixture.cluster.serves("n1"))
        .context("the first")?;
    kpx.stop()
}

#[test]
fn filters_of_another_layout_are_refused_with_a_remedy() -> Result<()> {
    let fixture = Fixture::start()?;
    fixture.tc("qdisc add dev eth0 clsact")?;
    fixture.foreign_filter(LAYOUT + 1)?;
    let said = fixture.is_refused()?;
    let theirs = format!("layout {}", LAYOUT + 1);
    ensure!(
        said.contains("eth0 has the filter") && said.contains(&theirs),
        "{said}"
    );
    ensure!(said.contains("kpx cleanup"), "{said}");
    fixture.has_no_anchor()
}

/// A filter at the place of kpx's filters on a device of the node, where only CAP_NET_ADMIN can put
/// it.
#[test]
fn foreign_filter_hands_over_no_maps() -> Result<()> {
    let fixture = Fixture::start()?;
    fixture.tc("qdisc add dev eth0 clsact")?;
    fixture.foreign_filter(LAYOUT)?;
    let kpx = fixture.kpx(&[])?;
    ensure!(
        kpx.log()
            .contains("another program's filter has kpx's priority and handle"),
        "{}",
        kpx.log()
    );
    fixture.cluster.serves("n1")?;
    kpx.stop()
}

/// kubeadm and kubectl apply the first patch, kubectl alone the second.
#[test]
fn kubeadms_patch_makes_what_the_documented_patch_makes() -> Result<()> {
    let (set, _) = swapped()?;
    let mut before = set.clone();
    container(&mut before)?.image = Some("registry.k8s.io/kube-proxy:v1.37.0".to_owned());
    let one = sorted(merged(&before)?)?;
    let other = sorted(patched(&set)?)?;
    ensure!(one == other, "{one:#?}\n\n{other:#?}");
    Ok(())
}

/// Returns the DaemonSet as patched by deploy/kubeadm, by kubectl's rules for strategic merge
/// patches.
fn merged(set: &DaemonSet) -> Result<DaemonSet> {
    let folder = TempDir::new()?;
    let file = folder.path().join("set.json");
    fs::write(&file, serde_json::to_vec(set)?)?;
    let mut kubectl = Command::new("kubectl");
    kubectl
        .args(["patch", "--local", "--output", "json", "--filename"])
        .arg(file);
    kubectl
        .arg("--patch-file")
        .arg(deploy_dir().join("kubeadm/kubeproxydaemonset.yaml"));
    let output = kubectl.output().context("run kubectl")?;
    ensure!(
        output.status.success(),
        "{kubectl:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Sorts lists whose order is irrelevant to the pod.
fn sorted(mut set: DaemonSet) -> Result<DaemonSet> {
    let mounts = container(&mut set)?
        .volume_mounts
        .as_mut()
        .context("mounts")?;
    mounts.sort_by(|one, other| one.name.cmp(&other.name));
    let pod = set
        .spec
        .as_mut()
        .and_then(|spec| spec.template.spec.as_mut())
        .context("a pod's spec")?;
    pod.volumes
        .as_mut()
        .context("volumes")?
        .sort_by(|one, other| one.name.cmp(&other.name));
    Ok(set)
}

/// Returns the DaemonSet as patched by docs/migration.md.
fn patched(set: &DaemonSet) -> Result<DaemonSet> {
    let patch = MIGRATION
        .split_once("--type json --patch '")
        .context("a patch")?
        .1;
    let patch: Patch = serde_json::from_str(patch.split_once('\'').context("its end")?.0)?;
    let mut document = serde_json::to_value(set)?;
    json_patch::patch(&mut document, &patch)?;
    Ok(serde_json::from_value(document)?)
}

struct Fixture {
    set: DaemonSet,
    supplies: Supplies,
    web: Service,
    cluster: Cluster,
}

impl Fixture {
    fn start() -> Result<Self> {
        let cluster = Cluster::start()?;
        let (set, config) = swapped()?;
        let supplies = cluster.supplies(&[&config]);
        let web = cluster.web()?;
        Ok(Self {
            set,
            supplies,
            web,
            cluster,
        })
    }

    /// Adds a foreign filter at the place of kpx's, with maps of this layout.
    fn foreign_filter(&self, layout: u32) -> Result<()> {
        let place = format!("ingress prio 19280 handle {layout} protocol all");
        self.tc(&format!(
            "filter add dev eth0 {place} bpf da bytecode 1,6|0|0|4294967295,"
        ))
    }

    fn with(&self, args: &[&str]) -> Result<DaemonSet> {
        let mut set = self.set.clone();
        container(&mut set)?
            .command
            .get_or_insert_default()
            .extend(args.iter().map(|&arg| arg.to_owned()));
        Ok(set)
    }

    fn kpx(&self, args: &[&str]) -> Result<Running<'_>> {
        Running::ready(
            &self.cluster.lab,
            &self.cluster.lab.n1,
            &self.with(args)?,
            &self.supplies,
        )
    }

    /// Returns the log of a kpx that fails to start.
    fn is_refused(&self) -> Result<String> {
        let mut kpx = Running::start(
            &self.cluster.lab,
            &self.cluster.lab.n1,
            &self.set,
            &self.supplies,
        )?;
        let status = kpx.wait()?;
        ensure!(!status.success(), "it started: {}", kpx.log());
        Ok(kpx.log())
    }

    fn is_kept_by(&self, kpx: &Running, what: &str) -> Result<()> {
        let status = kpx.status()?;
        ensure!(status["keptBy"] == what, "{}", status["keptBy"]);
        let metrics = http::ask(&self.cluster.lab.n1.host.ns, METRICS, "GET", "/metrics")?.body;
        let gap = format!("kpx_restart_gap {}", u8::from(what == "nothing"));
        ensure!(
            metrics.lines().any(|line| line == gap),
            "no {gap} in {metrics}"
        );
        Ok(())
    }

    fn maps(&self, kpx: &Running) -> Result<Value> {
        Ok(kpx.status()?["maps"].clone())
    }

    fn programs(&self, kpx: &Running) -> Result<Value> {
        Ok(kpx.status()?["programs"].clone())
    }

    /// Opens connections of a pod and of the node, by both families.
    fn connections(&self) -> Result<Vec<Connection>> {
        let clients = ["p1a", "n1"]
            .into_iter()
            .flat_map(|client| Family::ALL.map(|family| (client, family)));
        let dial = |(client, family)| {
            let dial = Dial::new(Protocol::Tcp, self.web.frontend(family));
            dial.connect(&self.cluster.lab.host(client).ns)
                .with_context(|| format!("{client} by {family}"))
        };
        let mut connections = clients.map(dial).collect::<Result<Vec<_>>>()?;
        answer(&mut connections)?;
        Ok(connections)
    }

    fn tc(&self, words: &str) -> Result<()> {
        let words = words.split(' ').map(|word| word.replace('|', " "));
        self.cluster
            .lab
            .n1
            .host
            .ns
            .exec(Command::new("tc").args(words))
            .map(drop)
    }

    fn has_no_anchor(&self) -> Result<()> {
        wait_until(DEADLINE, "kpx0 is gone", || {
            let links = self
                .cluster
                .lab
                .n1
                .host
                .ns
                .exec(Command::new("ip").args(["-brief", "link"]))?;
            Ok(!links.contains("kpx0"))
        })
    }
}

fn answer(connections: &mut [Connection]) -> Result<()> {
    connections
        .iter_mut()
        .try_for_each(|connection| connection.exchange(b"hello").map(drop).map_err(Into::into))
}
