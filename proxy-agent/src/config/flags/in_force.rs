//! Shows the flags of `kpx run` with the values in force, as `/flagz` does.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde_json::{Value, json};

use super::table::FLAGS;
use super::{Effect, Flag, FlagValues, Kind};
use crate::config::{KpxConfiguration, KubeProxyConfiguration};
use proxy_versions::tree;

impl FlagValues {
    /// Returns the values of all flags: those of their fields, which a file or a default may have
    /// set.
    pub(in crate::config) fn in_force(
        &self,
        kube_proxy: &KubeProxyConfiguration,
        kpx: &KpxConfiguration,
    ) -> BTreeMap<&'static str, Value> {
        let section = kube_proxy.common().section;
        let kube_proxy = json!(kube_proxy);
        let kpx = kpx.without_secrets();
        let value = |flag: &Flag| match flag.effect {
            Effect::KubeProxy(fields) => {
                let of_mode = fields
                    .iter()
                    .find(|field| field.split('.').next() == Some(section));
                of_mode
                    .or(fields.first())
                    .and_then(|field| tree::get(&kube_proxy, field))
                    .cloned()
            }
            Effect::KubeProxyOver(field) => tree::get(&kube_proxy, field).cloned(),
            Effect::Port(field) => tree::get(&kube_proxy, field).map(port),
            Effect::Kpx(field) => tree::get(&kpx, field).cloned(),
            Effect::Command | Effect::Development | Effect::Nothing => {
                self.0.get(flag.name).cloned()
            }
        };
        FLAGS
            .iter()
            .map(|flag| (flag.name, value(flag).unwrap_or_else(|| unset(flag.kind))))
            .collect()
    }
}

fn port(address: &Value) -> Value {
    address
        .as_str()
        .and_then(|address| address.parse().ok())
        .map(|address: SocketAddr| address.port())
        .into()
}

fn unset(kind: Kind) -> Value {
    match kind {
        Kind::Switch | Kind::Version => false.into(),
        Kind::List => json!([]),
        _ => "".into(),
    }
}
