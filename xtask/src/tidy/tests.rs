//! Tests of each rule on small trees, and of all rules on this tree.

use super::*;

/// Returns the tree's violations as `file:line: what`.
fn violations(files: &[(&str, &str)]) -> Vec<String> {
    let texts = files
        .iter()
        .map(|(path, text)| (path.to_string(), text.to_string()))
        .collect();
    let violations = rules::check(&Tree::parse(texts).unwrap());
    violations
        .iter()
        .map(|violation| violation.to_string().split(" (").next().unwrap().to_owned())
        .collect()
}

#[test]
fn this_tree_is_tidy() {
    let violations = rules::check(&Tree::read(workspace::root()).unwrap());
    let lines: Vec<_> = violations.iter().map(Violation::to_string).collect();
    assert!(lines.is_empty(), "\n{}\n", lines.join("\n"));
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn violations_have_places() {
    let cases: &[(&str, &str, &str, &[&str])] = &[
        (
            "unsafe",
            "tests/src/a.rs",
            "fn a() {\n    unsafe { b() }\n}",
            &["2: unsafe"],
        ),
        (
            "unsafe where it may be",
            "proxy-ebpf/src/skb/csum.rs",
            "unsafe fn a() {}",
            &[],
        ),
        (
            "a name that begins like an exempt one",
            "proxy-ebpf/src/mapsy.rs",
            "unsafe fn a() {}",
            &["1: unsafe"],
        ),
        (
            "unsafe in prose",
            "a/b.rs",
            "// unsafe\n/// unsafe\nconst A: &str = \"unsafe\";",
            &[],
        ),
        (
            "lints about unsafe",
            "a/b.rs",
            "#![forbid(unsafe_code)]",
            &[],
        ),
        (
            "a map",
            "proxy-ebpf/src/a.rs",
            "\n#[map]\nstatic A: B = C;",
            &["2: #[map]"],
        ),
        (
            "a named map",
            "proxy-ebpf/src/a.rs",
            "#[map(name = \"A\")]\nstatic A: B = C;",
            &["1: #[map(…)]"],
        ),
        (
            "maps where they may be",
            "proxy-ebpf/src/maps.rs",
            "#[map]\nstatic A: B = C;",
            &[],
        ),
        (
            "a clock",
            "crates/core/src/model.rs",
            "use std::{net, time::Instant};",
            &["1: std::time::Instant"],
        ),
        (
            "a clock in a submodule",
            "crates/core/src/diff/a.rs",
            "use std::time::*;",
            &["1: std::time::*"],
        ),
        (
            "a span of time",
            "crates/core/src/model.rs",
            "use std::time::Duration;",
            &[],
        ),
        (
            "aya",
            "proxy-common/src/addr.rs",
            "unsafe impl aya::Pod for A {}",
            &["1: aya::Pod", "1: unsafe"],
        ),
        (
            "aya where it may be",
            "proxy-common/src/pod.rs",
            "use aya::Pod;",
            &[],
        ),
        (
            "a variable",
            "proxy-common/src/addr.rs",
            "fn a(log: u8) -> u8 { log }",
            &[],
        ),
        (
            "impure tests",
            "crates/core/src/diff.rs",
            "#[cfg(test)]\nmod tests {\n    use std::fs;\n}",
            &[],
        ),
        (
            "pure after tests",
            "crates/core/src/diff.rs",
            "#[cfg(test)]\nuse std::fs;\nuse std::env;",
            &["3: std::env"],
        ),
        (
            "a sleep",
            "tests/a.rs",
            "fn a() {\n    std::thread::sleep(b);\n}",
            &["2: std::thread::sleep"],
        ),
        (
            "another sleep",
            "tests/a.rs",
            "use tokio::time::{self, sleep};",
            &["1: tokio::time::sleep"],
        ),
        (
            "a sleep of a test",
            "a/b.rs",
            "#[cfg(test)]\nmod t {\n    fn a() { time::sleep(b) }\n}",
            &["3: time::sleep"],
        ),
        (
            "a sleep of a program",
            "a/b.rs",
            "fn a() { tokio::time::sleep(b) }",
            &[],
        ),
        (
            "ignored",
            "a/b.rs",
            "#[test]\n#[ignore = \"slow\"]\nfn a() {}",
            &["2: #[ignore]"],
        ),
        (
            "ignored at times",
            "a/b.rs",
            "#[cfg_attr(windows, ignore)]\nfn a() {}",
            &["1: #[ignore]"],
        ),
        (
            "function types",
            "a/b.rs",
            "type A = fn(u8) -> u8;\ntrait B {\n    fn c();\n}",
            &[],
        ),
    ];
    for (name, path, text, lines) in cases {
        let expected: Vec<_> = lines.iter().map(|line| format!("{path}:{line}")).collect();
        assert_eq!(violations(&[(path, text)]), expected, "{name}");
    }
}

#[test]
fn files_of_test_modules_are_tests() {
    let sleep = "fn a() { std::thread::sleep(b) }";
    let parent = (
        "a/src/b.rs",
        "#[cfg(test)]\nmod tests;\nmod real;\n#[cfg(test)]\n#[path = \"b_tests.rs\"]\nmod more;",
    );
    let files = [
        parent,
        ("a/src/b/tests.rs", sleep),
        ("a/src/b/real.rs", sleep),
        ("a/src/b_tests.rs", sleep),
    ];
    let found = violations(&files);
    assert_eq!(
        found,
        [
            "a/src/b/tests.rs:1: std::thread::sleep",
            "a/src/b_tests.rs:1: std::thread::sleep"
        ]
    );
    let root = ("a/src/lib.rs", "#[cfg(test)]\nmod lab;");
    let found = violations(&[root, ("a/src/lab/net.rs", sleep)]);
    assert_eq!(found, ["a/src/lab/net.rs:1: std::thread::sleep"]);
}

#[test]
fn every_reason_needs_a_row() {
    let reasons = "enum Reason {
        /// Not this one.
        NotIp,
        #[doc(hidden)]
        Protocol = 2,
        Fragment,
    }
    fn name() { match a { Self::NotIp => \"not_ip\", Self::Protocol => \"protocol\", Self::Fragment => \"fragment\" } }";
    let counter = ("proxy-common/src/counter.rs", reasons);
    let row = |line: usize, name: &str| {
        format!("proxy-common/src/counter.rs:{line}: Reason::{name} has no row")
    };
    assert_eq!(
        violations(&[counter]),
        [row(3, "NotIp"), row(5, "Protocol"), row(6, "Fragment")]
    );
    let table = "fn fragment() { check(&[(A, \"fragment\", B, \"not_ip\"), (A, \"protocol\", B, \"forwarded protocol\",)]); }";
    assert_eq!(
        violations(&[counter, ("tests/kernel/main.rs", table)]),
        [row(6, "Fragment")]
    );
    assert_eq!(
        violations(&[counter, ("tests/kernel/tags.rs", table)]),
        [row(6, "Fragment")]
    );
    assert_eq!(violations(&[counter, ("tests/data.rs", table)]).len(), 3);
    let rows =
        "# fragment\nlo | tcp | drop | - | not_ip\nlo | tcp | drop | - | forwarded protocol\n";
    assert_eq!(
        violations(&[counter, ("tests/kernel/rows/a.packets", rows)]),
        [row(6, "Fragment")]
    );
    assert_eq!(violations(&[counter, ("tests/b.packets", rows)]).len(), 3);
}
