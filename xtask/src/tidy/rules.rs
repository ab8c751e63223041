//! The rules and their exemptions, each with a reason.

use super::Violation;
use super::source::{File, Mention, Tree};

/// The modules (paths without `.rs`) that may contain `unsafe`.
const UNSAFE: &[(&str, &str)] = &[
    (
        "proxy-common/src/layout/tests",
        "shows the bytes of the shared types, which have no padding",
    ),
    (
        "proxy-common/src/pod",
        "promises aya that the shared types are plain bytes",
    ),
    (
        "crates/datapath/src/sys/map_walk",
        "reads and writes maps in batches, which no crate has calls for",
    ),
    (
        "crates/datapath/src/sys/netns_cookie",
        "asks for the number of a network namespace, which no crate has a call for",
    ),
    (
        "crates/datapath/src/sys/tcx_query",
        "lists programs by their ids, for which no crate has a call",
    ),
    (
        "proxy-ebpf/src/checksum",
        "checksums come from a helper that takes pointers",
    ),
    ("proxy-ebpf/src/clock", "asks the kernel for the time"),
    (
        "crates/macros/src/lib",
        "exports functions by name, so that the verifier follows them apart",
    ),
    (
        "proxy-ebpf/src/global_fn",
        "takes the hook's memory again for these functions",
    ),
    (
        "proxy-ebpf/src/random",
        "asks the kernel for a random number",
    ),
    (
        "proxy-ebpf/src/ring",
        "asks the kernel for the number of this CPU",
    ),
    (
        "proxy-ebpf/src/main",
        "names the licence's section, which the kernel reads",
    ),
    (
        "proxy-ebpf/src/maps",
        "a lookup in a map is a pointer into the kernel",
    ),
    (
        "proxy-ebpf/src/route",
        "routes come from helpers that take pointers",
    ),
    (
        "proxy-ebpf/src/redirect/fib",
        "routes come from helpers that take pointers, and go into others",
    ),
    (
        "proxy-ebpf/src/setting",
        "what the loader sets is read as it is, and found by its name",
    ),
    (
        "proxy-ebpf/src/skb",
        "packets are reached through pointers and helpers",
    ),
    (
        "proxy-ebpf/src/socket/event",
        "an event's context and its socket are reached through pointers and helpers",
    ),
    (
        "proxy-ebpf/src/socket/storage",
        "a socket's storage is reached through pointers and helpers",
    ),
    (
        "proxy-ebpf/src/socket/peer",
        "a call's address and its socket are reached through pointers and helpers",
    ),
    (
        "crates/net/src/netfilter/legacy/ask",
        "asks for tables of legacy iptables, which no crate has a call for",
    ),
    (
        "tests/lab/churn/links",
        "detaches links of others and attaches a program exclusively, which no crate has a call for",
    ),
    (
        "crates/testbed/src/apiserver/listen",
        "asks for the namespace of a socket, which no crate has a call for",
    ),
    (
        "crates/testbed/src/kept_lines",
        "asks the kernel for the lines of a program, which no crate has a call for",
    ),
];

/// The modules whose tests may sleep.
const SLEEP: &[(&str, &str)] = &[
    (
        "crates/source/src/kubernetes/watch/tests",
        "a sleep moves the paused clock",
    ),
    (
        "tests/cluster/apiserver_faults",
        "polls a server's counters, bounded by `timeout`",
    ),
    (
        "crates/testbed/src/agent",
        "polls in `wait_until`, bounded by a deadline",
    ),
    (
        "crates/testbed/src/apiserver/http",
        "a fault: a list that comes late",
    ),
    (
        "crates/testbed/src/apiserver/real",
        "polls a server that does not answer yet, bounded by a deadline",
    ),
    (
        "crates/testbed/src/apiserver/watch",
        "a watch ends when its client said, as on any server",
    ),
    (
        "crates/tools/src/control",
        "changes at a rate, and measures for a time",
    ),
    ("crates/tools/src/load", "sends at a rate"),
    (
        "crates/tools/src/scale",
        "dials at a rate, and measures for a time",
    ),
    ("crates/tools/src/soak", "the length of a fault is tested"),
];

/// The `Reason`s that no packet row can produce.
const NO_ROW: &[(&str, &str)] = &[
    (
        "Vlan",
        "a device takes the tag off, which BPF_PROG_TEST_RUN cannot: see tests/lab/devices.rs",
    ),
    ("SeenBefore", "takes two devices: see tests/lab/devices.rs"),
    (
        "HandoverRefused",
        "takes the metadata of a tunnel device: see tests/vm/dsr.rs",
    ),
];

/// The pure modules: their functions depend only on arguments.
const PURE: &[&str] = &["proxy-common/src", "crates/core/src"];

/// The names that pure modules must not mention, and that cargo's dependencies do not exclude:
/// clocks, threads, sockets, files.
const IMPURE: &[&str] = &[
    "aya",
    "std::env",
    "std::fs",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::os",
    "std::process",
    "std::thread",
    "std::time",
    "Instant::now",
    "SystemTime::now",
    "Timestamp::now",
    "Zoned::now",
];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut violations: Vec<_> = tree.files.iter().flat_map(check_file).collect();
    violations.extend(uncovered_reasons(tree));
    violations.sort();
    violations
}

fn check_file(file: &File) -> Vec<Violation> {
    let mut violations = Vec::new();
    if !exempt(file, UNSAFE) {
        let why = "unsafe lives in few files, so that it can be reviewed";
        violations.extend(find(file, &["unsafe"]).map(|line| broken(file, line, "unsafe", why)));
    }
    if !file.is_in("proxy-ebpf/src/maps") {
        let why = "one file owns the maps, and the lifetime of values read from them";
        violations.extend(
            find(file, &["#", "[", "map", "]"]).map(|line| broken(file, line, "#[map]", why)),
        );
        violations.extend(
            find(file, &["#", "[", "map", "("]).map(|line| broken(file, line, "#[map(…)]", why)),
        );
    }
    let mentions = file.paths();
    violations.extend(impure(file, &mentions));
    violations.extend(sleeps(file, &mentions));
    violations.extend(ignored_tests(file));
    violations
}

fn impure(file: &File, mentions: &[Mention]) -> Vec<Violation> {
    let pure = PURE.iter().any(|module| file.is_in(module)) && !file.is_in("proxy-common/src/pod");
    if !pure {
        return Vec::new();
    }
    let why = "this module is pure: values in, values out, nothing to mock";
    let is_value = |text: &str| text == "std::time::Duration";
    let named = mentions
        .iter()
        .filter(|m| !m.test && is_under(&m.text, IMPURE) && !is_value(&m.text));
    named
        .map(|mention| broken(file, mention.line, &mention.text, why))
        .collect()
}

fn sleeps(file: &File, mentions: &[Mention]) -> Vec<Violation> {
    if exempt(file, SLEEP) {
        return Vec::new();
    }
    let why = "a test waits for a condition, bounded by a deadline";
    let sleeps = ["thread::sleep", "time::sleep", "time::sleep_until"];
    let ends = |text: &str| {
        sleeps
            .iter()
            .any(|sleep| text == *sleep || text.ends_with(&format!("::{sleep}")))
    };
    let named = mentions
        .iter()
        .filter(|mention| mention.test && ends(&mention.text));
    named
        .map(|mention| broken(file, mention.line, &mention.text, why))
        .collect()
}

fn ignored_tests(file: &File) -> Vec<Violation> {
    let attributes = (0..file.tokens.len()).filter(|&at| file.has(at, &["#", "["]));
    let ignoring = attributes.filter(|&at| {
        let inside = &file.tokens[at + 2..file.tokens[at + 1].partner];
        let name = inside.first().map(|token| token.text.as_str());
        name == Some("ignore")
            || name == Some("cfg_attr") && inside.iter().any(|token| token.text == "ignore")
    });
    let why = "a test that does not run says nothing";
    ignoring
        .map(|at| broken(file, file.tokens[at].line, "#[ignore]", why))
        .collect()
}

/// Some packet row must count each `Reason`: in a file of `tests/kernel/rows`, or in Rust next to
/// it.
fn uncovered_reasons(tree: &Tree) -> Vec<Violation> {
    let Some(file) = tree.file("proxy-common/src/counter.rs") else {
        return Vec::new();
    };
    let in_rows = tree
        .packet_rows
        .iter()
        .filter(|(path, _)| path.starts_with("tests/kernel/"));
    let in_rows = in_rows.filter_map(|(_, row)| Some(row.rsplit_once('|')?.1.trim()));
    let counts: Vec<_> = in_rows
        .chain(tree.module("tests/kernel").flat_map(last_columns))
        .collect();
    let why = "every reason is the outcome of a packet in tests/kernel";
    let uncovered = variants(file, "Reason").into_iter().filter(|(variant, _)| {
        let name = counter_name(file, variant);
        !NO_ROW.iter().any(|(exempt, _)| exempt == variant)
            && !counts
                .iter()
                .any(|counts| counts.split(' ').any(|count| Some(count) == name))
    });
    uncovered
        .map(|(variant, line)| broken(file, line, &format!("Reason::{variant} has no row"), why))
        .collect()
}

/// Returns the strings that end a tuple, `(…, "malformed")`, or stand alone, `get("flows_full")`:
/// the names of counters.
fn last_columns(file: &File) -> impl Iterator<Item = &str> {
    let follows = |at: usize| file.has(at - 1, &[","]) || file.has(at - 1, &["("]);
    let ends_row = |at: usize| file.has(at + 1, &[")"]) || file.has(at + 1, &[",", ")"]);
    let strings = (1..file.tokens.len()).filter(move |&at| follows(at) && ends_row(at));
    strings.filter_map(|at| file.tokens[at].text.strip_prefix('"')?.strip_suffix('"'))
}

/// Returns the name from the match arm of a variant: `Self::NotIp => "not_ip"`.
fn counter_name<'a>(file: &'a File, variant: &str) -> Option<&'a str> {
    let arm =
        (0..file.tokens.len()).filter(|&at| file.has(at, &["Self", ":", ":", variant, "=", ">"]));
    arm.filter_map(|at| {
        file.tokens
            .get(at + 6)?
            .text
            .strip_prefix('"')?
            .strip_suffix('"')
    })
    .next()
}

fn variants(file: &File, name: &str) -> Vec<(String, usize)> {
    let Some(start) = (0..file.tokens.len()).find(|&at| file.has(at, &["enum", name, "{"])) else {
        return Vec::new();
    };
    let mut variants = Vec::new();
    let mut at = start + 3;
    let end = file.tokens[start + 2].partner;
    while at < end {
        while file.has(at, &["#", "["]) {
            at = file.tokens[at + 1].partner + 1;
        }
        variants.push((file.tokens[at].text.clone(), file.tokens[at].line));
        while at < end && file.tokens[at].text != "," {
            at = file.tokens[at].partner + 1;
        }
        at += 1;
    }
    variants
}

fn exempt(file: &File, exemptions: &[(&str, &str)]) -> bool {
    exemptions.iter().any(|(module, _)| file.is_in(module))
}

/// Returns the lines at which these tokens begin.
fn find(file: &File, texts: &[&str]) -> impl Iterator<Item = usize> {
    (0..file.tokens.len())
        .filter(move |&at| file.has(at, texts))
        .map(|at| file.tokens[at].line)
}

/// Returns true if the text is one of these paths or begins with one. A crate's name without `::`
/// does not count, because it may be a variable.
fn is_under(text: &str, paths: &[&str]) -> bool {
    paths.iter().any(|path| match text.strip_prefix(path) {
        Some("") => path.contains("::"),
        Some(rest) => rest.starts_with("::"),
        None => false,
    })
}

fn broken(file: &File, line: usize, what: &str, why: &'static str) -> Violation {
    Violation {
        path: file.path.clone(),
        line,
        what: what.to_owned(),
        why,
    }
}
