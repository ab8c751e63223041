//! What a kube-proxy on this node wants of the kernel, which is not to be changed back under it.

use std::fs;

use crate::cli::check::{KubeProxyRules, kube_proxies};
use crate::config::Configuration;
use crate::conntrack;
use proxy_net::changes::Wanted;

/// What kube-proxy's configuration means where it says nothing.
const DEFAULTS: &str = "{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration}";

/// The parameters of connection tracking that a kube-proxy sets which runs here: by its own configuration if that can be
/// read, else by default, as where only its rules are here. None without a kube-proxy.
pub(crate) fn kube_proxys_sysctls() -> Wanted {
    let running = kube_proxies().unwrap_or_default();
    let has_rules = || KubeProxyRules::find().is_ok_and(|rules| !rules.is_empty());
    if running.is_empty() && !has_rules() {
        return Wanted::default();
    }
    let own = running.into_iter().find_map(configuration);
    let text = own.as_deref().unwrap_or(DEFAULTS);
    let settings = Configuration::parse(text).and_then(|configuration| configuration.settings());
    settings.map(|settings| conntrack::sysctl::wanted(&settings.conntrack)).unwrap_or_default()
}

/// The text of a process's `--config` file, as it sees that.
fn configuration(process: u32) -> Option<String> {
    let line = fs::read_to_string(format!("/proc/{process}/cmdline")).ok()?;
    let mut words = line.split('\0');
    let path = words.find_map(|word| word.trim_start_matches('-').strip_prefix("config"))?;
    let path = path.strip_prefix('=').or_else(|| words.next())?;
    fs::read_to_string(format!("/proc/{process}/root/{path}")).ok()
}
