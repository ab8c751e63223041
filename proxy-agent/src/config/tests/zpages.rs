//! Checks what `/statusz` and `/flagz` tell of a configuration.

use serde_json::{Value, json};

use super::{ConfigFile, settings};
use crate::config::flags::table::FLAGS;
use crate::settings::Settings;

fn check(settings: Settings, want: &[(&str, Value)]) {
    let flags = settings.zpages.flags.unwrap();
    assert_eq!(flags.len(), FLAGS.len());
    want.iter()
        .for_each(|(flag, value)| assert_eq!(flags[flag], *value, "{flag}"));
}

#[test]
fn flagz_has_every_flag_with_the_value_in_force() {
    check(
        settings(
            "--nodeport-addresses=primary --cleanup=false --vmodule=a=1 --metrics-port=7 --master=https://me:secret@10.0.0.1:6443",
        ),
        &[
            ("nodeport-addresses", json!(["primary"])),
            ("cleanup", json!(false)),
            ("vmodule", json!(["a=1"])),
            ("metrics-bind-address", json!("127.0.0.1:7")),
            ("metrics-port", json!(7)),
            ("master", json!("https://10.0.0.1:6443")),
            ("healthz-port", json!(10256)),
            ("hostname-override", json!("n1")),
            ("kube-api-qps", json!(5.0)),
            ("masquerade", json!("default")),
            ("bpf-object", json!("")),
        ],
    );
    let fields = "mode: nftables\nnftables: {syncPeriod: 40s, masqueradeAll: true}\nfeatureGates: {A: true}\n";
    let file = ConfigFile::kube_proxy(fields);
    check(
        file.settings("--masquerade-all=false --ui"),
        &[
            ("config", json!(file.path)),
            ("proxy-mode", json!("nftables")),
            ("iptables-sync-period", json!("40s")),
            ("ipvs-sync-period", json!("30s")),
            ("masquerade-all", json!(true)),
            ("feature-gates", json!({"A": true})),
            ("ui", json!(true)),
        ],
    );
}

#[test]
fn gates_and_version_take_pages_away() {
    let told = |line: &str| settings(line).zpages;
    assert_eq!(told("").kubernetes_version.as_deref(), Some("1.37"));
    let old = told("--kubernetes-version=1.35 --feature-gates=ComponentStatusz=true");
    assert_eq!(
        (old.kubernetes_version.as_deref(), old.flags),
        (Some("1.35"), None)
    );
    let off = told("--feature-gates=ComponentStatusz=false");
    assert!(off.kubernetes_version.is_none() && off.flags.is_some());
}
