//! Tests of `setup` on model machines. `take` simulates a successful step.

use super::*;

fn linker(version: &str, llvm: u32) -> Option<Linker> {
    Some(Linker {
        path: "bin/bpf-linker".into(),
        version: version.into(),
        llvm,
    })
}

/// Returns a machine with everything that Debian offers.
fn debian() -> Machine {
    Machine {
        apt: true,
        rustup: true,
        debian: Some(22),
        nightly: None,
        linker: linker(LINKER_VERSION, 22),
        packages: [COMPILER_PACKAGES, LLVM_PACKAGES]
            .concat()
            .iter()
            .map(|name| name.to_string())
            .collect(),
        tools: TOOLS
            .iter()
            .chain(TEST_TOOLS)
            .map(|&(tool, _)| tool)
            .collect(),
        kubectl: true,
    }
}

fn bare_debian() -> Machine {
    Machine {
        apt: true,
        rustup: true,
        ..Machine::default()
    }
}

fn take(machine: &mut Machine, install: &Install) {
    match install {
        Install::Packages(names) => {
            machine
                .packages
                .extend(names.iter().map(|name| name.to_string()));
            let tools = TOOLS
                .iter()
                .chain(TEST_TOOLS)
                .filter(|(_, package)| names.contains(package));
            machine.tools.extend(tools.map(|&(tool, _)| tool));
            if names.contains(&"rustc-web") {
                machine.debian = Some(22);
            }
        }
        Install::Nightly => machine.nightly = Some(23),
        Install::Target(_) => unreachable!("a toolchain takes no further target"),
        Install::Linker(Compiler::Debian) => machine.linker = linker(LINKER_VERSION, 22),
        Install::Linker(Compiler::Nightly) => machine.linker = linker(LINKER_VERSION, 23),
    }
}

/// Runs steps until the loop ends. Returns the steps and the last decision. `works` selects the
/// steps that succeed.
fn walk(
    mut machine: Machine,
    need: Need,
    works: impl Fn(&Install) -> bool,
) -> (Vec<Install>, Next) {
    let mut tried = Vec::new();
    loop {
        match next(&machine, need, &tried) {
            Next::Take(install) => {
                assert!(!tried.contains(&install), "{install:?} tried twice");
                if works(&install) {
                    take(&mut machine, &install);
                }
                tried.push(install);
            }
            end => return (tried, end),
        }
    }
}

fn ready(compiler: Compiler) -> Next {
    Next::Ready(Toolchain {
        compiler,
        linker: "bin/bpf-linker".into(),
    })
}

/// Returns a machine with nightly and its linker, without packages.
fn nightly() -> Machine {
    Machine {
        rustup: true,
        nightly: Some(22),
        linker: linker(LINKER_VERSION, 22),
        ..Machine::default()
    }
}

/// The packages of all test tools.
const TOOL_PACKAGES: &[&str] = &[
    "iproute2",
    "nftables",
    "ethtool",
    "iptables",
    "dbus-daemon",
    "socat",
    "unzip",
    "chromium",
    "chromium-driver",
];

#[test]
fn present_tools_are_used() {
    use Compiler::{Debian, Nightly};
    let cases = [
        ("all there", debian(), Need::Lab, Debian),
        (
            "both compilers there",
            Machine {
                nightly: Some(22),
                ..debian()
            },
            Need::Lab,
            Debian,
        ),
        ("only nightly there", nightly(), Need::Build, Nightly),
        (
            "nightly there is preferred to packages",
            Machine {
                apt: true,
                ..nightly()
            },
            Need::Build,
            Nightly,
        ),
        (
            "Debian's compiler is too new for the linker",
            Machine {
                debian: Some(23),
                ..nightly()
            },
            Need::Build,
            Nightly,
        ),
        (
            "no tools are needed to build",
            Machine {
                tools: vec![],
                ..debian()
            },
            Need::Build,
            Debian,
        ),
        (
            "a newer linker",
            Machine {
                linker: linker(LINKER_VERSION, 23),
                ..debian()
            },
            Need::Build,
            Debian,
        ),
    ];
    for (name, machine, need, compiler) in cases {
        assert_eq!(
            walk(machine, need, |_| true),
            (vec![], ready(compiler)),
            "{name}"
        );
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of machines")]
fn missing_tools_are_installed() {
    use Compiler::{Debian, Nightly};
    let compiler = COMPILER_PACKAGES.to_vec();
    let all = [COMPILER_PACKAGES, LLVM_PACKAGES].concat();
    let lab_tools = vec!["iproute2", "nftables", "ethtool"];
    let bench_tools = [lab_tools.clone(), vec!["iptables"]].concat();
    let tools = TOOL_PACKAGES.to_vec();
    let all_and_tools = [all.clone(), tools.clone()].concat();
    let no_tools = Machine {
        tools: vec![],
        ..debian()
    };
    let no_compiler = Machine {
        debian: None,
        packages: vec![],
        ..debian()
    };
    let no_linker = Machine {
        linker: None,
        ..debian()
    };
    let other_linker = Machine {
        linker: linker("0.12.0", 22),
        ..debian()
    };
    let old_linker = Machine {
        linker: linker(LINKER_VERSION, 21),
        ..debian()
    };
    let only_rustup = Machine {
        rustup: true,
        ..Machine::default()
    };
    let packages = Install::Packages;
    let cases = [
        (
            "bare Debian",
            bare_debian(),
            Need::Build,
            vec![packages(all), Install::Linker(Debian)],
            Debian,
        ),
        (
            "bare, to test",
            bare_debian(),
            Need::Tests,
            vec![packages(all_and_tools), Install::Linker(Debian)],
            Debian,
        ),
        (
            "only tools missing",
            no_tools.clone(),
            Need::Tests,
            vec![packages(tools)],
            Debian,
        ),
        (
            "the lab needs no browser",
            no_tools.clone(),
            Need::Lab,
            vec![packages(lab_tools)],
            Debian,
        ),
        (
            "rules to compare with",
            no_tools,
            Need::Bench,
            vec![packages(bench_tools)],
            Debian,
        ),
        (
            "a linker needs no LLVM",
            no_compiler,
            Need::Build,
            vec![packages(compiler)],
            Debian,
        ),
        (
            "linker missing",
            no_linker,
            Need::Build,
            vec![Install::Linker(Debian)],
            Debian,
        ),
        (
            "linker of another version",
            other_linker,
            Need::Build,
            vec![Install::Linker(Debian)],
            Debian,
        ),
        (
            "linker with an old LLVM",
            old_linker,
            Need::Build,
            vec![Install::Linker(Debian)],
            Debian,
        ),
        (
            "no Debian",
            only_rustup,
            Need::Build,
            vec![Install::Nightly, Install::Linker(Nightly)],
            Nightly,
        ),
    ];
    for (name, machine, need, steps, compiler) in cases {
        assert_eq!(
            walk(machine, need, |_| true),
            (steps, ready(compiler)),
            "{name}"
        );
    }
}

#[test]
fn other_way_is_tried_when_one_fails() {
    let (steps, end) = walk(bare_debian(), Need::Build, |install| {
        !matches!(install, Install::Packages(_))
    });
    assert_eq!(
        steps[1..],
        [Install::Nightly, Install::Linker(Compiler::Nightly)]
    );
    assert_eq!(end, ready(Compiler::Nightly));
}

#[test]
fn stuck_setup_lists_commands() {
    let (steps, Next::Stuck(help)) = walk(bare_debian(), Need::Tests, |_| false) else {
        panic!("not stuck")
    };
    let tools = Install::Packages(TOOL_PACKAGES.to_vec());
    assert_eq!(
        steps[1..],
        [tools],
        "without tools the other way is closed too"
    );
    for command in [
        "apt-get update",
        "apt-get install -y --no-install-recommends rustc-web cargo-web libstd-rust-web-dev-bpf llvm-22-dev",
        "LLVM_PREFIX=/usr/lib/llvm-22 cargo install bpf-linker --version 0.13.0 --force --debug --target-dir ",
        "/kpx-bpf-linker --no-default-features --features llvm-22\n",
        "rustup toolchain install nightly --component rust-src\n",
        "/kpx-bpf-linker\n",
    ] {
        assert!(help.contains(command), "{command:?} is not in\n{help}");
    }
}

#[test]
fn stuck_setup_names_too_old_linker() {
    let machine = Machine {
        debian: Some(24),
        ..debian()
    };
    let (_, Next::Stuck(help)) = walk(machine, Need::Build, |install| {
        *install == Install::Linker(Compiler::Debian)
    }) else {
        panic!("not stuck")
    };
    assert!(
        help.contains("has LLVM 22 and cannot read what Debian's rustc writes, which has LLVM 24"),
        "{help}"
    );
}

#[test]
fn setup_without_installer_is_stuck() {
    assert!(matches!(
        next(&Machine::default(), Need::Build, &[]),
        Next::Stuck(_)
    ));
    let no_tools = Machine {
        apt: false,
        tools: vec!["ip"],
        ..debian()
    };
    let Next::Stuck(help) = next(&no_tools, Need::Lab, &[]) else {
        panic!("not stuck")
    };
    assert!(
        help.contains("apt-get install -y --no-install-recommends nftables ethtool"),
        "{help}"
    );
}
