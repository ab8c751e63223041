//! `kpx cleanup` after a kpx that was killed, and after a kube-proxy.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use expect_test::expect;
use kpx_tests::agent::wait_until;
use kpx_tests::netns::NetNs;

use crate::node::{Node, kpx, namespace};

const DEADLINE: Duration = Duration::from_secs(10);

fn run(ns: &NetNs, program: &str, arguments: &str) -> Result<String> {
    run_words(ns, program, &arguments.split_whitespace().collect::<Vec<_>>())
}

fn run_words(ns: &NetNs, program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments);
    let output = ns.run(|| command.output()).with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn what_a_killed_kpx_left_is_removed() -> Result<()> {
    let mut node = Node::start("killed", "--attach clsact")?;
    // Somebody else's filter beside ours keeps the qdisc.
    let filter = "filter add dev wire ingress prio 7 protocol all bpf da bytecode";
    let words: Vec<_> = filter.split(' ').chain(["1,6 0 0 4294967295,"]).collect();
    run_words(&node.ns, "tc", &words)?;
    node.kill()?;
    ensure!(run(&node.ns, "ip", "link")?.contains("kpx0"), "it left something");
    let mut said = String::new();
    wait_until(DEADLINE, "the kernel has let go of the dead process's lock", || {
        let output = node.kpx(&format!("cleanup --bpf-dir {}", node.ns.bpf_dir().display()))?;
        said = String::from_utf8(output.stdout)?.replace(&node.ns.bpf_dir().display().to_string(), "BPF_DIR");
        Ok(output.status.success())
    })?;
    expect![[r#"
        removed 3 routing rules of preference 75
        removed the devices kpx0 and kpx1, and the routes through them
        removed 37 maps pinned in BPF_DIR/v2
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
    let (links, rules) = (run(&node.ns, "ip", "link")?, run(&node.ns, "ip", "rule")?);
    ensure!(!links.contains("kpx") && !rules.lines().any(|rule| rule.starts_with("75:")), "{links}{rules}");
    ensure!(run(&node.ns, "tc", "qdisc show dev wire")?.contains("clsact"), "it carries another's filter");
    let again = kpx(&node.ns, "cleanup")?;
    ensure!(again.status.success() && again.stdout == b"nothing to remove\n", "{again:?}");
    Ok(())
}

#[test]
fn what_kube_proxy_left_is_found_and_removed() -> Result<()> {
    let ns = namespace("proxy")?;
    for family in ["ip", "ip6"] {
        run(&ns, "nft", &format!("add table {family} kube-proxy"))?;
        run(&ns, "nft", &format!("add chain {family} kube-proxy services"))?;
    }
    run(&ns, "nft", "add table ip other")?;
    ns.ip("link add kube-ipvs0 type bridge")?;
    let found = |ns: &NetNs| -> Result<String> {
        let text = String::from_utf8(kpx(ns, "check --no-headers")?.stdout)?;
        Ok(text.lines().filter(|line| line.contains("kube-")).map(|line| format!("{line}\n")).collect())
    };
    expect![[r#"
        ok     kube-proxy              does not run
        fail   kube-proxy's rules      nftables table ip kube-proxy,nftables table ip6 kube-proxy — kpx cleanup --kube-proxy
        fail   kube-ipvs0              there, of kube-proxy's mode ipvs: it makes every ClusterIP the host's own — kpx cleanup --kube-proxy
    "#]].assert_eq(&found(&ns)?);
    let untouched = kpx(&ns, "cleanup")?;
    ensure!(untouched.stdout == b"nothing to remove\n", "only with --kube-proxy: {untouched:?}");
    let output = kpx(&ns, "cleanup --kube-proxy")?;
    ensure!(output.status.success(), "{output:?}");
    expect![[r#"
        removed the nftables table ip kube-proxy
        removed the nftables table ip6 kube-proxy
        removed the device kube-ipvs0
    "#]]
    .assert_eq(&String::from_utf8(output.stdout)?);
    expect![[r#"
        ok     kube-proxy              does not run
        ok     kube-proxy's rules      none
        ok     kube-ipvs0              not there
    "#]]
    .assert_eq(&found(&ns)?);
    assert_eq!(run(&ns, "nft", "list tables")?, "table ip other\n", "what is not kube-proxy's stays");
    Ok(())
}
