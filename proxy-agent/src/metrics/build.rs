//! Which kpx this is.

use std::env::consts::{ARCH, OS};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The labels that Kubernetes' own programs have; empty where there is nothing to say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KubernetesBuild {
    major: &'static str,
    minor: &'static str,
    git_version: String,
    git_commit: &'static str,
    git_tree_state: &'static str,
    build_date: &'static str,
    go_version: &'static str,
    compiler: &'static str,
    platform: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KpxBuild {
    version: &'static str,
    arch: &'static str,
}

pub(super) fn register(registry: &mut Registry) {
    let kubernetes = KubernetesBuild {
        major: env!("CARGO_PKG_VERSION_MAJOR"),
        minor: env!("CARGO_PKG_VERSION_MINOR"),
        git_version: format!("v{VERSION}"),
        compiler: "rustc",
        platform: format!("{OS}/{}", go_arch()),
        ..KubernetesBuild::default()
    };
    let family = Family::<KubernetesBuild, Gauge>::default();
    family.get_or_create(&kubernetes).set(1);
    registry.register("kubernetes_build_info", "Always 1: the version in the labels is kpx's", family);

    let family = Family::<KpxBuild, Gauge>::default();
    family.get_or_create(&KpxBuild { version: VERSION, arch: ARCH }).set(1);
    registry.register("kpx_build_info", "Always 1: the version is in the labels", family);
}

fn go_arch() -> &'static str {
    match ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
