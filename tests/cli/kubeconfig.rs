//! kpx reports an unusable kubeconfig before it changes the host.

use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use testbed::agent::{Agent, DEADLINE, Source, binary, kpx, wait_until};
use testbed::netns::NetNs;

use crate::node::namespace;

const CONFIG: &str = "
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: https://192.0.2.9:6443}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: USER}]
";

#[test]
fn a_kubeconfig_that_cannot_be_used_is_named_and_nothing_is_touched() -> Result<()> {
    let ns = namespace("kubeconfig")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let file = |name: &str, text: &str| -> Result<String> {
        let path = dir.path().join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    let garbage = file("garbage", "clusters: 7")?;
    let other = file(
        "other",
        &CONFIG
            .replace("current-context: c", "current-context: d")
            .replace("USER", "{}"),
    )?;
    let token = file(
        "token",
        &CONFIG.replace("USER", "{tokenFile: /nofile/token}"),
    )?;
    let certificate = file(
        "ca",
        &CONFIG
            .replace("6443", "6443, certificate-authority: /nofile/ca")
            .replace("USER", "{}"),
    )?;
    let cases: [(&[&str], &[&str]); 8] = [
        (&[], &["found no API server", "/nonexistent/.kube/config"]),
        (
            &["--mode", "host"],
            &[
                "found no API server",
                "; under sudo pass --kubeconfig /usr/sbin/.kube/config",
            ],
        ),
        (
            &["--kubeconfig", "/nofile"],
            &["read /nofile", "No such file"],
        ),
        (&["--kubeconfig", &garbage], &[&garbage]),
        (
            &["--kubeconfig", &other],
            &[&other, "it has no current context \"d\"; its contexts: c"],
        ),
        (&["--kubeconfig", &token], &[&token, "/nofile/token"]),
        (
            &["--kubeconfig", &certificate],
            &[&certificate, "/nofile/ca"],
        ),
        (
            &["--manifests", "/nofolder"],
            &["read folder /nofolder", "No such file"],
        ),
    ];
    wait_until(DEADLINE, "the devices are up", || {
        Ok(!state(&ns)?.contains("LOWERLAYERDOWN"))
    })?;
    let before = state(&ns)?;
    for (args, named) in cases {
        let said = refused(&ns, &dir, args)?;
        for what in named {
            ensure!(said.contains(what), "{args:?}: {what} is not in: {said}");
        }
        ensure!(!said.contains("the source has ended"), "{args:?}: {said}");
        let after = state(&ns)?;
        ensure!(
            after == before && !ns.bpf_dir().exists(),
            "{args:?}: before\n{before}\nafter\n{after}"
        );
    }
    Ok(())
}

/// The fault appears at the first request to the API server.
#[test]
fn a_source_that_fails_later_names_the_reason() -> Result<()> {
    let ns = namespace("plugin")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let user = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: /nofile/plugin, interactiveMode: Never}}";
    let path = dir.path().join("config");
    fs::write(&path, CONFIG.replace("USER", user))?;
    let path = path.display().to_string();
    let said = refused(&ns, &dir, &["--kubeconfig", &path, "--cleanup-on-exit"])?;
    ensure!(
        said.contains("the source: ") && said.contains(&path) && said.contains("No such file"),
        "{said}"
    );
    ensure!(!said.contains("the source has ended"), "{said}");
    Ok(())
}

/// HOME is a user's under sudo; root without CAP_DAC_OVERRIDE cannot write there.
#[test]
fn plugin_with_home_of_another_user_is_named() -> Result<()> {
    let ns = namespace("foreign-home")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let home = dir.path().join("home");
    fs::create_dir(&home)?;
    let user = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: /nofile/plugin, interactiveMode: Never}}";
    let path = dir.path().join("config");
    fs::write(&path, CONFIG.replace("USER", user))?;
    let named = format!(
        "credential plugin /nofile/plugin cannot write to HOME={}, which belongs to another user",
        home.display()
    );
    for (owner, is_named) in [(0, false), (1, true)] {
        chown(&home, Some(owner), None)?;
        let run = format!(
            "run --mode host --node-name n1 --run-dir {} --bpf-dir {}",
            dir.path().join("run").display(),
            ns.bpf_dir().display()
        );
        for arguments in [run.as_str(), "check --mode host"] {
            let mut command = Command::new(binary()?);
            command
                .args(arguments.split(' '))
                .arg("--kubeconfig")
                .arg(&path)
                .env("HOME", &home);
            let output = ns.run(|| command.output())?;
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            ensure!(
                !output.status.success() && said.contains(&named) == is_named,
                "{arguments} with a HOME of {owner}: {said}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_command_for_the_cluster_names_the_server_that_does_not_answer() -> Result<()> {
    let ns = namespace("cluster-refused")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let path = dir.path().join("config");
    fs::write(
        &path,
        CONFIG
            .replace("192.0.2.9:6443", "127.0.0.1:1")
            .replace("USER", "{token: t}"),
    )?;
    let path = path.display().to_string();
    let asked = |args: &[&str], from_env: &str| -> Result<String> {
        let mut command = Command::new(binary()?);
        command
            .args(["cluster", "status"])
            .args(args)
            .env_clear()
            .env("HOME", "/nonexistent")
            .env("KUBECONFIG", from_env);
        let output = ns.run(|| command.output())?;
        ensure!(
            output.status.code() == Some(1) && output.stdout.is_empty(),
            "{args:?}: {output:?}"
        );
        Ok(String::from_utf8(output.stderr)?)
    };
    let server = format!("API server https://127.0.0.1:1/ (context \"c\" of {path})");
    for said in [
        asked(&["--kubeconfig", &path], "")?,
        asked(&["--context", "c"], &path)?,
    ] {
        for what in [
            "list the pods of namespace kube-system",
            &server,
            "Connection refused",
        ] {
            ensure!(said.contains(what), "{what} is not in: {said}");
        }
    }
    let said = asked(&["--context", "prod"], &path)?;
    ensure!(
        said.contains(&format!(
            "use {path}: it has no context \"prod\"; its contexts: c"
        )),
        "{said}"
    );
    let said = asked(&[], "")?;
    ensure!(said.contains("/nonexistent/.kube/config"), "{said}");
    Ok(())
}

#[test]
fn check_reports_unusable_kubeconfig() -> Result<()> {
    let ns = namespace("check-kubeconfig")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let path = dir.path().join("config");
    fs::write(&path, CONFIG.replace("USER", "{token: t}"))?;
    let path = path.display().to_string();
    let in_host = ["--mode", "host"];
    let to_nowhere = ["--context", "b"];
    let dns = ["--dns-address", "127.0.0.1:1053"];
    let _taken = ns.run(|| std::net::UdpSocket::bind(dns[1]))?;
    type Words<'a> = &'a [&'a str];
    let cases: [(&str, &[Words<'_>], &str, Words<'_>); 6] = [
        (&path, &[], "kubeconfig", &["kpx can use it"]),
        (
            "/nofile",
            &[],
            "kubeconfig",
            &["read /nofile: No such file", "fix this kubeconfig"],
        ),
        (
            &path,
            &[&to_nowhere],
            "kubeconfig",
            &["has no context \"b\"; its contexts: c", "--context"],
        ),
        (
            &path,
            &[&in_host, &to_nowhere],
            "API server",
            &["has no context \"b\"; its contexts: c", "--context"],
        ),
        (
            &path,
            &[&in_host],
            "API server",
            &["an address of the control plane that this machine reaches"],
        ),
        (
            &path,
            &[&in_host, &dns],
            "names",
            &[
                "1:1053 is taken by another program",
                "another --dns-address",
            ],
        ),
    ];
    for (file, args, what, expected) in cases {
        let mut command = Command::new(binary()?);
        command
            .args(["check", "--no-headers", "--kubeconfig", file])
            .args(args.concat());
        let output = ns.run(|| command.output())?;
        let text = String::from_utf8(output.stdout)?;
        let line = text
            .lines()
            .find(|line| line.contains(&format!(" {what} ")))
            .context("a finding")?;
        ensure!(expected.iter().all(|part| line.contains(part)), "{line}");
    }
    Ok(())
}

#[test]
fn agent_without_first_lists_reports_waiting() -> Result<()> {
    let ns = namespace("waits")?;
    let dir = TempDir::with_prefix("kpx-cli-")?;
    let path = dir.path().join("config");
    fs::write(
        &path,
        CONFIG
            .replace("192.0.2.9:6443", "127.0.0.1:1")
            .replace("USER", "{token: secret}"),
    )?;
    let agent =
        Agent::launch_in(&ns, Source::Kubeconfig(&path), dir.path(), "--mode host")?.answering()?;
    let run = |arguments: &str| {
        kpx(
            &ns,
            &format!("{arguments} --run-dir {}", agent.run_dir().display()),
        )
    };
    let waits = "the agent waits for the API server's first lists (see kpx status)";
    let lists = ["services", "backends", "services -o json"]
        .map(|command| (command, 0, "nothing found yet: "));
    let names = [
        "services web",
        "backends web -w",
        "flows --service web",
        "top web --once",
        "trace --host --to web",
    ];
    for (command, code, start) in lists
        .into_iter()
        .chain(names.map(|command| (command, 1, "kpx: ")))
    {
        let output = run(command)?;
        let reported = String::from_utf8_lossy(&output.stderr);
        let says_so = reported.starts_with(start)
            && reported.contains(waits)
            && reported.lines().count() == 1;
        ensure!(
            output.status.code() == Some(code) && says_so,
            "{command}: {output:?}"
        );
    }
    agent.wait(DEADLINE, "a failed watch", |status| {
        status.unheard.is_some()
    })?;
    let said = String::from_utf8(run("status")?.stdout)?;
    let server = said
        .lines()
        .find(|line| line.starts_with("API server:"))
        .context("the server")?;
    ensure!(
        server.contains("https://127.0.0.1:1; for ") && server.contains("Connection refused"),
        "{server}"
    );
    Ok(())
}

/// Returns the error of a kpx that fails to start.
fn refused(ns: &NetNs, dir: &TempDir, args: &[&str]) -> Result<String> {
    let mut command = Command::new(binary()?);
    command
        .args(["run", "--node-name", "n1", "--run-dir"])
        .arg(dir.path().join("run"));
    command.arg("--bpf-dir").arg(ns.bpf_dir()).args(args);
    command
        .env("HOME", "/nonexistent")
        .env("SUDO_USER", "daemon")
        .env_remove("KUBECONFIG")
        .env_remove("KUBERNETES_SERVICE_HOST");
    let output = ns
        .run(|| command.output())
        .with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.code() == Some(1), "{args:?}: {output:?}");
    let said = String::from_utf8(output.stderr)?;
    Ok(said
        .lines()
        .filter(|line| line.starts_with("kpx: "))
        .collect())
}

/// Returns the state of a network namespace that a start of kpx changes.
fn state(ns: &NetNs) -> Result<String> {
    let mut text = ns.exec(Command::new("ip").args(["-brief", "link"]))?;
    text += &ns.exec(Command::new("tc").args(["qdisc", "show"]))?;
    for key in [
        "netfilter/nf_conntrack_tcp_timeout_close_wait",
        "ipv4/conf/lo/accept_local",
        "ipv4/ip_local_reserved_ports",
    ] {
        text += &ns.read(&format!("/proc/sys/net/{key}"))?;
    }
    Ok(text)
}
