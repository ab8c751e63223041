//! Plans the kernel modules of a guest: files, dependencies, load order.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The modules that tests use and that Debian's kernels do not have built in. The guest gets a list
/// of missing modules.
pub(super) const WANTED: &[&str] = &[
    // Devices and hooks.
    "veth",
    "bridge",
    "dummy",
    "br_netfilter",
    "8021q",
    "bonding",
    "macvlan",
    "ipvlan",
    "vxlan",
    "wireguard",
    "ip6_tunnel",
    "ipip",
    "sch_ingress",
    "cls_bpf",
    "act_bpf",
    // nftables and conntrack, for nodes and CNI plugins.
    "nf_tables",
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nft_ct",
    "nft_nat",
    "nft_masq",
    "nft_chain_nat",
    "nft_counter",
    "nft_reject",
    "nft_reject_inet",
    // IPVS and SCTP.
    "ip_vs",
    "ip_vs_rr",
    "ip_vs_sh",
    "sctp",
];

/// The additional modules for kube-proxy's rules and its mode ipvs with iptables-nft.
pub(super) const FOR_IPTABLES: &[&str] = &[
    "nft_compat",
    "ipt_REJECT",
    "xt_MASQUERADE",
    "xt_addrtype",
    "xt_comment",
    "xt_conntrack",
    "xt_mark",
    "xt_set",
    "ip_set",
    "ip_set_bitmap_port",
    "ip_set_hash_ip",
    "ip_set_hash_ipport",
    "ip_set_hash_ipportip",
    "ip_set_hash_ipportnet",
];

/// The additional module for mode ipvs only: legacy iptables has no tables here.
pub(super) const FOR_IPVS: &[&str] = &["ip6t_REJECT"];

/// The additional modules for kube-proxy's rules only.
pub(super) const FOR_RULES: &[&str] = &[
    "nft_fib_ipv4",
    "nft_numgen",
    "nft_reject_ipv4",
    "ip_tables",
    "iptable_filter",
    "iptable_mangle",
    "iptable_nat",
    "xt_nat",
    "xt_statistic",
    "xt_tcpudp",
    "nf_flow_table",
    "nf_flow_table_ipv4",
    "nf_flow_table_inet",
    "nft_flow_offload",
];

/// The paths of modules by name; names have `_` in place of `-`.
pub(super) struct Modules(BTreeMap<String, PathBuf>);

/// The modules in load order, and the modules that this kernel does not have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) load: Vec<(String, Vec<u8>)>,
    pub(super) missing: Vec<String>,
}

impl Modules {
    pub(super) fn find(folder: &Path) -> Result<Self> {
        let mut modules = BTreeMap::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in
                fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?
            {
                let path = entry?.path();
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                } else if let Some(name) = path
                    .file_name()
                    .and_then(|name| module_name(name.to_str()?))
                {
                    modules.insert(name, path);
                }
            }
        }
        ensure!(!modules.is_empty(), "no modules below {}", folder.display());
        Ok(Self(modules))
    }

    pub(super) fn plan(&self, wanted: &[&str]) -> Result<Plan> {
        plan(wanted, |name| {
            self.0.get(name).map(|path| read(path)).transpose()
        })
    }
}

/// Returns the name of a file's module: `veth` for `veth.ko`, `br_netfilter` for
/// `br-netfilter.ko.xz`.
fn module_name(file: &str) -> Option<String> {
    let (name, ending) = file.split_once(".ko")?;
    ["", ".xz", ".zst"]
        .contains(&ending)
        .then(|| name.replace('-', "_"))
}

/// Returns the modules and their dependencies, sorted after their dependencies. `read` returns the
/// bytes of a module, if it exists.
fn plan(wanted: &[&str], read: impl Fn(&str) -> Result<Option<Vec<u8>>>) -> Result<Plan> {
    fn visit(
        name: &str,
        read: &impl Fn(&str) -> Result<Option<Vec<u8>>>,
        seen: &mut BTreeSet<String>,
        plan: &mut Plan,
    ) -> Result<()> {
        if !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let Some(module) = read(name)? else {
            plan.missing.push(name.to_owned());
            return Ok(());
        };
        for dependency in dependencies(&module).with_context(|| format!("module {name}"))? {
            visit(&dependency, read, seen, plan)?;
        }
        plan.load.push((name.to_owned(), module));
        Ok(())
    }
    let mut plan = Plan::default();
    let mut seen = BTreeSet::new();
    wanted
        .iter()
        .try_for_each(|name| visit(name, &read, &mut seen, &mut plan))?;
    Ok(plan)
}

/// Parses the dependencies in the section `.modinfo`: `depends=` and comma-separated names, ended
/// by a NUL.
fn dependencies(module: &[u8]) -> Result<Vec<String>> {
    const KEY: &[u8] = b"depends=";
    let starts_string = |at: usize| at == 0 || !module[at - 1].is_ascii_graphic();
    let mut found = module
        .windows(KEY.len())
        .enumerate()
        .filter(|(at, window)| *window == KEY && starts_string(*at));
    let (at, _) = found.next().context("no dependencies field in .modinfo")?;
    let value = module[at + KEY.len()..]
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    let names = std::str::from_utf8(value).context("the dependencies are not UTF-8")?;
    Ok(names
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect())
}

/// Reads a module's bytes, decompressed.
fn read(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return fs::read(path).with_context(|| format!("read {}", path.display())),
    };
    let output = Command::new(tool)
        .arg("-dc")
        .arg(path)
        .stdin(Stdio::null())
        .output();
    let output = output.with_context(|| format!("run {tool}"))?;
    ensure!(
        output.status.success(),
        "{tool} cannot unpack {}",
        path.display()
    );
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_named_after_their_files() {
        assert_eq!(module_name("veth.ko").as_deref(), Some("veth"));
        assert_eq!(
            module_name("crc32c-intel.ko.xz").as_deref(),
            Some("crc32c_intel")
        );
        assert_eq!(module_name("sctp.ko.zst").as_deref(), Some("sctp"));
        assert_eq!(module_name("modules.order"), None);
        assert_eq!(module_name("veth.kom"), None);
    }

    #[test]
    fn modules_load_after_their_dependencies() {
        let modules = BTreeMap::from([
            (
                "nat",
                "\u{7f}ELF\0license=GPL\0xdepends=no\0depends=conntrack,nf-defrag\0name=nat\0",
            ),
            ("conntrack", "depends=nf-defrag\0"),
            ("nf_defrag", "license=GPL\0depends=\0"),
        ]);
        let read = |name: &str| Ok(modules.get(name).map(|text| text.as_bytes().to_vec()));
        let planned = plan(&["nat", "conntrack", "sctp"], read).unwrap();
        let order: Vec<&str> = planned.load.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(order, ["nf_defrag", "conntrack", "nat"]);
        assert_eq!(planned.missing, ["sctp"]);
    }

    #[test]
    fn module_without_dependencies_field_is_refused() {
        let error = plan(&["veth"], |_| Ok(Some(b"no module".to_vec()))).unwrap_err();
        assert!(
            format!("{error:#}").contains("module veth: no dependencies field"),
            "{error:#}"
        );
    }
}
