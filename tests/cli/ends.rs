//! The end of commands: exit codes, closed pipes, colours.

use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use testbed::agent::{Agent, DEADLINE, binary, kpx};

use crate::node::{Node, namespace};

#[test]
fn exit_codes_tell_the_outcome() -> Result<()> {
    let ns = namespace("codes")?;
    let cases = [
        ("--version", 0, ""),
        (
            "status --run-dir /nonexistent",
            1,
            "kpx: no kpx answers at /nonexistent/kpx.sock: is `kpx run` running?\n",
        ),
        (
            "services --run-dir /nonexistent",
            1,
            "is `kpx run` running?",
        ),
        ("flows --service web --run-dir /nonexistent", 1, "kpx: "),
        (
            "services --namespace a --all-namespaces",
            2,
            "cannot be used with",
        ),
        ("services --output xml", 2, "invalid value 'xml'"),
        ("status --output name", 2, "invalid value 'name'"),
        ("version", 0, ""),
        (
            "explain no_endpoint",
            2,
            "'[REASON]'\n\n  tip: a similar value exists: 'no_endpoints'",
        ),
        ("statsu", 2, "similar subcommand exists: 'status'"),
        ("completions tcsh", 2, "invalid value 'tcsh'"),
        ("cleanup", 0, ""),
        ("man", 0, ""),
    ];
    for (arguments, code, error) in cases {
        let output = kpx(&ns, arguments)?;
        let reported = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(code) && reported.contains(error),
            "kpx {arguments}: {output:?}"
        );
    }
    Ok(())
}

#[test]
fn log_of_a_start_names_no_modules_and_the_sysctls_of_the_anchor_once() -> Result<()> {
    let log = Node::start("log", "")?.log();
    ensure!(
        !log.contains("proxy_agent")
            && !log.contains("proxy_net")
            && log.contains(" INFO started version="),
        "{log}"
    );
    ensure!(
        log.lines().filter(|line| line.contains("/kpx0/")).count() == 1,
        "{log}"
    );
    Ok(())
}

#[test]
fn a_node_that_forwards_nothing_is_not_fit() -> Result<()> {
    let ns = namespace("unfit")?;
    ns.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "0"))?;
    let output = kpx(&ns, "check --output json")?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let findings = report["findings"].as_array().context("findings")?;
    let of = |what: &str| {
        findings
            .iter()
            .find(|finding| finding["what"] == what)
            .context("a finding")
    };
    ensure!(
        report["fit"] == false && of("ip_forward")?["level"] == "fail",
        "{report:#}"
    );
    ensure!(
        of("ip_forward")?["fix"] == "sysctl -w net.ipv4.ip_forward=1",
        "{report:#}"
    );
    for what in ["programs", "attach", "capabilities", "kube-ipvs0"] {
        ensure!(of(what)?["level"] == "ok", "{report:#}");
    }
    Ok(())
}

#[test]
fn policies_and_rules_that_packets_pass_by_are_found() -> Result<()> {
    // The agent checks at its start and once per sync period.
    let agent =
        Agent::start_alone(namespace("past")?, &[], "--iptables-sync-period 1s")?.healthy()?;
    let found = |what: &str| -> Result<String> {
        let report: serde_json::Value =
            serde_json::from_slice(&kpx(agent.ns(), "check -o json")?.stdout)?;
        let findings = report["findings"].as_array().context("findings")?;
        let finding = findings
            .iter()
            .find(|finding| finding["what"] == what)
            .context("a finding")?;
        Ok(format!("{} {}", finding["level"], finding["found"]))
    };
    ensure!(found("IPsec")?.starts_with("\"ok\"") && found("routing rules")?.starts_with("\"ok\""));
    ensure!(agent.typed_status()?.notices.is_empty());
    agent.ns().ip("rule add pref 9 fwmark 0x80/0x80 lookup 7
         xfrm policy add dst 10.244.2.0/24 dir out tmpl src 192.0.2.1 dst 192.0.2.2 proto esp mode tunnel")?;
    ensure!(found("routing rules")?.ends_with("masqueraded clients: ip -4 rule 9: fwmark 0x80\""));
    let ipsec = "IPsec policies do not hold for the host's packets to Services; this host has 1, first src 0.0.0.0/0 dst 10.244.2.0/24";
    assert_eq!(found("IPsec")?, format!("\"warn\" \"{ipsec}\""));
    agent.wait(DEADLINE, "a notice", |status| {
        status.healthy && status.notices == [ipsec]
    })?;
    agent.ns().ip("xfrm policy flush")?;
    agent.wait(DEADLINE, "no notice", |status| status.notices.is_empty())
}

#[test]
fn a_realtime_kernel_that_may_lack_the_lock_is_refused() -> Result<()> {
    let ns = namespace("realtime")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let script = "printf 6.18.0-kpx >release && printf '#1 SMP PREEMPT_RT' >version
        mount --bind release /proc/sys/kernel/osrelease && mount --bind version /proc/sys/kernel/version
        \"$0\" check; exec timeout 30 \"$0\" run --run-dir run --bpf-dir \"$1\" --manifests .";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", script])
        .arg(binary()?)
        .arg(ns.bpf_dir())
        .current_dir(dir.path());
    let output = ns.run(|| command.output())?;
    let reported = [&output.stdout[..], &output.stderr].concat();
    let reported = String::from_utf8_lossy(&reported);
    ensure!(
        output.status.code() == Some(1) && reported.contains("kpx: this kernel is PREEMPT_RT "),
        "{reported}"
    );
    ensure!(
        reported
            .lines()
            .any(|line| line.starts_with("fail    preemption")),
        "{reported}"
    );
    Ok(())
}

#[test]
fn closed_pipe_is_success() -> Result<()> {
    let mut command = Command::new(binary()?);
    let mut child = command
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    drop(child.stdout.take());
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    Ok(())
}

/// The full screen needs cursor movement in any case, and an empty NO_COLOR counts as unset.
#[test]
fn colours_are_for_terminals_without_no_color() -> Result<()> {
    let node = Node::start("colours", "")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let plugin = dir.path().join("kubectl-kpx");
    symlink(binary()?, &plugin)?;
    let run = |program: &str, line: &str, no_color: &str| -> Result<String> {
        let mut command = Command::new(program);
        match program {
            "script" => command.args(["-qec", line, "/dev/null"]),
            _ => command.args(["-c", line]),
        };
        command
            .env("TERM", "xterm")
            .env("NO_COLOR", no_color)
            .env_remove("CLICOLOR_FORCE")
            .env_remove("RUST_LOG");
        let output = node.ns().run(|| command.output())?;
        let reported = String::from_utf8([output.stdout, output.stderr].concat())?;
        ensure!(!reported.is_empty(), "{program} {line}: nothing");
        Ok(reported)
    };
    let kpx = binary()?.display().to_string();
    let run_dir = node.run_dir().display();
    // The last line of a second agent's log names the cause.
    let lines = [
        "status",
        "backends",
        "check",
        "run --manifests .",
        "statsu",
        "--help",
    ];
    let asking = |words: &str| {
        format!(
            "{kpx} {words}{}",
            if words.starts_with('-') {
                String::new()
            } else {
                format!(" --run-dir {run_dir}")
            }
        )
    };
    let plugin = ["--help", "statsu"].map(|words| format!("{} {words}", plugin.display()));
    for line in lines.map(asking).iter().chain(&plugin) {
        let reported = run("script", line, "")?;
        ensure!(
            reported.contains("\u{1b}["),
            "{line} has no colours on a terminal: {reported:?}"
        );
        for (program, no_color) in [("script", "1"), ("sh", "")] {
            let reported = run(program, line, no_color)?;
            ensure!(
                !reported.contains('\u{1b}'),
                "{program}, NO_COLOR={no_color}: {line}: {reported:?}"
            );
        }
    }
    let top = format!(
        "printf q | script -qec \"stty cols 100 rows 30; {kpx} top --run-dir {run_dir}\" /dev/null"
    );
    let coloured = "38;5;";
    ensure!(run("sh", &top, "")?.contains(coloured) && !run("sh", &top, "1")?.contains(coloured));
    Ok(())
}

#[test]
fn services_are_selected_by_name_and_namespace() -> Result<()> {
    let node = Node::start("select", "")?;
    let names = |arguments: &str| -> Result<Vec<String>> {
        let text = node.text(&format!("services --no-headers {arguments}"))?;
        Ok(text
            .lines()
            .filter_map(|line| line.split_whitespace().nth(1))
            .map(str::to_owned)
            .collect())
    };
    assert_eq!(names("")?, ["kube-dns", "web", "web-old"]);
    assert_eq!(names("-A")?, ["kube-dns", "web", "web-old"]);
    assert_eq!(names("-n shop")?, ["web", "web-old"]);
    assert_eq!(names("web")?, ["web"]);
    assert_eq!(names("shop/web")?, ["web"]);
    assert_eq!(names("-n none")?, [""; 0]);
    for (command, objects) in [
        ("services", "Services"),
        ("backends", "backends"),
        ("flows", "flows"),
        ("events", "Events"),
    ] {
        let output = node.kpx(&format!("{command} -n none"))?;
        ensure!(output.status.success(), "{output:?}");
        let reported = String::from_utf8_lossy(&output.stderr);
        assert_eq!(reported, format!("No {objects} in namespace none\n"));
    }
    let output = node.kpx("services -n kube-system web")?;
    let reported = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{output:?}");
    assert_eq!(
        reported,
        "kpx: kpx serves no Service kube-system/web; did you mean shop/web?\n"
    );
    for arguments in [
        "flows --service wbe",
        "monitor --service svc/wbe",
        "backends wbe",
    ] {
        let output = node.kpx(arguments)?;
        let reported = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            reported, "kpx: kpx serves no Service wbe; did you mean shop/web?\n",
            "{arguments}"
        );
    }
    let refused = kpx(node.ns(), "cleanup")?;
    ensure!(refused.status.code() == Some(1), "kpx runs: {refused:?}");
    Ok(())
}
