//! Tests of flags in Go's notation.

use std::ffi::OsString;

use super::{load, run_args, settings};
use crate::config::arguments;
use crate::config::logging::filter;
use crate::config::node_ports::{Localhost, NodePortAddresses};
use crate::node::NodeOptions;
use proxy_source::Source;

#[test]
fn flags_are_read_as_go_does() {
    for (line, masquerade_all) in [
        ("", false),
        ("--masquerade-all", true),
        ("--masquerade-all=true", true),
        ("--masquerade-all=T", true),
        ("--masquerade-all=0", false),
        ("--masquerade-all --masquerade-all=false", false),
    ] {
        assert_eq!(settings(line).node.masquerade_all, masquerade_all, "{line}");
    }
    for line in ["-v=4", "-v 4", "-v4", "--v=4", "--v 4", "--v=1 -v=4"] {
        assert_eq!(
            load(line).unwrap().kube_proxy.logging.verbosity,
            4,
            "{line}"
        );
    }
    let gates = load("--feature-gates=A=true,B=false --feature-gates B=true")
        .unwrap()
        .kube_proxy
        .feature_gates;
    assert_eq!(
        gates,
        [("A".to_owned(), true), ("B".to_owned(), true)].into()
    );
    let mut nets = NodePortAddresses::default();
    assert!(nets.add("10.0.0.0/8") && nets.add("0.0.0.0/0"));
    let twice = settings("--nodeport-addresses 10.0.0.0/8 --nodeport-addresses=0.0.0.0/0")
        .node
        .node_ports;
    assert_eq!(twice, nets);
}

#[test]
fn empty_values_count_as_none() {
    let empty =
        "--nodeport-addresses= --cluster-cidr= --pod-bridge-interface= --masquerade-all=false --detect-local-mode=
                 --kubeconfig= --master= --proxy-mode= --bind-address= --masquerade= --run-dir= --hostname-override=n1";
    let settings = settings(empty);
    assert_eq!(
        settings.node,
        NodeOptions {
            localhost: Localhost::Included,
            ..NodeOptions::default()
        }
    );
    assert_eq!(settings, super::settings(""));
}

#[test]
fn node_serves_its_own_sockets_by_default() {
    let served = |line: &str| {
        settings(line)
            .sockets
            .map(|sockets| (sockets.everywhere, sockets.is_optional))
    };
    for (line, want) in [
        ("", Some((false, true))),
        ("--socket-lb=auto", Some((false, true))),
        ("--socket-lb=host", Some((false, false))),
        ("--socket-lb=all", Some((true, false))),
        ("--socket-lb=off", None),
        ("--mode=host", None),
        ("--mode=host --socket-lb=host", Some((false, false))),
    ] {
        assert_eq!(served(line), want, "{line}");
    }
}

#[test]
fn pods_are_chosen_only_where_objects_and_addresses_allow() {
    let chosen = |line: &str| settings(line).sockets.is_some_and(|sockets| sockets.pods);
    for (line, want) in [
        ("", true),
        ("--socket-lb=auto --fast-path=off", true),
        ("--socket-lb=host", false),
        ("--socket-lb=all", false),
        ("--socket-lb=off", false),
        ("--mode=host --kubeconfig=/config", false),
        ("--manifests=/folder", false),
        ("--masquerade=compat", false),
        ("--masquerade-all", false),
    ] {
        assert_eq!(chosen(line), want, "{line}");
        let is_watched =
            matches!(settings(line).source, Source::Kubernetes(options) if options.pods);
        assert_eq!(is_watched, want, "{line}");
    }
}

#[test]
fn unknown_flag_is_refused_with_the_nearest_name() {
    for (line, want) in [
        ("--proxymode=x", "--proxy-mode"),
        ("--clustercidr=x", "--cluster-cidr"),
        (
            "--conntrack-tcp-timeout-etablished=1h",
            "--conntrack-tcp-timeout-established",
        ),
        ("--masquarade=compat", "--masquerade"),
        ("--masquerade-all=maybe", "must be true or false"),
        ("--iptables-sync-period=30", "must be a duration"),
        ("--oom-score-adj=low", "must be an integer"),
        ("--feature-gates=A", "\"A\" is not NAME=true|false"),
        ("--detect-local-mode=clustercidr", "ClusterCIDR"),
        ("--lb-algorithm=maglef", "maglev"),
        ("surplus", "unexpected argument 'surplus'"),
    ] {
        let error = run_args(line).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(want), "{line}: {error}");
    }
}

#[test]
fn name_of_program_chooses_its_command() {
    for (line, want) in [
        (
            "/usr/local/bin/kube-proxy --config=/x --hostname-override=n",
            "kube-proxy run --config=/x --hostname-override=n",
        ),
        ("kube-proxy", "kube-proxy run"),
        ("kube-proxy --help", "kube-proxy run --help"),
        ("kube-proxy status", "kube-proxy status"),
        (
            "/usr/local/bin/kubectl-kpx --context a status",
            "kubectl-kpx cluster --context a status",
        ),
        ("kubectl-kpx", "kubectl-kpx cluster"),
        (
            "kpx --cluster_cidr=a_b --v=2",
            "kpx run --cluster-cidr=a_b --v=2",
        ),
        ("kpx run --proxy_mode ipvs", "kpx run --proxy-mode ipvs"),
        ("kpx", "kpx"),
        ("kpx --version", "kpx --version"),
        ("kpx -h", "kpx -h"),
        ("kpx status --run_dir x", "kpx status --run_dir x"),
    ] {
        let given: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let got: Vec<_> = arguments(given)
            .into_iter()
            .map(|argument| argument.into_string().unwrap())
            .collect();
        assert_eq!(got.join(" ").replace("/usr/local/bin/", ""), want);
    }
}

#[test]
fn every_verbosity_is_a_filter() {
    for verbosity in 0..12 {
        let parsed: Result<tracing_subscriber::EnvFilter, _> = filter(verbosity).parse();
        assert!(parsed.is_ok(), "{verbosity}");
    }
}

#[test]
fn url_with_a_password_is_shown_without() {
    for (master, want) in [
        ("", ""),
        ("https://10.0.0.1:6443", "https://10.0.0.1:6443"),
        (
            "https://me:secret@10.0.0.1:6443/k8s?token=secret",
            "https://10.0.0.1:6443/k8s",
        ),
        ("me:secret@10.0.0.1:6443", "not shown: no URL"),
        ("https://me:secret@ten", "https://ten"),
        ("https://me:secret@[", "not shown: no URL"),
    ] {
        assert_eq!(
            settings(&format!("--master={master}")).configz["kpx.dev"]["master"],
            want,
            "{master}"
        );
    }
}
