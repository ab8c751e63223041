//! A node with a Service, and the externally visible state of its agents.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::MapInfo;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{SchedClassifier, TcAttachType};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

pub(crate) const NODE: &str = "n1";
const PORT: u16 = 8080;
/// Shorter than TCP's first retransmission, so that a lost packet shows.
const ANSWER: Duration = Duration::from_millis(900);

pub(crate) struct Fixture {
    base: ServedLab,
    web: Service,
}

is_its_lab!(Fixture);

impl Fixture {
    pub(crate) fn start() -> Result<Self> {
        let base = ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b"], PORT)?;
        let web = Service::new("web", 10, &["p1b"], PORT);
        base.put(&web)?;
        Ok(Self { base, web })
    }

    /// Returns the folder of pins of the node's agents.
    pub(crate) fn dir(&self) -> PathBuf {
        self.lab.n1.host.ns.bpf_dir()
    }

    pub(crate) fn dial(&self, family: Family) -> Dial {
        Dial::new(Protocol::Tcp, self.web.frontend(family)).deadline(ANSWER)
    }

    /// Checks that new connections reach their backend.
    pub(crate) fn serves(&self) -> Result<()> {
        for (client, family) in ["p1a", NODE]
            .into_iter()
            .flat_map(|client| Family::ALL.map(|family| (client, family)))
        {
            let answer = self
                .dial(family)
                .exchange(&self.lab.host(client).ns, b"hello");
            answer.with_context(|| format!("{client} by {family}"))?;
        }
        Ok(())
    }

    /// Checks that the devices carry exactly these programs.
    pub(crate) fn carry_only(&self, ids: &[u64]) -> Result<()> {
        for device in ["eth0", "lo", "kpx0"] {
            for found in self.carried(device)? {
                ensure!(
                    ids.contains(&found),
                    "{device} carries program {found}, and {ids:?} run"
                );
            }
        }
        Ok(())
    }

    fn carried(&self, device: &str) -> Result<Vec<u64>> {
        let node = &self.lab.n1.host.ns;
        let mut ids = Vec::new();
        for hook in [TcAttachType::Ingress, TcAttachType::Egress] {
            let (_, programs) = node.run(|| SchedClassifier::query_tcx(device, hook))?;
            ids.extend(programs.iter().map(|program| u64::from(program.id())));
        }
        let text = ["ingress", "egress"].map(|hook| {
            node.exec(Command::new("tc").args(["filter", "show", "dev", device, hook]))
        });
        for line in text.into_iter().collect::<Result<String>>()?.lines() {
            let mut words = line.split(' ').skip_while(|word| *word != "id").skip(1);
            ids.extend(words.next().map(str::parse::<u64>).transpose()?);
        }
        ensure!(!ids.is_empty(), "{device} carries nothing");
        Ok(ids)
    }

    /// Returns all state that a kpx might have changed.
    pub(crate) fn state(&self) -> Result<String> {
        let node = &self.lab.n1.host.ns;
        let mut text = String::new();
        for words in [
            "link show",
            "route show table all",
            "-6 route show table all",
            "rule show",
            "-6 rule show",
        ] {
            text += &node.exec(Command::new("ip").args(["-brief"]).args(words.split(' ')))?;
        }
        text += &node.exec(Command::new("tc").args(["qdisc", "show"]))?;
        for key in [
            "netfilter/nf_conntrack_tcp_timeout_close_wait",
            "netfilter/nf_conntrack_tcp_timeout_established",
            "ipv4/conf/lo/accept_local",
            "ipv4/ip_local_reserved_ports",
        ] {
            text += &format!("{key} {}", node.read(&format!("/proc/sys/net/{key}"))?);
        }
        Ok(text)
    }

    /// Checks that kpx has left nothing, and that the state equals `before`.
    pub(crate) fn is_clean(&self, before: &str) -> Result<()> {
        ensure!(!self.dir().exists(), "{} is left", self.dir().display());
        let after = self.state()?;
        ensure!(after == before, "before\n{before}\nafter\n{after}");
        // The kernel frees links a moment after their pins.
        wait_until(DEADLINE, "no program is left", || {
            let devices = ["eth0", "lo"].into_iter();
            Ok(devices
                .map(|device| self.carried(device))
                .all(|carried| carried.is_err()))
        })
    }
}

/// Returns the ids of the pinned maps, by name.
pub(crate) fn map_ids(dir: &Path) -> Result<BTreeMap<String, u32>> {
    pins(dir, "maps", |path| Ok(MapInfo::from_pin(path)?.id()))
}

/// Returns the ids of the pinned arrays through which programs call the slow path.
pub(crate) fn slow_ids(dir: &Path) -> Result<BTreeMap<String, u32>> {
    pins(dir, "slow", |path| Ok(MapInfo::from_pin(path)?.id()))
}

/// Returns the ids of the pinned links, by the names of their pins.
pub(crate) fn link_ids(dir: &Path) -> Result<BTreeMap<String, u32>> {
    pins(dir, "links", |path| {
        Ok(FdLink::from(PinnedLink::from_pin(path)?).info()?.id())
    })
}

fn pins(
    dir: &Path,
    what: &str,
    id: impl Fn(&Path) -> Result<u32>,
) -> Result<BTreeMap<String, u32>> {
    let dir = dir.join("v2").join(what);
    let entries = std::fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))?;
    let pins = entries.map(|entry| {
        let entry = entry?;
        let id = id(&entry.path()).with_context(|| format!("open {}", entry.path().display()))?;
        Ok((entry.file_name().to_string_lossy().into_owned(), id))
    });
    pins.collect()
}

/// Returns the ids of the programs that an agent has loaded.
pub(crate) fn program_ids(agent: &Agent) -> Result<Vec<u64>> {
    let status = agent.status()?;
    let programs = status["programs"].as_object().context("programs")?;
    programs
        .values()
        .map(|program| program["id"].as_u64().context("an id"))
        .collect()
}
