//! Tables of legacy iptables, which the kernel creates for any program that lists them, and whose
//! changes it does not announce.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use testbed::agent;
use testbed::cases::Running;
use testbed::lab::Family;

use super::fixture::Fixture;
use super::{says, until_bypass};

/// The tools, and the files that list the tables of a thread's namespace.
const TOOLS: [(&str, &str); 2] = [
    ("iptables-legacy", "/proc/thread-self/net/ip_tables_names"),
    ("ip6tables-legacy", "/proc/thread-self/net/ip6_tables_names"),
];

/// The tables stay, without rules.
pub(super) fn only_legacy_rules_and_policies_prevent_bypass(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    let node = &fixture.lab.n1.host.ns;
    for (tool, list) in TOOLS {
        let run = |words: &str| node.exec(Command::new(tool).arg("-w").args(words.split(' ')));
        for table in ["filter", "nat", "mangle", "raw", "security"] {
            run(&format!("-t {table} -L"))?;
        }
        ensure!(
            node.read(list)?.lines().count() == 5,
            "{}",
            node.read(list)?
        );
        // A chain for the host alone, and an unused chain, like the kubelet's.
        run("-A INPUT -j ACCEPT")?;
        run("-t mangle -N KUBE-KUBELET-CANARY")?;
        let cases = [
            (
                "-P FORWARD DROP",
                "-P FORWARD ACCEPT",
                format!("chain FORWARD of table filter of {tool}"),
            ),
            (
                "-A FORWARD -j ACCEPT",
                "-F FORWARD",
                format!("because table filter of {tool}"),
            ),
            (
                "-t nat -A POSTROUTING -j RETURN",
                "-t nat -F",
                format!("because table nat of {tool}"),
            ),
        ];
        for (comes, goes, said) in cases {
            run(comes)?;
            says(agent, &said)?;
            run(goes)?;
            says(agent, "auto: on; bypass for connections")?;
        }
        for family in Family::ALL {
            until_bypass(fixture, agent, family).with_context(|| tool)?;
        }
        run("-D INPUT -j ACCEPT")?;
        run("-t mangle -X KUBE-KUBELET-CANARY")?;
    }
    Ok(())
}

/// The kernel creates a table at its first request, and keeps it until the next boot.
#[test]
fn kpx_makes_no_tables_of_legacy_iptables() -> Result<()> {
    let fixture = Fixture::new()?;
    let node = &fixture.lab.n1.host.ns;
    let lists =
        || -> Result<Vec<String>> { TOOLS.iter().map(|(_, list)| node.read(list)).collect() };
    let asks = || -> Result<()> {
        let agent = fixture.start("auto")?;
        says(&agent, "bypass for connections")?;
        agent::kpx(node, "check")?;
        agent.stop()?;
        for arguments in ["cleanup --kube-proxy --force", "cleanup --drain", "cleanup"] {
            let run_dir = fixture.lab.dir().join("n1-run");
            let bpf_dir = node.bpf_dir();
            let dirs = format!(
                "--run-dir {} --bpf-dir {}",
                run_dir.display(),
                bpf_dir.display()
            );
            let output = agent::kpx(node, &format!("{arguments} {dirs}"))?;
            ensure!(
                output.status.success(),
                "{arguments}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    };
    asks()?;
    ensure!(lists()? == ["", ""], "{:?}", lists()?);
    node.exec(Command::new("iptables-legacy").args(["-t", "raw", "-L"]))?;
    asks()?;
    ensure!(lists()? == ["raw\n", ""], "{:?}", lists()?);
    Ok(())
}
