use clap::Parser;
use proxy_check::{RunFlags, Setting};

use super::{ConfigFile, settings};
use crate::config::CheckFlags;

#[derive(Parser)]
struct Check {
    #[command(flatten)]
    flags: CheckFlags,
}

fn setting(line: &str) -> anyhow::Result<Setting> {
    Check::try_parse_from(["kpx"].into_iter().chain(line.split_whitespace()))?
        .flags
        .setting()
}

#[test]
fn check_goes_by_the_settings_of_the_run() {
    let file = ConfigFile::new(
        &include_str!("../../../../deploy/systemd/host.yaml")
            .replace("#tunnel: off", "tunnel: tcp")
            .replace(
                "#clusterDomain: cluster.local",
                "clusterDomain: corp.example",
            ),
    );
    let by_file = format!(
        "--config={} --context two --service-cidr 10.0.0.0/16",
        file.path.display()
    );
    for line in [
        "",
        "--kubeconfig /k --context two",
        "--mode host --tunnel tcp --kubeconfig /k --master https://192.0.2.1:6443 --dns-address 127.0.0.9:53 --service-cidr fd00::/108",
        "--mode host --dns-address none",
        &by_file,
    ] {
        let check = setting(line).unwrap();
        let run = settings(&format!("--socket-lb off {line}"));
        assert_eq!((check.mode, check.source), (run.mode, run.source), "{line}");
        assert_eq!(
            check.names,
            run.names.as_ref().map(|names| names.address),
            "{line}"
        );
        assert!(
            run.names
                .is_none_or(|names| names.zone.to_string() == check.cluster_domain),
            "{line}"
        );
        assert_eq!(
            (check.has_tunnel, check.service_cidrs),
            (run.tunnel.is_some(), run.node.service_cidrs),
            "{line}"
        );
    }
}

#[test]
fn check_refuses_what_the_run_refuses() {
    let error = setting("--tunnel tcp").unwrap_err().to_string();
    assert!(
        error.contains("(--tunnel)") && error.contains("is for host mode"),
        "{error}"
    );
}
