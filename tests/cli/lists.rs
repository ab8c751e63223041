//! Lists in kubectl's style: order, names, watches, narrow terminals, users without root.

use std::collections::HashSet;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, binary, wait_until};

use crate::document::masked;
use crate::node::{CLUSTER, Node};

/// The group that may use the agent's socket, and a group that may not.
const GROUP: u32 = 4_242;
const NO_GROUP: u32 = 65_534;

/// Runs kpx as a user without root.
fn as_user(node: &Node, group: u32, arguments: &str) -> Result<Output> {
    let mut command = Command::new("setpriv");
    command
        .args([
            "--reuid=65534",
            &format!("--regid={group}"),
            "--clear-groups",
        ])
        .arg(binary()?);
    node.ns()
        .run(|| command.args(arguments.split(' ')).output())
        .context("run kpx as a user")
}

#[test]
fn only_group_members_reach_agent() -> Result<()> {
    let node = Node::start("group", &format!("--socket-group {GROUP}"))?;
    let home = node.run_dir().parent().context("the folder of the test")?;
    fs::set_permissions(home, Permissions::from_mode(0o755))?;
    let run_dir = format!("--run-dir {}", node.run_dir().display());
    for command in ["status", "services", "flows"] {
        let output = as_user(&node, GROUP, &format!("{command} {run_dir}"))?;
        ensure!(output.status.success(), "{command}: {output:?}");
        let output = as_user(&node, NO_GROUP, &format!("{command} {run_dir}"))?;
        let reported = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(1) && reported.contains("permission denied at"),
            "{command}: {output:?}"
        );
    }
    let output = as_user(&node, GROUP, &format!("flows --end --all {run_dir}"))?;
    let reported = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1) && reported.contains("to end flows takes root"),
        "{output:?}"
    );
    let mode = |path| Ok::<_, anyhow::Error>(fs::metadata(path)?.permissions().mode() & 0o777);
    assert_eq!(mode(node.run_dir().join("kpx.sock"))?, 0o660);
    ensure!(
        mode(node.run_dir().to_owned())? & 0o022 == 0,
        "root alone writes to the run directory"
    );
    Ok(())
}

#[test]
fn user_without_root_gets_reason() -> Result<()> {
    let node = Node::start("user", "")?;
    assert_eq!(
        fs::metadata(node.run_dir().join("kpx.sock"))?
            .permissions()
            .mode()
            & 0o777,
        0o700,
        "root alone may connect"
    );
    let output = as_user(&node, NO_GROUP, "cleanup")?;
    ensure!(
        output.status.code() == Some(1) && output.stdout.is_empty(),
        "{output:?}"
    );
    ensure!(
        String::from_utf8_lossy(&output.stderr).contains("takes root"),
        "{output:?}"
    );
    // The check goes on past a folder that this user cannot read.
    let closed = tempfile::tempdir()?;
    // setpriv has root's rights until it starts kpx, which may lie in root's home. PATH is kpx's,
    // so setpriv needs its full path.
    let mut command = Command::new("/usr/bin/setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(binary()?)
        .args(["check", "-o", "json"]);
    command.env("PATH", closed.path());
    let output = node.ns().run(|| command.output())?;
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
    let findings = report["findings"].as_array().context("findings")?;
    for what in ["kube-proxy's rules", "sockets"] {
        let finding = findings
            .iter()
            .find(|finding| finding["what"] == what)
            .context("a finding")?;
        ensure!(finding["level"] == "warn", "{finding}");
    }
    Ok(())
}

#[test]
fn watch_shows_changes_until_the_reader_goes() -> Result<()> {
    let node = Node::start("watch", "")?;
    let mut command = Command::new(binary()?);
    command
        .args(["backends", "shop/web", "--watch", "--run-dir"])
        .arg(node.run_dir());
    let mut watch = node.ns().spawn(command.stdout(Stdio::piped()))?;
    let mut lines = BufReader::new(watch.stdout.take().context("an output")?).lines();
    let mut next = |what: &[&str]| -> Result<()> {
        let line = lines.next().context("a line")??;
        let words: Vec<_> = line.split_whitespace().collect();
        ensure!(
            what.iter().all(|what| words.contains(what)),
            "{what:?} in {line:?}"
        );
        Ok(())
    };
    next(&["NAMESPACE", "ADDRESS", "STATE"])?;
    next(&["10.244.2.5:8080", "terminating"])?;
    next(&["10.244.2.6:8080", "unready"])?;
    next(&["192.0.2.1:8080", "ready"])?;
    let ready = CLUSTER.replace(
        "{ready: false, serving: false, terminating: false}",
        "{ready: true}",
    );
    node.put("cluster", &ready)?;
    next(&["10.244.2.6:8080", "ready", "cluster"])?;
    node.put(
        "cluster",
        &ready.replace(
            "- addresses: [10.244.2.6]\n  conditions: {ready: true}\n",
            "",
        ),
    )?;
    next(&["10.244.2.6:8080", "gone"])?;
    drop(lines);
    node.put("cluster", CLUSTER)?;
    let status = watch.wait()?;
    ensure!(status.success(), "{status}: a reader that goes is no error");
    Ok(())
}

#[test]
fn events_lists_and_follows_reports() -> Result<()> {
    let node = Node::start("events", "")?;
    let reported = |arguments: &str| -> Result<Vec<(String, String)>> {
        let text = node.text(&format!("events --no-headers {arguments}"))?;
        let word = |line: &str, at| {
            line.split_whitespace()
                .nth(at)
                .unwrap_or_default()
                .to_owned()
        };
        Ok(text
            .lines()
            .map(|line| (word(line, 2), word(line, 3)))
            .collect())
    };
    let conflict = (
        "FrontendConflict".to_owned(),
        "service/shop/web-old".to_owned(),
    );
    assert_eq!(reported("web-old")?, std::slice::from_ref(&conflict));
    assert_eq!(reported("-n shop")?, std::slice::from_ref(&conflict));
    assert_eq!(reported("svc/shop/web")?, [], "no Event is about it");
    let all = reported("")?;
    let typo = ("ProblemBegan".to_owned(), "problem/typo.yaml:3".to_owned());
    ensure!(
        [
            conflict,
            typo,
            ("Starting".to_owned(), "node/n1".to_owned())
        ]
        .iter()
        .all(|one| all.contains(one)),
        "{all:?}"
    );
    let json: serde_json::Value = serde_json::from_str(&node.text("events web-old -o json")?)?;
    ensure!(
        json[0]["count"] == 1
            && json[0]["note"]
                .as_str()
                .is_some_and(|note| note.contains("30080")),
        "{json}"
    );

    // The label of a slice names its Service; the slice's name is arbitrary.
    let slice = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: x7, namespace: shop, \
                 labels: {kubernetes.io/service-name: web}, annotations: {kpx.dev/weight: heavy}}\naddressType: IPv4\nendpoints: [{addresses: [10.244.2.7]}]\n\
                 ports: [{name: http, port: 8080}]\n";
    node.put("x7", slice)?;
    let of_slice = (
        "InvalidField".to_owned(),
        "endpointslice/shop/x7".to_owned(),
    );
    wait_until(DEADLINE, "the Event of the slice", || {
        Ok(reported("svc/shop/web")? == std::slice::from_ref(&of_slice))
    })?;

    let mut command = Command::new(binary()?);
    command
        .args(["events", "-n", "shop", "--watch", "--run-dir"])
        .arg(node.run_dir());
    let mut watch = node.ns().spawn(command.stdout(Stdio::piped()))?;
    let mut lines = BufReader::new(watch.stdout.take().context("an output")?).lines();
    let mut next = || lines.next().context("a line")?.context("a line");
    ensure!(
        next()?.starts_with("LAST-SEEN") && next()?.contains("FrontendConflict"),
        "the list comes first"
    );
    ensure!(
        next()?.contains("endpointslice/shop/x7"),
        "the newest comes last"
    );
    node.put(
        "cluster",
        &CLUSTER.replace(
            "clusterIP: 10.96.0.11\n  clusterIPs: [10.96.0.11]",
            "clusterIP: 10.96.0.10\n  clusterIPs: [10.96.0.10]",
        ),
    )?;
    let line = next()?;
    ensure!(
        line.contains("service/shop/web-old") && line.contains("10.96.0.10"),
        "{line}"
    );
    drop(lines);
    node.put("cluster", CLUSTER)?;
    watch.kill()?;
    watch.wait()?;
    Ok(())
}

#[test]
fn lists_have_orders_and_names() -> Result<()> {
    let node = Node::start("lists", "")?;
    let column = |arguments: &str, at: usize| -> Result<Vec<String>> {
        let text = node.text(&format!("{arguments} --no-headers"))?;
        Ok(text
            .lines()
            .filter_map(|line| line.split_whitespace().nth(at).map(str::to_owned))
            .collect())
    };
    assert_eq!(column("services", 1)?, ["kube-dns", "web", "web-old"]);
    assert_eq!(
        column("services --sort-by backends", 1)?,
        ["web-old", "kube-dns", "web"]
    );
    let states = ["terminating", "unready", "ready", "ready", "ready"];
    assert_eq!(column("backends --sort-by state", 7)?, states);
    assert_eq!(
        node.text("services -n shop -o name")?,
        "service/shop/web\nservice/shop/web-old\n"
    );
    assert_eq!(
        node.text("backends web -o name")?,
        "pod/shop/web-1\n10.244.2.6:8080\npod/shop/web-0\n"
    );
    ensure!(
        node.text("services service/shop/web -o name")? == "service/shop/web\n",
        "a name is taken as it is given"
    );
    assert_eq!(column("services -l app=web", 1)?, ["web", "web-old"]);
    assert_eq!(
        column("backends --selector app,tier!=old", 1)?,
        ["web", "web", "web"]
    );
    let top = node.text("top -l tier=old --interval 0.5")?;
    ensure!(
        top.contains("shop/web-old") && !top.contains("shop/web "),
        "{top}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&node.text("top -n shop -o json --interval 0.5")?)?;
    ensure!(
        json["services"].as_array().map(Vec::len) == Some(2) && json["health"] == "healthy",
        "{json}"
    );
    Ok(())
}

/// Widths of terminals, and the columns of each table at each width.
const WIDTHS: [usize; 3] = [80, 100, 120];
const TABLES: [(&str, [&str; 3]); 5] = [
    (
        "services",
        [
            "NAMESPACE NAME CLUSTER-IP PORT(S) BACKENDS FLOWS AGE",
            "NAMESPACE NAME CLUSTER-IP EXTERNAL-IP PORT(S) BACKENDS FLOWS",
            "NAMESPACE NAME TYPE CLUSTER-IP EXTERNAL-IP PORT(S) BACKENDS FLOWS",
        ],
    ),
    (
        "backends",
        [
            "NAMESPACE SERVICE PORT ADDRESS STATE FLOWS",
            "NAMESPACE SERVICE PORT ADDRESS POD STATE FLOWS",
            "NAMESPACE SERVICE PORT ADDRESS POD NODE ZONE STATE FLOWS",
        ],
    ),
    (
        "flows",
        [
            "PROTOCOL CLIENT SERVICE BACKEND STATE IDLE",
            "PROTOCOL CLIENT FRONTEND SERVICE BACKEND STATE IDLE",
            "PROTOCOL CLIENT FRONTEND SERVICE BACKEND STATE IDLE SOURCE",
        ],
    ),
    (
        "events",
        [
            "LAST-SEEN REASON OBJECT NOTE",
            "LAST-SEEN TYPE REASON OBJECT COUNT NOTE",
            "LAST-SEEN TYPE REASON OBJECT COUNT NOTE",
        ],
    ),
    ("devices", ["DEVICE IFINDEX ROLE ATTACHED-BY"; 3]),
];

#[test]
fn tables_fit_terminals_without_cut_values() -> Result<()> {
    let node = Node::start("widths", "--socket-lb off")?;
    let _connection = node.connect()?;
    wait_until(DEADLINE, "the Service's flow is counted", || {
        Ok(node
            .text("services shop/web --no-headers")?
            .contains("1/3   1 "))
    })?;
    let on_terminal = |command: &str, width: usize| -> Result<String> {
        let kpx = format!(
            "stty cols {width}; NO_COLOR=1 {} {command} --run-dir {}",
            binary()?.display(),
            node.run_dir().display()
        );
        let output = node.ns().run(|| {
            Command::new("script")
                .args(["-qec", &kpx, "/dev/null"])
                .output()
        })?;
        let text = masked(&String::from_utf8(output.stdout)?.replace('\r', ""));
        println!("{width} columns, kpx {command}:\n{text}");
        let is_fit = |line: &str| line.chars().count() <= width && !line.contains('…');
        ensure!(text.lines().all(is_fit), "{command} at {width}: {text}");
        Ok(text)
    };
    let mut wrong = Vec::new();
    for (command, headers) in TABLES {
        let whole = masked(&node.text(command)?);
        let words: HashSet<_> = whole.split_whitespace().collect();
        for (width, header) in WIDTHS.into_iter().zip(headers) {
            let text = on_terminal(command, width)?;
            let shown: Vec<_> = text
                .lines()
                .next()
                .context("a header")?
                .split_whitespace()
                .collect();
            if shown.join(" ") != header {
                wrong.push(format!("{command} at {width}: {shown:?}"));
            }
            // A sentence may break a word that is longer than its column.
            let is_whole = |word: &str| match command {
                "events" => whole.contains(word),
                _ => words.contains(word),
            };
            let cut = text.split_whitespace().find(|word| !is_whole(word));
            ensure!(cut.is_none(), "{command} at {width}: {cut:?} in {text}");
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    for width in WIDTHS {
        let status = on_terminal("status", width)?;
        let words = status.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(
            words.contains("nodePort: IPv4 *:30080/tcp is held by Service shop/web"),
            "{status}"
        );
    }
    Ok(())
}

#[test]
fn shells_complete_the_names_that_the_agent_knows() -> Result<()> {
    let node = Node::start("complete", "")?;
    let complete = |words: &str| -> Result<Vec<String>> {
        let run_dir = node.run_dir().display().to_string();
        let words: Vec<_> = words
            .split(' ')
            .map(|word| {
                if word == "DIR" {
                    run_dir.as_str()
                } else {
                    word
                }
            })
            .collect();
        let mut command = Command::new(binary()?);
        command
            .arg("--")
            .arg("kpx")
            .args(&words)
            .env("KPX_COMPLETE", "bash")
            .env("_CLAP_IFS", "\n");
        command
            .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
            .env("_CLAP_COMPLETE_COMP_TYPE", "9");
        let output = node.ns().run(|| command.output())?;
        ensure!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
        Ok(String::from_utf8(output.stdout)?
            .lines()
            .map(str::to_owned)
            .collect())
    };
    assert_eq!(
        complete("services --run-dir DIR --namespace ")?,
        ["kube-system", "shop"]
    );
    assert_eq!(
        complete("backends --run-dir DIR shop/")?,
        ["shop/web", "shop/web-old"]
    );
    assert_eq!(
        complete("trace --run-dir DIR --from pod/s")?,
        ["pod/shop/web-0", "pod/shop/web-1"]
    );
    assert_eq!(
        complete("trace --run-dir DIR --from node/")?,
        ["node/n1", "node/n2"]
    );
    assert_eq!(complete("monitor --reason no_e")?, ["no_endpoints"]);
    assert_eq!(complete("explain no_e")?, ["no_endpoints"]);
    assert_eq!(
        complete("cluster flows --run-dir DIR --sort-by st")?,
        ["state"]
    );
    assert!(
        complete("services --run-dir /nonexistent --namespace ")?.is_empty(),
        "without an agent no name is known"
    );
    for shell in ["bash", "zsh", "fish", "powershell"] {
        let script = node.script(shell)?;
        ensure!(
            script.contains("KPX_COMPLETE") && script.contains("kpx"),
            "{script}"
        );
    }
    // The shell loads the script and runs kpx by name.
    let folder = binary()?.parent().context("a folder")?.to_owned();
    let line = format!(
        "eval \"$(kpx completions bash)\"; COMP_WORDS=(kpx services --run-dir {} -n sh); COMP_CWORD=5; COMP_TYPE=9; \
         _clap_complete_kpx kpx sh -n; printf '%s ' \"${{COMPREPLY[@]}}\"",
        node.run_dir().display()
    );
    let mut bash = Command::new("bash");
    let path = format!("{}:{}", folder.display(), std::env::var("PATH")?);
    let output = node
        .ns()
        .run(|| bash.args(["-c", &line]).env("PATH", path).output())?;
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "shop",
        "{output:?}"
    );
    Ok(())
}
