//! The demo, ended by signals.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use testbed::agent::wait_until;
use testbed::lab::{Lab, Layout};
use testbed::netns;

#[test]
fn ctrl_c_is_the_good_end_of_a_demo_that_was_to_be_kept() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_kpx-demo"));
    let mut demo = demo
        .arg("--keep")
        .process_group(0)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mine = format!("kpx-{}-", demo.id());
    let mut lines = BufReader::new(demo.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let reported: Vec<_> = lines
        .by_ref()
        .take_while(|line| !line.starts_with("The lab stays until Ctrl-C"))
        .collect();
    assert!(
        reported
            .iter()
            .any(|line| line == "56 conversations, 0 wrong"),
        "{reported:#?}"
    );
    let readme = include_str!("../../../README.md");
    let (_, shown) = readme.split_once("last frames, shortened").unwrap();
    let shown = shown.split("```").nth(1).unwrap().lines().skip(1);
    let shapes: Vec<_> = reported.iter().map(|line| shape(line)).collect();
    for line in shown {
        assert!(
            shapes.contains(&shape(line)),
            "README.md shows {line:?}: {reported:#?}"
        );
    }
    // Each hint about kpx is a complete command.
    let hint = |command: &str| {
        let wanted = format!("kpx {command}");
        let line = reported
            .iter()
            .find(|line| line.starts_with("  ip netns exec") && line.contains(&wanted));
        line.unwrap_or_else(|| panic!("{command} in {reported:#?}"))
            .split(" # ")
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let run = |line: &str| {
        let output = Command::new("sh").args(["-c", line]).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(run(&hint("status")).contains("healthy"));
    assert!(
        run(&hint("backends")).contains("default/p1b"),
        "endpoints name their pods"
    );
    assert!(run(&format!("{} --once", hint("top"))).contains("default/web"));
    assert!(run(&hint("trace --from pod/default/p1a --to svc/default/web")).contains("verdict"));
    assert!(
        run(&hint("trace --from pod/default/p1a --to svc/default/empty")).contains("no_endpoints")
    );
    assert!(hint("monitor").contains("--run-dir"));
    killpg(Pid::from_raw(demo.id().cast_signed()), Signal::SIGINT).unwrap();
    assert_eq!(lines.last().as_deref(), Some("all namespaces are removed"));
    let status = demo.wait().unwrap();
    assert!(status.success(), "{status}");
    assert!(
        !netns::names()
            .unwrap()
            .iter()
            .any(|name| name.starts_with(&mine))
    );
}

/// Returns a line of the demo without the backends' names, numbers and widths, which differ from
/// run to run.
fn shape(line: &str) -> String {
    let words = line.split_whitespace().map(|word| match word {
        "p1b" | "p1c" | "p2a" | "p2b" => "a backend",
        number if number.parse::<u32>().is_ok_and(|number| number > 0) => "a number",
        other => other,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// A terminal sends the signal to the demo's children too.
#[test]
fn ctrl_c_removes_a_demo_that_is_under_way() {
    for phase in ["kpx serves both nodes", "now the Service web is scaled"] {
        let mut demo = Command::new(env!("CARGO_BIN_EXE_kpx-demo"));
        let mut demo = demo
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mine = format!("kpx-{}", demo.id());
        let mut lines = BufReader::new(demo.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        assert!(lines.any(|line| line.contains(phase)), "{phase}");
        killpg(Pid::from_raw(demo.id().cast_signed()), Signal::SIGINT).unwrap();
        let reported: Vec<_> = lines.collect();
        assert_eq!(
            demo.wait().unwrap().code(),
            Some(130),
            "{phase}: {reported:#?}"
        );
        assert!(
            !reported.iter().any(|line| line.contains("Next:")),
            "{reported:#?}"
        );
        assert!(
            !netns::names()
                .unwrap()
                .iter()
                .any(|name| name.starts_with(&format!("{mine}-"))),
            "{phase}"
        );
        assert!(
            !std::env::temp_dir().join(&mine).exists(),
            "{phase}: the lab's folder"
        );
    }
}

#[test]
fn user_without_root_is_told_before_anything_is_made() {
    let mut demo = Command::new("setpriv");
    demo.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        env!("CARGO_BIN_EXE_kpx-demo"),
    ]);
    let output = demo.output().unwrap();
    let reported = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && reported.contains("takes root") && output.stdout.is_empty(),
        "{output:?}"
    );
}

#[test]
fn no_signal_leaves_anything_behind() {
    set_child_subreaper(true).unwrap();
    for (signal, leaves) in [
        (Signal::SIGINT, false),
        (Signal::SIGTERM, false),
        (Signal::SIGKILL, true),
    ] {
        let mut demo = Command::new(env!("CARGO_BIN_EXE_kpx-demo"));
        let mut demo = demo.process_group(0).stdout(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_raw(demo.id().cast_signed());
        let mine = format!("kpx-{}-", demo.id());
        let exists = |host: &str| {
            netns::names()
                .unwrap()
                .iter()
                .any(|name| name.starts_with(&format!("{mine}{host}")))
        };
        wait_until(
            Duration::from_secs(20),
            "a part of the lab is there",
            || Ok(exists("p1a")),
        )
        .unwrap();
        kill(pid, signal).unwrap();
        demo.wait().unwrap();
        // An `ip netns add` that outlives the demo would create its namespace after the next lab
        // has removed leftovers.
        let _ = killpg(pid, Signal::SIGKILL); // There may be none.
        while waitpid(Pid::from_raw(-pid.as_raw()), None).is_ok() {}
        assert_eq!(exists(""), leaves, "{signal}");
        let _next = Lab::start(Layout::Routed).unwrap();
        assert!(!exists(""), "{signal}, and after the next lab started");
    }
    set_child_subreaper(false).unwrap();
}
