//! The version of this kpx. The metric differs from `kubernetes_build_info`, because alerts on that
//! metric fire for mixed Kubernetes versions, and kpx has no Kubernetes version.

use std::env::consts::ARCH;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KpxBuild {
    version: &'static str,
    arch: &'static str,
}

pub(super) fn register(registry: &mut Registry) {
    let family = Family::<KpxBuild, Gauge>::default();
    family
        .get_or_create(&KpxBuild {
            version: VERSION,
            arch: ARCH,
        })
        .set(1);
    registry.register(
        "kpx_build_info",
        "Always 1: the version is in the labels",
        family,
    );
}
