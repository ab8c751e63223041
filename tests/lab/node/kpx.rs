//! A kpx on a node of its own, and what its maps hold.

use std::collections::BTreeMap;
use std::fs;
use std::hash::Hash;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::Pod;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{Array, HashMap, Map, MapData};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proxy_agent::status::Status;
use proxy_common::addr::Addr;
use proxy_common::device::{Device, Node, OwnAddr};
use tempfile::TempDir;
use testbed::agent::{binary, wait_until};
use testbed::netns::NetNs;

pub(crate) const DEADLINE: Duration = Duration::from_secs(10);

/// A network namespace with eth0 (192.0.2.1/24, fd00::1/64) and default routes.
pub(crate) fn node(name: &str) -> Result<NetNs> {
    let node = NetNs::create(format!("kpx-{}-{name}", std::process::id()))?;
    node.ip("link add eth0 type veth peer name wire
         link set wire up
         link set eth0 up
         addr add 192.0.2.1/24 dev eth0
         addr add fd00::1/64 dev eth0 nodad
         route add default via 192.0.2.254
         route add default via fd00::fe")?;
    Ok(node)
}

/// A kpx with a folder of manifests of its own.
pub(crate) struct Kpx<'a> {
    node: &'a NetNs,
    child: Child,
    dir: TempDir,
}

impl<'a> Kpx<'a> {
    /// Starts it, and waits until it answers.
    pub(crate) fn start(node: &'a NetNs, manifests: &[(&str, &str)], arguments: &str) -> Result<Self> {
        let dir = TempDir::with_prefix("kpx-")?;
        let [manifest_dir, run_dir] = ["manifests", "run"].map(|name| dir.path().join(name));
        fs::create_dir(&manifest_dir)?;
        for (name, manifest) in manifests {
            fs::write(manifest_dir.join(format!("{name}.yaml")), manifest)?;
        }
        let log = fs::File::create(dir.path().join("log"))?;
        let mut command = Command::new(binary()?);
        command.args(["run", "--node-name", "n1", "--manifests"]).arg(manifest_dir);
        command.arg("--run-dir").arg(run_dir).arg("--bpf-dir").arg(node.bpf_dir()).args(arguments.split_whitespace());
        let kpx = Self { node, child: node.spawn(command.stdout(Stdio::null()).stderr(log))?, dir };
        wait_until(DEADLINE, "kpx answers", || Ok(kpx.status().is_ok())).with_context(|| kpx.log())?;
        Ok(kpx)
    }

    /// Starts it, and waits until all is well.
    pub(crate) fn start_healthy(node: &'a NetNs, manifests: &[(&str, &str)], arguments: &str) -> Result<Self> {
        let kpx = Self::start(node, manifests, arguments)?;
        wait_until(DEADLINE, "kpx is healthy", || Ok(kpx.status()?.healthy)).with_context(|| kpx.log())?;
        Ok(kpx)
    }

    /// By a rename, so that kpx never reads half a file.
    pub(crate) fn put(&self, name: &str, manifest: &str) -> Result<()> {
        let manifests = self.dir.path().join("manifests");
        fs::write(manifests.join("new"), manifest)?;
        Ok(fs::rename(manifests.join("new"), manifests.join(format!("{name}.yaml")))?)
    }

    pub(crate) fn delete(&self, name: &str) -> Result<()> {
        Ok(fs::remove_file(self.dir.path().join("manifests").join(format!("{name}.yaml")))?)
    }

    pub(crate) fn status(&self) -> Result<Status> {
        let mut command = Command::new(binary()?);
        command.args(["status", "--output", "json", "--run-dir"]).arg(self.dir.path().join("run"));
        // It fails when kpx is not healthy, and says why all the same.
        let output = self.node.run(|| command.output())?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))
    }

    pub(crate) fn problem(&self, what: &str) -> Result<Option<String>> {
        Ok(self.status()?.problems.into_iter().find(|problem| problem.what == what).map(|problem| problem.why))
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "{status}: {}", self.log());
        Ok(())
    }

    /// As an out-of-memory killer does it.
    pub(crate) fn crash(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits until it ends by itself.
    pub(crate) fn ended(&mut self) -> Result<ExitStatus> {
        let mut ended = None;
        wait_until(DEADLINE, "kpx ends", || {
            ended = self.child.try_wait()?;
            Ok(ended.is_some())
        })?;
        ended.context("kpx has ended")
    }

    /// The node's own addresses; those that take node ports with a `*`.
    pub(crate) fn own_addresses(&self) -> Result<Vec<String>> {
        let shown = |(addr, own): (String, OwnAddr)| if own.takes_node_ports() { addr + "*" } else { addr };
        let v4 = hash::<proxy_common::addr::Addr4, OwnAddr>(self.map("ADDRS4")?)?.into_iter().map(addr);
        let v6 = hash::<proxy_common::addr::Addr6, OwnAddr>(self.map("ADDRS6")?)?.into_iter().map(addr);
        Ok(v4.chain(v6).map(shown).collect())
    }

    /// The networks of the map's two families: `PODS`, `SERVICE_CIDRS`.
    pub(crate) fn nets(&self, map: &str) -> Result<Vec<String>> {
        let v4 = nets::<proxy_common::addr::Addr4>(self.map(&format!("{map}4"))?)?;
        let v6 = nets::<proxy_common::addr::Addr6>(self.map(&format!("{map}6"))?)?;
        Ok([v4, v6].concat())
    }

    /// Whether `NODE` has these flags, each by itself.
    pub(crate) fn flags<const N: usize>(&self, flags: [u32; N]) -> Result<[bool; N]> {
        let map: Array<MapData, Node> = self.map("NODE")?.try_into()?;
        let node = map.get(&0, 0)?;
        Ok(flags.map(|flag| node.has(flag)))
    }

    /// Names of the devices that lead to detected pods.
    pub(crate) fn detected(&self) -> Result<Vec<String>> {
        let devices = hash::<u32, Device>(self.map("DEVICES")?)?;
        let names = self.status()?.devices.into_iter().map(|device| (device.ifindex, device.name));
        let names: BTreeMap<u32, String> = names.collect();
        let detected = devices.iter().filter(|(_, device)| device.is_detected()).map(|(ifindex, _)| names.get(ifindex));
        let mut detected: Vec<String> = detected.flatten().cloned().collect();
        detected.sort();
        Ok(detected)
    }

    fn map(&self, name: &str) -> Result<Map> {
        let id = *self.status()?.maps.get(name).with_context(|| format!("no map {name}"))?;
        Ok(Map::from_map_data(MapData::from_id(id)?)?)
    }
}

impl Drop for Kpx<'_> {
    fn drop(&mut self) {
        // It may have ended already.
        let _ended = self.child.kill().and_then(|()| self.child.wait().map(drop));
        if std::thread::panicking() {
            eprintln!("--- log of kpx:\n{}", self.log());
        }
    }
}

fn addr<A: Addr, V>((addr, value): (A, V)) -> (String, V) {
    (addr.ip().to_string(), value)
}

fn hash<K: Pod + Ord + Hash, V: Pod>(map: Map) -> Result<BTreeMap<K, V>> {
    let map: HashMap<MapData, K, V> = map.try_into()?;
    Ok(map.iter().collect::<Result<_, _>>()?)
}

fn nets<A: Addr + Pod>(map: Map) -> Result<Vec<String>> {
    let map: LpmTrie<MapData, A, u32> = map.try_into()?;
    let rows = map.iter().collect::<Result<Vec<_>, _>>()?;
    // Other bits are of networks that are known for something else.
    let counted = rows.iter().filter(|(_, value)| value & 1 != 0);
    let mut nets: Vec<_> = counted.map(|(key, _)| format!("{}/{}", key.data().ip(), key.prefix_len())).collect();
    nets.sort();
    Ok(nets)
}
