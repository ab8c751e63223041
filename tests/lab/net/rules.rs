//! Rules: only packets of the host's own sockets to a frontend go to the anchor.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use proxy_common::addr::Proto;
use proxy_net::route::{Report as RouteReport, Route, Routes};
use proxy_net::rule::{self, Report, Rule, Rules};
use proxy_net::{Handle, anchor};

use crate::net::{handle, in_netns, ip, run};

#[test]
fn rules_are_what_is_wanted_and_foreign_ones_stay() {
    in_netns(async {
        node().await?;
        // A foreign rule at kpx's preference, and a rule with kpx's protocol at another preference.
        ip("rule add pref 75 iif lo to 203.0.113.9 lookup 100").await?;
        ip("rule add pref 90 iif lo to 203.0.113.9 lookup 100 protocol 75").await?;
        ip("-6 rule add pref 75 iif lo to 2001:db8::9 lookup 100").await?;
        let foreign = all_rules().await?;
        let mut rules = Rules::open(handle()?).await?;

        let want = wanted(&[
            ("203.0.113.7", Proto::TCP, 80),
            ("203.0.113.7", Proto::UDP, 53),
            ("203.0.113.8", Proto::SCTP, 7),
            ("2001:db8::7", Proto::TCP, 443),
        ]);
        let report = rules.reconcile(&want).await?;
        ensure!(
            report
                == Report {
                    added: 4,
                    ..Report::default()
                },
            "{report:?}"
        );
        let ours = [
            "iif lo to 203.0.113.7 tcp 80",
            "iif lo to 203.0.113.7 udp 53",
            "iif lo to 203.0.113.8 sctp 7",
            "iif lo to 2001:db8::7 tcp 443",
        ];
        ensure!(
            our_rules().await? == sorted(&ours),
            "{:?}",
            our_rules().await?
        );
        ensure!(
            rules.reconcile(&want).await? == Report::default(),
            "not idle"
        );
        let mut next_agent = Rules::open(handle()?).await?;
        ensure!(
            next_agent.reconcile(&want).await? == Report::default(),
            "the next agent does it all again"
        );

        let other = wanted(&[
            ("203.0.113.7", Proto::TCP, 81),
            ("2001:db8::7", Proto::TCP, 443),
        ]);
        let report = rules.reconcile(&other).await?;
        ensure!(
            report
                == Report {
                    added: 1,
                    deleted: 3,
                    ..Report::default()
                },
            "{report:?}"
        );
        ensure!(
            our_rules().await? == sorted(&["iif lo to 203.0.113.7 tcp 81", ours[3]]),
            "{:?}",
            our_rules().await?
        );

        ip("rule del pref 75 iif lo to 203.0.113.7 ipproto tcp dport 81").await?;
        ensure!(
            rules.reconcile(&other).await? == Report::default(),
            "it asks the kernel each time"
        );
        let report = rules.verify(&other).await?;
        ensure!(
            report
                == Report {
                    added: 1,
                    ..Report::default()
                },
            "{report:?}"
        );

        // A foreign program has deleted a rule and added a rule already: kpx ignores both.
        ip("rule del pref 75 iif lo to 203.0.113.7 ipproto tcp dport 81").await?;
        ip("rule add pref 75 iif lo to 203.0.113.7 ipproto tcp dport 82 lookup 7041144 protocol 75").await?;
        let report = rules
            .reconcile(&wanted(&[("203.0.113.7", Proto::TCP, 82)]))
            .await?;
        ensure!(
            report
                == Report {
                    added: 1,
                    deleted: 2,
                    ..Report::default()
                },
            "{report:?}"
        );
        ensure!(
            our_rules().await? == ["iif lo to 203.0.113.7 tcp 82"],
            "{:?}",
            our_rules().await?
        );

        rule::remove(&handle()?).await?;
        ensure!(all_rules().await? == foreign, "{}", all_rules().await?);
        rule::remove(&handle()?)
            .await
            .context("remove what is not there")
    });
}

#[test]
fn remains_of_another_version_are_cleared() {
    in_netns(async {
        node().await?;
        ip("rule add pref 75 iif lo to 203.0.113.0/24 lookup 7041144 protocol 75").await?;
        ip("rule add pref 75 iif lo to 203.0.113.7 ipproto tcp dport 80-90 lookup 7041144 protocol 75").await?;
        ip("-6 rule add pref 75 iif lo to 2001:db8::7 ipproto tcp dport 80 lookup 99 protocol 75")
            .await?;
        ip("rule add pref 75 iif lo to 203.0.113.7 ipproto tcp dport 80 lookup 7041144 protocol 75").await?;
        let mut rules = Rules::open(handle()?).await?;
        let report = rules
            .reconcile(&wanted(&[("203.0.113.7", Proto::TCP, 80)]))
            .await?;
        ensure!(report == Report::default(), "{report:?}");
        ensure!(
            our_rules().await? == ["iif lo to 203.0.113.7 tcp 80"],
            "{:?}",
            our_rules().await?
        );
        Ok(())
    });
}

#[test]
fn only_the_hosts_own_packets_to_a_frontend_take_the_route() {
    in_netns(async {
        node().await?;
        std::fs::write("/proc/sys/net/ipv4/conf/all/forwarding", "1")?;
        let handle = handle()?;
        let anchor = anchor::ensure(&handle, 1500).await?.anchor;
        let defaults = lead(&handle, anchor.ifindex).await?;
        ensure!(
            defaults
                == RouteReport {
                    added: 2,
                    ..RouteReport::default()
                },
            "{defaults:?}"
        );
        for (packet, way) in [
            (
                "203.0.113.7 ipproto tcp dport 80",
                "dev kpx0 table 7041144 src 192.0.2.1",
            ),
            (
                "203.0.113.7 ipproto tcp dport 81",
                "via 192.0.2.254 dev eth0 src 192.0.2.1",
            ),
            (
                "203.0.113.7 ipproto udp dport 80",
                "via 192.0.2.254 dev eth0 src 192.0.2.1",
            ),
            ("203.0.113.7", "via 192.0.2.254 dev eth0 src 192.0.2.1"),
            (
                "203.0.113.8 ipproto tcp dport 80",
                "via 192.0.2.254 dev eth0 src 192.0.2.1",
            ),
            (
                "203.0.113.8 mark 0x4b000001",
                "dev kpx0 table 7041144 src 192.0.2.1",
            ),
            // Forwarded.
            (
                "203.0.113.7 from 192.0.2.99 iif eth0 ipproto tcp dport 80",
                "from 192.0.2.99 via 192.0.2.254 dev eth0",
            ),
            (
                "2001:db8::7 ipproto tcp dport 80",
                "from :: dev kpx0 table 7041144 proto 75 src fd00::1",
            ),
            (
                "2001:db8::7 ipproto tcp dport 81",
                "from :: via fd00::fe dev eth0 src fd00::1",
            ),
            // The host's own address stays local.
            (
                "192.0.2.1 ipproto tcp dport 80",
                "dev lo table local src 192.0.2.1",
            ),
        ] {
            let family = if packet.contains(':') { "-6" } else { "-4" };
            let answer =
                String::from_utf8(run(&format!("{family} route get {packet}"), &[]).await?)?;
            ensure!(answer.contains(way), "{packet}: {answer}, not {way}");
        }
        Ok(())
    });
}

#[test]
fn rules_do_no_harm_where_ipv6_is_off() {
    in_netns(async {
        for device in ["all", "default", "lo"] {
            std::fs::write(
                format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"),
                "1",
            )?;
        }
        ip("link set lo up").await?;
        let mut rules = Rules::open(handle()?).await?;
        let want = wanted(&[
            ("203.0.113.7", Proto::TCP, 80),
            ("2001:db8::7", Proto::TCP, 80),
        ]);
        let report = rules.reconcile(&want).await?;
        ensure!(report.refused.is_empty(), "{report:?}");
        ensure!(
            our_rules()
                .await?
                .contains(&"iif lo to 203.0.113.7 tcp 80".to_owned())
        );
        rule::remove(&handle()?).await
    });
}

/// Routes tcp:80 of an address of each family and of the node, and marked packets, to the anchor.
async fn lead(handle: &Handle, anchor: u32) -> Result<RouteReport> {
    let default = |dst: &str, src: &str| {
        Ok(Route {
            dst: dst.parse()?,
            src: Some(src.parse()?),
        })
    };
    let defaults: Result<BTreeSet<Route>> = [
        default("0.0.0.0/0", "192.0.2.1"),
        default("::/0", "fd00::1"),
    ]
    .into_iter()
    .collect();
    let mut rules = Rules::open(handle.clone()).await?;
    let frontends = ["203.0.113.7", "2001:db8::7", "192.0.2.1"].map(|addr| (addr, Proto::TCP, 80));
    let mut want = wanted(&frontends);
    want.insert(Rule::Back);
    let report = rules.reconcile(&want).await?;
    ensure!(
        report
            == Report {
                added: 4,
                ..Report::default()
            },
        "{report:?}"
    );
    ensure!(
        Rules::open(handle.clone()).await?.reconcile(&want).await? == Report::default(),
        "not read as it was made"
    );
    Routes::open(handle.clone(), rule::TABLE, anchor)
        .await?
        .reconcile(&defaults?)
        .await
}

/// Makes eth0 with 192.0.2.1/24 and fd00::1/64, and default routes.
async fn node() -> Result<()> {
    crate::net::node().await?;
    ip("route add default via 192.0.2.254").await?;
    ip("-6 route add default via fd00::fe").await
}

fn wanted(rules: &[(&str, Proto, u16)]) -> BTreeSet<Rule> {
    rules
        .iter()
        .map(|&(addr, proto, port)| Rule::To(addr.parse().expect("an address"), proto, port))
        .collect()
}

/// Returns the rules at kpx's preference and with its protocol, as `ip` shows them, sorted.
async fn our_rules() -> Result<Vec<String>> {
    let all = all_rules().await?;
    let ours = all
        .lines()
        .filter(|line| line.starts_with("75:") && line.contains(" lookup 7041144 proto 75"));
    let text = |line: &str| -> Option<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let after = |word| {
            words
                .iter()
                .position(|w| *w == word)
                .and_then(|at| words.get(at + 1))
                .copied()
        };
        let dst = after("to")?;
        let iif = after("iif")?;
        Some(format!(
            "iif {iif} to {dst} {} {}",
            after("ipproto").unwrap_or("-"),
            after("dport").unwrap_or("-")
        ))
    };
    Ok(sorted(&ours.filter_map(text).collect::<Vec<_>>()))
}

async fn all_rules() -> Result<String> {
    let v4 = run("-4 rule show", &[]).await?;
    let v6 = run("-6 rule show", &[]).await?;
    Ok(String::from_utf8(v4)? + &String::from_utf8(v6)?)
}

fn sorted(texts: &[impl ToString]) -> Vec<String> {
    let mut texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
    texts.sort();
    texts
}
