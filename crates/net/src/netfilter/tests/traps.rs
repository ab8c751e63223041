//! Corner cases of chains for forwarded packets.

use super::*;

fn refuse() -> Part {
    Part::Refuse("drop".to_owned())
}

fn state(states: u32, equal: bool) -> Part {
    let [mask, value] = [states, 0].map(|bits| bits.to_ne_bytes().to_vec());
    Part::Condition(Condition {
        field: Field::State,
        mask,
        value,
        equal,
    })
}

fn protocol(number: u8, equal: bool) -> Part {
    Part::Condition(Condition {
        field: Field::L4Proto,
        mask: vec![0xff],
        value: vec![number],
        equal,
    })
}

fn device(name: &str, equal: bool) -> Part {
    let value = name.as_bytes().to_vec();
    Part::Condition(Condition {
        field: Field::InName,
        mask: vec![0xff; value.len()],
        value,
        equal,
    })
}

/// Returns a chain that drops packets unless a rule accepts them.
fn dropping(name: &str, rules: Vec<Rule>) -> (ChainName, Chain) {
    let (name, mut chain) = chain(name, rules);
    chain.base.as_mut().unwrap().drops = true;
    (name, chain)
}

const REFUSED: &str = "chain FWD of table ip nat drops packets that its rules do not accept";

#[test]
fn accept_ends_one_base_chain_alone() {
    let later = || chain("FWD2", vec![vec![refuse()]]);
    assert_eq!(
        judged([chain("FWD", vec![vec![ACCEPT], vec![refuse()]]), later()]),
        ["FWD2 1 drop"]
    );
    assert_eq!(
        judged([
            chain("FWD", vec![vec![jump("SUB")]]),
            chain("SUB", vec![vec![ACCEPT]]),
            later()
        ]),
        ["FWD2 1 drop"]
    );
}

#[test]
fn drop_ends_the_packets_way() {
    assert_eq!(
        judged([dropping(
            "FWD",
            vec![vec![refuse(), ACCEPT], vec![refuse()]]
        )]),
        ["FWD 1 drop"]
    );
    let some = vec![from("10.244.1.7/32"), refuse()];
    assert_eq!(
        judged([dropping("FWD", vec![some])]),
        ["FWD 1 drop", REFUSED],
        "others go on"
    );
}

#[test]
fn policy_drops_what_comes_back() {
    let sub = |rules| chain("SUB", rules);
    let cases: [Case; 9] = [
        ("nothing accepts", vec![], vec![], &[REFUSED]),
        (
            "return from a base chain",
            vec![vec![RETURN], vec![ACCEPT]],
            vec![],
            &[REFUSED],
        ),
        (
            "a jump that accepts",
            vec![vec![jump("SUB")]],
            vec![vec![ACCEPT]],
            &[],
        ),
        (
            "a jump that comes back",
            vec![vec![jump("SUB")], vec![ACCEPT]],
            vec![vec![RETURN]],
            &[],
        ),
        (
            "a goto that ends",
            vec![vec![goto("SUB")], vec![ACCEPT]],
            vec![vec![RETURN]],
            &[REFUSED],
        ),
        (
            "a goto at its end",
            vec![vec![goto("SUB")], vec![ACCEPT]],
            vec![],
            &[REFUSED],
        ),
        (
            "an unsure goto",
            vec![vec![Part::Maybe, goto("SUB")], vec![ACCEPT]],
            vec![],
            &[REFUSED],
        ),
        (
            "an unsure accept",
            vec![vec![Part::Maybe, ACCEPT]],
            vec![],
            &[REFUSED],
        ),
        (
            "an unsure accept, then a sure one",
            vec![vec![Part::Maybe, ACCEPT], vec![to(PODS), ACCEPT]],
            vec![],
            &[],
        ),
    ];
    for (name, forward, rules, want) in cases {
        assert_eq!(
            judged([dropping("FWD", forward), sub(rules)]),
            want,
            "{name}"
        );
    }
    assert_eq!(
        judged([
            dropping("FWD", vec![vec![goto("SUB")]]),
            sub(vec![vec![jump("DEEP")], vec![ACCEPT]]),
            chain("DEEP", vec![vec![RETURN]])
        ]),
        [""; 0]
    );
}

#[test]
fn negated_conditions_refuse_the_others() {
    let cases: [(&str, Vec<Part>, bool); 11] = [
        ("other sources", vec![from("!10.244.0.0/16")], false),
        (
            "other sources than some pods'",
            vec![from("!10.244.1.0/25")],
            true,
        ),
        ("another protocol than TCP", vec![protocol(6, false)], true),
        (
            "another one than TCP and UDP",
            vec![protocol(6, false), protocol(17, false)],
            false,
        ),
        ("ICMP", vec![protocol(1, true)], false),
        (
            "another device than Docker's",
            vec![device("docker0\0", false)],
            true,
        ),
        ("Docker's device", vec![device("docker0\0", true)], false),
        (
            "a device with a longer name",
            vec![device("docker0", true)],
            true,
        ),
        (
            "a device that may be a pod's",
            vec![device("veth0\0", true)],
            true,
        ),
        ("an invalid packet", vec![state(1, false)], false),
        ("no invalid packet", vec![state(1, true)], true),
    ];
    for (name, conditions, want) in cases {
        let rule = conditions.into_iter().chain([refuse()]).collect();
        assert_eq!(
            judged([chain("FWD", vec![rule])]),
            if want { vec!["FWD 1 drop"] } else { vec![] },
            "{name}"
        );
    }
}

#[test]
fn states_and_protocols_share_out_the_packets() {
    let established = || vec![state(ESTABLISHED | 4, false), ACCEPT];
    let new = |protocol| {
        vec![
            state(NEW, false),
            super::traps::protocol(protocol, true),
            ACCEPT,
        ]
    };
    assert_eq!(
        judged([dropping("FWD", vec![established(), new(6), new(17)])]),
        [""; 0]
    );
    assert_eq!(
        judged([dropping("FWD", vec![established(), new(6)])]),
        [REFUSED],
        "no rule accepts UDP"
    );
    let in_header = |number: u8| {
        let condition = Condition {
            field: Field::Header(9),
            mask: vec![0xff],
            value: vec![number],
            equal: true,
        };
        vec![Part::Condition(condition), ACCEPT]
    };
    assert_eq!(
        judged([dropping("FWD", vec![in_header(6), in_header(17)])]),
        [""; 0]
    );
    assert_eq!(
        judged([dropping("FWD", vec![new(6), new(17)])]),
        [REFUSED],
        "no rule accepts the second packet"
    );
}

// Conntrack runs after this hook, so every packet may match `INVALID` there.
#[test]
fn states_are_unknown_before_conntrack() {
    let refuses_invalid = || vec![vec![state(1, false), refuse()]];
    assert_eq!(judged([chain("RAW", refuses_invalid())]), ["RAW 1 drop"]);
    assert_eq!(judged([chain("FWD", refuses_invalid())]), [""; 0]);
}

// Conntrack does not track the connection in the ICMP error.
#[test]
fn errors_are_invalid_packets_of_any_router() {
    let errors = |chain: (ChainName, Chain), reporters| {
        let found = found_with_errors(&[chain].into(), PODS, reporters);
        found.obstacles.iter().map(short).collect::<Vec<_>>()
    };
    let invalid = || chain("FWD", vec![vec![state(1, false), refuse()]]);
    assert_eq!(errors(invalid(), PODS), ["FWD 1 drop"]);
    let related = || {
        dropping(
            "FWD",
            vec![vec![state(NEW | ESTABLISHED | 4, false), ACCEPT]],
        )
    };
    assert_eq!(errors(related(), PODS), [REFUSED], "no error is RELATED");
    let of_pods = || dropping("FWD", vec![vec![from(PODS), ACCEPT]]);
    assert_eq!(errors(of_pods(), PODS), [""; 0]);
    assert_eq!(
        errors(of_pods(), "0.0.0.0/0"),
        [REFUSED],
        "a router between nodes"
    );
    let icmp = vec![protocol(1, true), refuse()];
    assert_eq!(errors(chain("FWD", vec![icmp]), PODS), ["FWD 1 drop"]);
}

#[test]
fn first_packets_alone_meet_nat() {
    let nat = || chain("POST", vec![vec![state(ESTABLISHED, false), masquerade()]]);
    assert_eq!(judged([nat()]), [""; 0]);
    assert_eq!(
        judged([chain(
            "FWD",
            vec![vec![state(ESTABLISHED, false), refuse()]]
        )]),
        ["FWD 1 drop"]
    );
}

#[test]
fn mark_passes_from_filters_to_nat() {
    let nat = || chain("POST", vec![vec![mark(0x4000, 0x4000, true), masquerade()]]);
    assert_eq!(
        judged([chain("FWD", vec![vec![Part::SetMark(None), ACCEPT]]), nat()]),
        ["FWD 1 set the mark", "POST 1"]
    );
}

#[test]
fn chains_of_devices_count_unless_none_is_a_pods() {
    let name = ChainName {
        family: TableFamily::Netdev,
        ..named("filter", "ingress")
    };
    let base = Base {
        hook: Hook::Device,
        priority: 0,
        drops: false,
        is_nat: false,
    };
    let of = |devices: &[&str], uses, drops| {
        let devices = devices.iter().map(|name| (*name).to_owned()).collect();
        judged([(
            name.clone(),
            Chain {
                base: Some(Base { drops, ..base }),
                devices,
                uses,
                rules: vec![],
            },
        )])
    };
    let counts =
        ["chain ingress of table netdev filter may match packets at pods' devices, rules: 2"];
    assert_eq!(of(&["eth0", "veth0"], 2, false), counts);
    assert_eq!(of(&[], 2, false), counts, "no names");
    assert_eq!(of(&["eth0", "docker0"], 2, true), [""; 0]);
    assert_eq!(of(&["veth0"], 0, false), [""; 0]);
    assert_eq!(of(&["veth0"], 0, true).len(), 1, "its policy drops");
}

#[test]
fn harmless_chains_have_rules() {
    let chains = [
        chain("FWD", vec![vec![ACCEPT]]),
        chain("FWD2", vec![]),
        chain("SUB", vec![vec![refuse()]]),
    ];
    let found = found(&chains.into_iter().collect(), PODS);
    assert_eq!(found.harmless, [named("nat", "FWD")].into());
    let refused = [chain("FWD", vec![vec![protocol(17, true), refuse()]])];
    assert_eq!(
        super::found(&refused.into_iter().collect(), PODS).harmless,
        [].into(),
        "it refuses UDP"
    );
}

#[test]
fn open_connections_are_judged_between_all_addresses() {
    let judged = |rules: Vec<Rule>| {
        let rules = [
            dropping("FWD", rules),
            chain("POST", vec![vec![masquerade()]]),
        ]
        .into_iter()
        .collect();
        Netfilter {
            rules,
            legacy: Legacy::default(),
            follows: false,
            takes_up: true,
        }
        .judge_open()
        .against
    };
    assert_eq!(
        judged(vec![vec![ACCEPT]]),
        [""; 0],
        "NAT is done with the first packet"
    );
    assert_eq!(
        judged(vec![vec![state(ESTABLISHED, false), ACCEPT]]),
        [""; 0]
    );
    assert_eq!(judged(vec![vec![from("10.244.0.0/16"), ACCEPT]]), [REFUSED]);
    for unsure in [
        device("eth0\0", true),
        mark(1, 1, true),
        protocol(132, true),
    ] {
        assert_eq!(
            judged(vec![vec![unsure, refuse()], vec![ACCEPT]]),
            ["rule 1 of chain FWD of table ip nat may drop"]
        );
    }
}

#[test]
fn rules_of_every_table_but_those_of_devices_may_have_connections_followed() {
    let may = |family, legacy: Legacy| {
        let (name, chain) = chain("FWD", vec![vec![ACCEPT]]);
        let rules = [(ChainName { family, ..name }, chain)]
            .into_iter()
            .collect();
        Netfilter {
            rules,
            legacy,
            follows: false,
            takes_up: true,
        }
        .may_follow_connections()
    };
    assert!(may(TableFamily::Ip, Legacy::default()));
    assert!(!may(TableFamily::Netdev, Legacy::default()));
    assert!(may(TableFamily::Netdev, Legacy::of(["nat\n", ""])));
    let local = Chain {
        base: Some(Base {
            hook: Hook::Host,
            priority: 0,
            drops: false,
            is_nat: false,
        }),
        uses: 1,
        ..Chain::default()
    };
    let rules = [(named("filter", "INPUT"), local)].into_iter().collect();
    assert!(
        Netfilter {
            rules,
            legacy: Legacy::default(),
            follows: false,
            takes_up: true
        }
        .may_follow_connections(),
        "of the host alone"
    );
}
