//! Reads the configuration of this node's kube-proxy: its sysctls, which kpx must not restore, and
//! its excluded IPVS networks.

use std::fs;

use ipnet::IpNet;

use crate::config::Configuration;
use crate::conntrack;
use proxy_check::{KubeProxyRules, kube_proxies};
use proxy_net::changes::Wanted;

/// A configuration of kube-proxy with all defaults.
const DEFAULTS: &str =
    "{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration}";

/// Returns the conntrack sysctls that this node's kube-proxy sets; empty if there is no kube-proxy.
/// If its configuration is unreadable or only rules are left, returns kube-proxy's defaults.
pub(crate) fn kube_proxys_sysctls() -> Wanted {
    let running = kube_proxies().unwrap_or_default();
    let has_rules = || KubeProxyRules::find().is_ok_and(|rules| !rules.is_empty());
    if running.is_empty() && !has_rules() {
        return Wanted::default();
    }
    let own = running.into_iter().find_map(configuration);
    let text = own.as_deref().unwrap_or(DEFAULTS);
    let settings = Configuration::parse(text).and_then(|configuration| configuration.settings());
    settings
        .map(|settings| conntrack::sysctl::wanted(&settings.conntrack))
        .unwrap_or_default()
}

/// Returns the networks that this node's kube-proxy excludes from IPVS.
pub(crate) fn kube_proxys_excluded() -> Vec<IpNet> {
    let own = kube_proxies()
        .unwrap_or_default()
        .into_iter()
        .find_map(configuration);
    let settings = own.and_then(|text| {
        Configuration::parse(&text)
            .and_then(|read| read.settings())
            .ok()
    });
    settings
        .map(|settings| settings.ipvs_excluded)
        .unwrap_or_default()
}

/// Reads the `--config` file of a process, in the process's root directory.
fn configuration(process: u32) -> Option<String> {
    let line = fs::read_to_string(format!("/proc/{process}/cmdline")).ok()?;
    let path = config_path(&line)?;
    fs::read_to_string(format!("/proc/{process}/root/{path}")).ok()
}

/// Returns the value of `--config` in a line of `/proc/PID/cmdline`. Some other flags begin with
/// `--config`.
fn config_path(line: &str) -> Option<&str> {
    let mut words = line.split('\0');
    let value = words.find_map(|word| {
        let flag = word.strip_prefix('-')?;
        match flag.trim_start_matches('-').strip_prefix("config")? {
            "" => Some(None),
            rest => rest.strip_prefix('=').map(Some),
        }
    })?;
    value.or_else(|| words.next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_begin_alike_are_not_the_file() {
        for (line, path) in [
            ("kube-proxy\0--config=/c.conf\0", Some("/c.conf")),
            ("kube-proxy\0-config\0/c.conf\0", Some("/c.conf")),
            (
                "kube-proxy\0--config-sync-period=15m\0--config=/c.conf\0",
                Some("/c.conf"),
            ),
            ("kube-proxy\0--config-sync-period\x0015m\0", None),
            ("kube-proxy\0", None),
        ] {
            assert_eq!(config_path(line), path, "{line:?}");
        }
    }
}
