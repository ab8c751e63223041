//! Traces packets through handwritten rules. Tests with recorded rule sets are in the submodules.

mod bytes;
mod filters;
mod fixtures;
mod record;
mod refusals;
mod traps;

use std::{iter, slice};

use super::model::{
    Base, Chain, ChainName, Condition, Field, Hook, Obstacle, Part, Rule, Ruleset, TableFamily,
    Verdict,
};
use super::*;

const PODS: &str = "10.244.1.0/24";
/// Devices that do not belong to pods.
const OTHERS: [&str; 3] = ["docker0", "eth0", "lo"];
/// The offsets of the addresses in the IPv4 header.
const SOURCE: usize = 12;
const DESTINATION: usize = 16;

fn nets(nets: &str) -> Vec<IpNet> {
    nets.split_whitespace()
        .map(|net| net.parse().unwrap())
        .collect()
}

/// Returns the condition that an address is in a network (`10.244.0.0/16`) or outside
/// (`!10.244.0.0/16`).
fn address(offset: usize, net: &str) -> Part {
    let (equal, net) = net
        .strip_prefix('!')
        .map_or((true, net), |net| (false, net));
    let IpNet::V4(net) = net.parse().unwrap() else {
        panic!("{net} is not of IPv4")
    };
    let [mask, value] = [net.netmask(), net.network()].map(|addr| addr.octets().to_vec());
    Part::Condition(Condition {
        field: Field::Header(offset),
        mask,
        value,
        equal,
    })
}

fn from(net: &str) -> Part {
    address(SOURCE, net)
}

fn to(net: &str) -> Part {
    address(DESTINATION, net)
}

fn mark(mark: u32, mask: u32, equal: bool) -> Part {
    let [mask, value] = [mask, mark].map(|bits| bits.to_ne_bytes().to_vec());
    Part::Condition(Condition {
        field: Field::Mark,
        mask,
        value,
        equal,
    })
}

fn jump(chain: &str) -> Part {
    Part::Verdict(Verdict::Jump(chain.to_owned()))
}

fn goto(chain: &str) -> Part {
    Part::Verdict(Verdict::Goto(chain.to_owned()))
}

fn masquerade() -> Part {
    Part::Change("masquerade".to_owned())
}

const ACCEPT: Part = Part::Verdict(Verdict::Accept);
const RETURN: Part = Part::Verdict(Verdict::Return);
const BREAK: Part = Part::Verdict(Verdict::Break);

/// Returns a chain of table `ip nat`. Only RAW, PRE, FWD and POST have a hook; FWD is not a NAT
/// chain.
fn chain(name: &str, rules: Vec<Rule>) -> (ChainName, Chain) {
    let hook = match name {
        "RAW" => Some((Hook::Prerouting, -300)),
        "PRE" => Some((Hook::Prerouting, 0)),
        "FWD" | "FWD2" => Some((Hook::Forward, 0)),
        "POST" => Some((Hook::Postrouting, 0)),
        _ => None,
    };
    let is_nat = ["PRE", "POST"].contains(&name);
    let base = hook.map(|(hook, priority)| Base {
        hook,
        priority,
        drops: false,
        is_nat,
    });
    (
        named("nat", name),
        Chain {
            base,
            uses: rules.len() as u32,
            rules,
            ..Chain::default()
        },
    )
}

fn named(table: &str, chain: &str) -> ChainName {
    ChainName {
        family: TableFamily::Ip,
        table: table.to_owned(),
        chain: chain.to_owned(),
    }
}

/// Returns a rule's position and effect without its table; any other obstacle in full.
fn short(obstacle: &Obstacle) -> String {
    match obstacle {
        Obstacle::Rule {
            chain,
            number,
            what,
        } => format!("{} {number} {what}", chain.chain),
        Obstacle::Policy(_) | Obstacle::Device(..) | Obstacle::TooMany => obstacle.to_string(),
    }
}

/// Returns the result for bypass connections between `pods`, without ICMP errors.
fn found(rules: &Ruleset, pods: &str) -> Found {
    found_with_errors(rules, pods, "")
}

/// Returns the result for bypass connections and for ICMP errors from `reporters`.
fn found_with_errors(rules: &Ruleset, pods: &str, reporters: &str) -> Found {
    let reporters = &nets(reporters)[..];
    let nets = nets(pods);
    let others = OTHERS.map(str::to_owned).into();
    let states = [NEW, ESTABLISHED];
    let protocols = [6, 17];
    let devices = Devices {
        incoming: Names::AnyBut(&others),
        outgoing: Names::AnyBut(&others),
    };
    let asked = Asked::new(&nets, Mark::ZERO, &protocols, devices);
    walk::walk(
        rules,
        &Asked {
            states: &states,
            reporters,
            ..asked
        },
    )
}

/// Returns the obstacles in these chains, such as `POST 2` for a rule that may masquerade.
fn judged(chains: impl IntoIterator<Item = (ChainName, Chain)>) -> Vec<String> {
    let found = found(&chains.into_iter().collect(), PODS);
    found
        .obstacles
        .iter()
        .map(|obstacle| short(obstacle).replace(" masquerade", ""))
        .collect()
}

/// A test's name, the rules of POST and SUB, and the obstacles.
type Case = (&'static str, Vec<Rule>, Vec<Rule>, &'static [&'static str]);

#[test]
fn conditions_decide_which_rules_apply() {
    let cases: [(&str, Vec<Part>, bool); 17] = [
        ("no condition", vec![], true),
        ("the pods' source", vec![from("10.244.0.0/16")], true),
        ("one pod's source", vec![from("10.244.1.7/32")], true),
        ("another source", vec![from("172.17.0.0/16")], false),
        ("any source", vec![from("0.0.0.0/0")], true),
        ("no source", vec![from("!0.0.0.0/0")], false),
        ("a destination outside", vec![to("!10.244.0.0/16")], false),
        (
            "a destination that some pods have not",
            vec![to("!10.244.1.0/25")],
            true,
        ),
        ("a destination elsewhere", vec![to("!224.0.0.0/4")], true),
        (
            "two sources that exclude each other",
            vec![from("10.244.1.7/32"), from("10.244.1.8/32")],
            false,
        ),
        (
            "a source inside the first",
            vec![from("10.244.1.0/25"), from("10.244.1.7/32")],
            true,
        ),
        (
            "a source not outside of the first",
            vec![from("10.244.1.0/25"), from("!10.244.1.0/24")],
            false,
        ),
        ("a mark", vec![mark(0x4000, 0x4000, true)], false),
        ("no mark", vec![mark(0x4000, 0x4000, false)], true),
        ("an unmarked bit", vec![mark(0, 0x4000, true)], true),
        (
            "a mark outside of its mask",
            vec![mark(0x4001, 0x4000, true)],
            false,
        ),
        (
            "an unknown condition, then a false one",
            vec![Part::Maybe, to("10.96.0.0/12")],
            false,
        ),
    ];
    for (name, conditions, want) in cases {
        let rule = conditions.into_iter().chain([masquerade()]).collect();
        let want = if want { vec!["POST 1"] } else { vec![] };
        assert_eq!(judged([chain("POST", vec![rule])]), want, "{name}");
    }
}

#[test]
fn masks_with_gaps_decide_only_by_their_leading_bits() {
    let masked = |mask: [u8; 4], value: [u8; 4], equal| {
        let condition = Condition {
            field: Field::Header(SOURCE),
            mask: mask.into(),
            value: value.into(),
            equal,
        };
        judged([chain(
            "POST",
            vec![vec![Part::Condition(condition), masquerade()]],
        )]) == ["POST 1"]
    };
    assert!(
        masked([255, 255, 0, 255], [10, 244, 0, 7], true),
        "some sources end so"
    );
    assert!(
        masked([255, 255, 0, 255], [10, 244, 0, 7], false),
        "others do not"
    );
    assert!(
        !masked([255, 255, 0, 255], [10, 96, 0, 7], true),
        "no source begins so"
    );
    assert!(
        masked([0, 0, 1, 0], [0, 0, 1, 0], false),
        "no leading bit says nothing"
    );
    assert!(
        !masked([255, 255, 0, 0], [10, 244, 1, 0], true),
        "no value has bits outside of the mask"
    );
}

#[test]
fn one_comparison_covers_neighbouring_fields() {
    let compared = |offset, value: &[u8], equal| {
        let condition = Condition {
            field: Field::Header(offset),
            mask: vec![255; value.len()],
            value: value.into(),
            equal,
        };
        judged([chain(
            "POST",
            vec![vec![Part::Condition(condition), masquerade()]],
        )]) == ["POST 1"]
    };
    assert!(
        compared(12, &[10, 244, 1, 7, 10, 244, 1, 8], true),
        "both are pods"
    );
    assert!(
        !compared(12, &[10, 244, 1, 7, 10, 96, 0, 10], true),
        "the destination is none"
    );
    assert!(
        compared(12, &[10, 244, 1, 7, 10, 244, 1, 8], false),
        "other pods differ"
    );
    assert!(
        compared(9, &[17, 0, 0, 10, 244], true),
        "the protocol and the checksum may be any"
    );
    assert!(
        !compared(9, &[17, 0, 0, 10, 96], true),
        "the source's first bytes differ"
    );
    assert!(compared(9, &[6], false), "the protocol may be another");
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn verdicts_lead_through_the_chains() {
    let masq = || vec![masquerade()];
    let cases: [Case; 16] = [
        ("accept ends", vec![vec![ACCEPT], masq()], vec![], &[]),
        (
            "accept of some goes on",
            vec![vec![from("10.244.1.7/32"), ACCEPT], masq()],
            vec![],
            &["POST 2"],
        ),
        (
            "accept of all ends",
            vec![vec![to("10.244.0.0/16"), ACCEPT], masq()],
            vec![],
            &[],
        ),
        (
            "accept of none goes on",
            vec![vec![to("10.96.0.0/12"), ACCEPT], masq()],
            vec![],
            &["POST 2"],
        ),
        (
            "break goes on",
            vec![vec![BREAK, masquerade()], masq()],
            vec![],
            &["POST 2"],
        ),
        (
            "return from a base chain ends",
            vec![vec![RETURN], masq()],
            vec![],
            &[],
        ),
        (
            "a jump comes back",
            vec![vec![jump("SUB")], masq()],
            vec![],
            &["POST 2"],
        ),
        (
            "a jump into accept ends",
            vec![vec![jump("SUB")], masq()],
            vec![vec![ACCEPT], masq()],
            &[],
        ),
        (
            "a jump into return comes back",
            vec![vec![jump("SUB")], masq()],
            vec![vec![RETURN], masq()],
            &["POST 2"],
        ),
        (
            "a jump of some comes back for the others",
            vec![vec![Part::Maybe, jump("SUB")], masq()],
            vec![vec![ACCEPT]],
            &["POST 2"],
        ),
        (
            "a jump of none does not look",
            vec![vec![from("192.0.2.0/24"), jump("SUB")]],
            vec![masq()],
            &[],
        ),
        (
            "goto does not come back",
            vec![vec![goto("SUB")], masq()],
            vec![],
            &[],
        ),
        (
            "goto of some goes on for the others",
            vec![vec![Part::Maybe, goto("SUB")], masq()],
            vec![],
            &["POST 2"],
        ),
        (
            "goto looks",
            vec![vec![goto("SUB")]],
            vec![masq()],
            &["SUB 1"],
        ),
        (
            "the source is narrower inside",
            vec![vec![from("10.244.1.7/32"), jump("SUB")]],
            vec![
                vec![from("!10.244.1.0/25"), masquerade()],
                vec![from("10.244.1.8/32"), masquerade()],
            ],
            &[],
        ),
        (
            "the source is as wide as before outside",
            vec![
                vec![from("10.244.1.7/32"), jump("SUB")],
                vec![from("10.244.1.8/32"), masquerade()],
            ],
            vec![],
            &["POST 2"],
        ),
    ];
    for (name, post, sub, want) in cases {
        assert_eq!(
            judged([chain("POST", post), chain("SUB", sub)]),
            want,
            "{name}"
        );
    }
}

#[test]
fn mark_that_a_rule_may_set_is_unknown_from_then_on() {
    let asks = || vec![mark(0x4000, 0x4000, true), masquerade()];
    let set = "SUB 1 set the mark";
    let sub = |rule: Vec<Part>| chain("SUB", vec![rule]);
    let cases: [(&str, Vec<Rule>, Rule, &[&str]); 5] = [
        (
            "in a chain that comes back",
            vec![vec![jump("SUB")], asks()],
            vec![Part::SetMark(None)],
            &["POST 2", set],
        ),
        (
            "by some packets",
            vec![vec![Part::Maybe, jump("SUB")], asks()],
            vec![Part::Maybe, Part::SetMark(None)],
            &["POST 2", set],
        ),
        (
            "before a condition that does not hold",
            vec![vec![jump("SUB")], asks()],
            vec![Part::SetMark(None), to("10.96.0.0/12"), ACCEPT],
            &["POST 2", set],
        ),
        (
            "by no packet",
            vec![vec![jump("SUB")], asks()],
            vec![to("10.96.0.0/12"), Part::SetMark(None)],
            &[],
        ),
        (
            "by packets that leave",
            vec![vec![jump("SUB")], asks()],
            vec![Part::SetMark(None), ACCEPT],
            &[set],
        ),
    ];
    for (name, post, rule, want) in cases {
        assert_eq!(judged([chain("POST", post), sub(rule)]), want, "{name}");
    }
}

#[test]
fn mark_survives_from_the_first_hook_to_the_last() {
    let pre = |rule| chain("PRE", vec![rule]);
    let post = || chain("POST", vec![vec![mark(0x4000, 0x4000, true), masquerade()]]);
    assert_eq!(
        judged([pre(vec![Part::SetMark(None), ACCEPT]), post()]),
        ["POST 1", "PRE 1 set the mark"]
    );
    assert_eq!(judged([pre(vec![ACCEPT]), post()]), [""; 0]);
    let late = chain("POST", vec![vec![Part::SetMark(None)]]);
    let early = chain("PRE", vec![vec![mark(0x4000, 0x4000, true), masquerade()]]);
    assert_eq!(
        judged([early, late]),
        ["POST 1 set the mark"],
        "the hooks come in the packet's order"
    );
}

#[test]
fn only_hooked_chains_of_other_tables_count() {
    assert_eq!(judged([chain("SUB", vec![vec![masquerade()]])]), [""; 0]);
    let (_, post) = chain("POST", vec![vec![masquerade()]]);
    assert_eq!(
        judged([(named("kube-proxy", "nat-postrouting"), post.clone())]),
        [""; 0]
    );
    let other = ChainName {
        family: TableFamily::Ip6,
        ..named("nat", "POST")
    };
    assert_eq!(
        judged([(other.clone(), post.clone())]),
        [""; 0],
        "no pod has an address of IPv6"
    );
    let rules = [(other, post)].into_iter().collect();
    let lines: Vec<_> = found(&rules, "fd00::/64")
        .obstacles
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        lines,
        ["rule 1 of chain POST of table ip6 nat may masquerade"]
    );
}

#[test]
fn policy_concerns_packets_that_no_rule_accepts() {
    let drops = |rule: Rule| {
        let (name, mut chain) = chain("POST", vec![rule]);
        chain.base.as_mut().unwrap().drops = true;
        judged([(name, chain)])
    };
    let refused = ["chain POST of table ip nat drops packets that its rules do not accept"];
    assert_eq!(drops(vec![from("10.244.1.7/32"), ACCEPT]), refused);
    assert_eq!(drops(vec![RETURN]), refused);
    assert_eq!(drops(vec![to(PODS), ACCEPT]), [""; 0]);
}

#[test]
fn walk_ends_in_any_rule_set() {
    let too_many = "the rules are too many to follow";
    assert_eq!(
        judged([chain("POST", vec![vec![jump("POST")]])]),
        [too_many],
        "a loop"
    );
    let twice = |next: usize| vec![vec![Part::Maybe, jump(&next.to_string())]; 2];
    let many = (1..20).map(|at| chain(&at.to_string(), twice(at + 1)));
    assert_eq!(
        judged(
            iter::once(chain("POST", twice(1)))
                .chain(many)
                .chain([chain("20", vec![])])
        ),
        [too_many]
    );
    let missing = ["POST 1 call chain SUB, which is not in the kernel's list"];
    assert_eq!(judged([chain("POST", vec![vec![jump("SUB")]])]), missing);
}

#[test]
fn answer_has_few_lines() {
    let lines = |count: usize| (0..count).map(|line| line.to_string()).collect::<Vec<_>>();
    assert_eq!(shortened(lines(10), 10), lines(10));
    assert_eq!(
        shortened(lines(12), 10),
        [lines(10), vec!["and 2 more".to_owned()]].concat()
    );
}

// The rule of a skipped message would count as harmless.
#[test]
fn broken_messages_are_errors() {
    let chain = Message {
        kind: NFT_MSG_NEWCHAIN,
        bytes: vec![NFPROTO_IPV4, 0, 0, 1],
    };
    let cut = Message {
        kind: NFT_MSG_NEWCHAIN,
        bytes: vec![NFPROTO_IPV4, 0, 0, 1, 9, 0, 1, 0, b'n'],
    };
    let short = Message {
        kind: NFT_MSG_NEWRULE,
        bytes: vec![NFPROTO_IPV4],
    };
    for message in [chain, cut, short] {
        assert!(ruleset(slice::from_ref(&message)).is_err(), "{message:?}");
    }
    assert_eq!(ruleset(&[]).unwrap(), Ruleset::new());
}
