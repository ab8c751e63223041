//! `kpx cleanup` after a killed kpx, and after kube-proxy.

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use expect_test::expect;
use tempfile::TempDir;
use testbed::agent::{DEADLINE, binary, kpx, wait_until};
use testbed::netns::NetNs;

use crate::node::{Node, namespace};

fn run(ns: &NetNs, program: &str, arguments: &str) -> Result<String> {
    run_words(
        ns,
        program,
        &arguments.split_whitespace().collect::<Vec<_>>(),
    )
}

fn run_words(ns: &NetNs, program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments);
    let output = ns
        .run(|| command.output())
        .with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn cleanup_removes_the_remains_of_a_killed_kpx() -> Result<()> {
    let mut node = Node::start("killed", "--attach clsact")?;
    // A foreign filter keeps the qdisc.
    let filter = "filter add dev wire ingress prio 7 protocol all bpf da bytecode";
    let words: Vec<_> = filter.split(' ').chain(["1,6 0 0 4294967295,"]).collect();
    run_words(node.ns(), "tc", &words)?;
    node.kill()?;
    ensure!(
        run(node.ns(), "ip", "link")?.contains("kpx0"),
        "it left something"
    );
    let mut said = String::new();
    wait_until(
        DEADLINE,
        "the kernel has let go of the dead process's lock",
        || {
            let output = node.kpx(&format!(
                "cleanup --bpf-dir {}",
                node.ns().bpf_dir().display()
            ))?;
            said = String::from_utf8(output.stdout)?
                .replace(&node.ns().bpf_dir().display().to_string(), "BPF_DIR");
            Ok(output.status.success())
        },
    )?;
    expect![[r#"
        removed 6 routing rules
        removed the devices kpx0 and kpx1, and the routes through them
        removed the link socket-connect4, pinned in BPF_DIR/v2
        removed the link socket-connect6, pinned in BPF_DIR/v2
        removed the link socket-getpeer4, pinned in BPF_DIR/v2
        removed the link socket-getpeer6, pinned in BPF_DIR/v2
        removed the link socket-sock_ops, pinned in BPF_DIR/v2
        removed 53 maps pinned in BPF_DIR/v2
        removed the filter kpx_lo at lo's egress
        removed the clsact qdisc of lo
        removed the filter kpx_ingress at wire's ingress
        removed the filter kpx_egress at wire's egress
        removed the filter kpx_ingress at eth0's ingress
        removed the filter kpx_egress at eth0's egress
        removed the clsact qdisc of eth0
        removed the value 3600 of sysctl net/netfilter/nf_conntrack_tcp_timeout_close_wait, which is 60 again
        removed the value 86400 of sysctl net/netfilter/nf_conntrack_tcp_timeout_established, which is 432000 again
    "#]]
    .assert_eq(&said);
    let links = run(node.ns(), "ip", "link")?;
    let rules = run(node.ns(), "ip", "rule")?;
    ensure!(
        !links.contains("kpx") && !rules.lines().any(|rule| rule.starts_with("75:")),
        "{links}{rules}"
    );
    ensure!(
        run(node.ns(), "tc", "qdisc show dev wire")?.contains("clsact"),
        "it carries another's filter"
    );
    let again = kpx(node.ns(), "cleanup")?;
    ensure!(
        again.status.success() && again.stdout == b"nothing to remove\n",
        "{again:?}"
    );
    Ok(())
}

#[test]
fn cleanup_removes_the_remains_of_kube_proxy() -> Result<()> {
    let ns = namespace("proxy")?;
    for family in ["ip", "ip6"] {
        run(&ns, "nft", &format!("add table {family} kube-proxy"))?;
        run(
            &ns,
            "nft",
            &format!("add chain {family} kube-proxy services"),
        )?;
    }
    run(&ns, "nft", "add table ip other")?;
    ns.ip("link add kube-ipvs0 type bridge")?;
    let found = |ns: &NetNs| -> Result<String> {
        let text = String::from_utf8(kpx(ns, "check --no-headers")?.stdout)?;
        Ok(text
            .lines()
            .filter(|line| line.contains("kube-"))
            .map(|line| format!("{line}\n"))
            .collect())
    };
    expect![[r#"
        ok     kube-proxy              does not run
        fail   kube-proxy's rules      nftables table ip kube-proxy,nftables table ip6 kube-proxy — 1. start kpx beside kube-proxy (docs/migration.md), 2. wait until kpx status says healthy, 3. kpx cleanup --kube-proxy, soon: until then the node and pods on its network reach no Service that is new
        fail   kube-ipvs0              there, of kube-proxy's mode ipvs: it makes every ClusterIP the host's own — 1. start kpx beside kube-proxy (docs/migration.md), 2. wait until kpx status says healthy, 3. kpx cleanup --kube-proxy, soon: until then the node and pods on its network reach no Service that is new
    "#]].assert_eq(&found(&ns)?);
    let untouched = kpx(&ns, "cleanup")?;
    ensure!(
        untouched.stdout == b"nothing to remove\n",
        "only with --kube-proxy: {untouched:?}"
    );
    let refused = kpx(&ns, "cleanup --kube-proxy")?;
    let said = String::from_utf8(refused.stderr)?;
    ensure!(
        refused.status.code() == Some(1) && refused.stdout.is_empty(),
        "{said}"
    );
    ensure!(
        said.contains("kpx does not serve this node") && said.contains("--force"),
        "{said}"
    );
    ensure!(
        run(&ns, "nft", "list tables")?.contains("kube-proxy"),
        "nothing is removed"
    );
    let output = kpx(&ns, "cleanup --kube-proxy --force")?;
    ensure!(output.status.success(), "{output:?}");
    expect![[r#"
        removed the device kube-ipvs0
        removed the nftables table ip kube-proxy
        removed the nftables table ip6 kube-proxy
    "#]]
    .assert_eq(&String::from_utf8(output.stdout)?);
    expect![[r#"
        ok     kube-proxy              does not run
        ok     kube-proxy's rules      none
        ok     kube-ipvs0              not there
    "#]]
    .assert_eq(&found(&ns)?);
    assert_eq!(
        run(&ns, "nft", "list tables")?,
        "table ip other\n",
        "what is not kube-proxy's stays"
    );
    Ok(())
}

/// The agent is optional: the pinned programs serve without it.
#[test]
fn kube_proxys_rules_go_while_kpxs_programs_serve() -> Result<()> {
    for how in ["tcx", "clsact"] {
        let mut node = Node::start(&format!("serves-{how}"), &format!("--attach {how}"))?;
        run(node.ns(), "nft", "add table ip kube-proxy")?;
        // The cleanup uses another run directory than the agent, as on a node whose agent is in a
        // container.
        let output = kpx(node.ns(), "cleanup --kube-proxy")?;
        ensure!(output.status.success(), "{how}: {output:?}");
        run(node.ns(), "nft", "add table ip kube-proxy")?;
        node.kill()?;
        let output = kpx(node.ns(), "cleanup --kube-proxy")?;
        ensure!(
            output.status.success()
                && output.stdout == b"removed the nftables table ip kube-proxy\n",
            "{output:?}"
        );
        ensure!(
            run(node.ns(), "ip", "link")?.contains("kpx0"),
            "{how}: kpx's own stays"
        );
        let output = node.kpx(&format!(
            "cleanup --bpf-dir {}",
            node.ns().bpf_dir().display()
        ))?;
        ensure!(output.status.success(), "{how}: {output:?}");
        run(node.ns(), "nft", "add table ip kube-proxy")?;
        ensure!(
            !kpx(node.ns(), "cleanup --kube-proxy")?.status.success(),
            "{how}: nothing serves any more"
        );
    }
    Ok(())
}

#[test]
fn cleanup_keeps_sysctls_of_kube_proxy() -> Result<()> {
    let mut node = Node::start("sysctls", "--conntrack-tcp-timeout-established=2h")?;
    run(node.ns(), "nft", "add table ip kube-proxy")?;
    let said = killed_and_cleaned(&mut node, "")?;
    let key = "netfilter/nf_conntrack_tcp_timeout";
    let stays =
        format!("left as it is: sysctl net/{key}_close_wait is 3600, as kube-proxy wants it\n");
    ensure!(said.contains(&stays), "{said}");
    ensure!(
        node.ns()
            .read(&format!("/proc/sys/net/{key}_close_wait"))?
            .trim()
            == "3600"
    );
    // kube-proxy does not set this value.
    ensure!(
        said.contains(&format!(
            "removed the value 7200 of sysctl net/{key}_established"
        )),
        "{said}"
    );
    ensure!(
        node.ns()
            .read(&format!("/proc/sys/net/{key}_established"))?
            .trim()
            == "432000"
    );
    Ok(())
}

/// The cleanup takes the sysctl values from kube-proxy's own configuration.
#[test]
fn cleanup_keeps_sysctls_of_a_running_kube_proxy() -> Result<()> {
    let mut node = Node::start(
        "running",
        "--conntrack-tcp-timeout-established=2h --conntrack-udp-timeout=40s",
    )?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let config = dir.path().join("config.conf");
    let fields = "conntrack: {tcpEstablishedTimeout: 2h}";
    fs::write(
        &config,
        format!(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{fields}\n"
        ),
    )?;
    // A process with kube-proxy's name, which lives until its input ends.
    let program = dir.path().join("kube-proxy");
    fs::write(&program, "#!/bin/sh\nread -r line\n")?;
    fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    let mut command = Command::new(&program);
    command
        .arg("--v=2")
        .arg(format!("--config={}", config.display()))
        .stdin(Stdio::piped());
    let mut kube_proxy = node.ns().spawn(&mut command)?;
    let said = killed_and_cleaned(&mut node, "")?;
    drop(kube_proxy.stdin.take());
    kube_proxy.wait()?;
    for (key, value) in [
        ("tcp_timeout_established", "7200"),
        ("tcp_timeout_close_wait", "3600"),
    ] {
        ensure!(
            said.contains(&format!(
                "left as it is: sysctl net/netfilter/nf_conntrack_{key} is {value}"
            )),
            "{said}"
        );
    }
    ensure!(
        said.contains("removed the value 40 of sysctl net/netfilter/nf_conntrack_udp_timeout,"),
        "{said}"
    );
    Ok(())
}

/// Kills kpx, and returns the output of `kpx cleanup`.
fn killed_and_cleaned(node: &mut Node, flags: &str) -> Result<String> {
    node.kill()?;
    let cleanup = format!(
        "cleanup {flags} --bpf-dir {}",
        node.ns().bpf_dir().display()
    );
    let mut said = String::new();
    wait_until(
        DEADLINE,
        "the kernel has let go of the dead process's lock",
        || {
            let output = node.kpx(&cleanup)?;
            said = String::from_utf8(output.stdout)?;
            Ok(output.status.success())
        },
    )?;
    Ok(said)
}

#[test]
fn a_drain_removes_what_kept_connections_or_names_it() -> Result<()> {
    for has_rules in [true, false] {
        let mut node = Node::start(&format!("keep-{has_rules}"), "")?;
        let nat = "add chain ip kube-proxy nat { type nat hook postrouting priority 100 ; }";
        let install = || -> Result<()> {
            run(node.ns(), "nft", "add table ip kube-proxy")?;
            run(node.ns(), "nft", nat).map(drop)
        };
        install()?;
        let output = node.kpx("cleanup --kube-proxy")?;
        ensure!(
            output.status.success()
                && String::from_utf8(output.stdout)?
                    .contains("made the nftables table ip kpx-keep")
        );
        if has_rules {
            install()?;
        }
        let said = killed_and_cleaned(&mut node, "--drain --timeout 1s")?;
        let keeps = run(node.ns(), "nft", "list tables")?.contains("kpx-keep");
        if has_rules {
            ensure!(
                said.contains("removed the nftables table ip kpx-keep") && !keeps,
                "{said}"
            );
        } else {
            ensure!(
                said.contains("kept the nftables table ip kpx-keep") && keeps,
                "{said}"
            );
        }
    }
    Ok(())
}

/// kpx's image contains no nft or iptables.
#[test]
fn table_that_keeps_connections_needs_no_tool() -> Result<()> {
    let mut node = Node::start("toolless", "")?;
    run(node.ns(), "nft", "add table ip kube-proxy")?;
    run(
        node.ns(),
        "nft",
        "add chain ip kube-proxy nat { type nat hook postrouting priority 100 ; }",
    )?;
    ensure!(node.kpx("cleanup --kube-proxy")?.status.success());
    node.kill()?;
    for (arguments, said) in [
        (
            "--drain --timeout=1s",
            "kept the nftables table ip kpx-keep",
        ),
        ("", "removed the nftables table ip kpx-keep"),
    ] {
        let mut printed = String::new();
        wait_until(
            DEADLINE,
            "the kernel has let go of the dead process's lock",
            || {
                let mut cleanup = Command::new(binary()?);
                cleanup
                    .arg("cleanup")
                    .args(arguments.split_whitespace())
                    .arg("--bpf-dir")
                    .arg(node.ns().bpf_dir())
                    .env("PATH", "");
                let output = node.ns().run(|| cleanup.output())?;
                printed = String::from_utf8(output.stdout)?;
                Ok(output.status.success())
            },
        )?;
        ensure!(printed.contains(said), "cleanup {arguments}: {printed}");
    }
    ensure!(!run(node.ns(), "nft", "list tables")?.contains("kpx-keep"));
    Ok(())
}

/// The operator returns to kpx while nodes still drain to kube-proxy.
#[test]
fn a_kpx_that_starts_while_another_drains_serves_at_once() -> Result<()> {
    let mut node = Node::start("again", "--socket-lb off")?;
    let (mut client, mut server) = node.connect()?;
    node.kill()?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let log = dir.path().join("drain.log");
    let mut drain = None;
    wait_until(
        DEADLINE,
        "a flow is open, and the drain waits for its end",
        || {
            let mut command = Command::new(binary()?);
            command
                .args(["cleanup", "--drain", "--timeout=10m", "--bpf-dir"])
                .arg(node.ns().bpf_dir());
            let drains = || {
                Ok::<_, anyhow::Error>(
                    fs::read_to_string(&log)?.contains("draining: 1 flows are open"),
                )
            };
            // The kernel releases the lock of the dead process first.
            let mut child = node.ns().spawn(command.stderr(fs::File::create(&log)?))?;
            wait_until(DEADLINE, "it drains, or ends", || {
                Ok(drains()? || child.try_wait()?.is_some())
            })?;
            drain = Some(child);
            drains()
        },
    )?;
    let again = node.again()?;
    client.write_all(b"?")?;
    server.read_exact(&mut [0])?;
    let mut drain = drain.context("a drain")?;
    let ended = drain.wait()?;
    let said = fs::read_to_string(&log)?;
    ensure!(
        !ended.success() && said.contains("nothing was removed"),
        "{ended}: {said}"
    );
    ensure!(node.connect().is_ok(), "new connections are served");
    again.stop()
}
