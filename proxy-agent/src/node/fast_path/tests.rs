//! Tests which packets bypass the stack, by the operator's choice and the node's state.

use super::super::bypass_connections::Among;
use super::*;

fn list(rules: &[&str]) -> Vec<String> {
    rules.iter().map(|rule| (*rule).to_owned()).collect()
}

#[test]
fn rules_decide_which_packets_skip_the_stack() {
    let none = |why: &[&str]| Bypass::None(list(why));
    let all = Bypass::Some {
        among: Among::All,
        not_far: None,
    };
    let cases = [
        (FastPath::Off, Some(list(&[])), all.clone(), false, "off"),
        (
            FastPath::On,
            None,
            none(&[]),
            false,
            "off until the devices are listed",
        ),
        (
            FastPath::On,
            Some(list(&[])),
            all.clone(),
            true,
            "on; bypass for connections of this node's pods to pods",
        ),
        (
            FastPath::On,
            Some(list(&["chain a"])),
            none(&["rule 1"]),
            true,
            "on, past chain a; connections are opened through the stack, because rule 1",
        ),
        (
            FastPath::On,
            Some(list(&["chain a"])),
            Bypass::Some {
                among: Among::PodCidrs(Vec::new()),
                not_far: Some("rule 3".to_owned()),
            },
            true,
            "on, past chain a; bypass for connections between this node's pods with addresses of its podCIDRs; those to other \
             nodes take the stack, because rule 3",
        ),
        (
            FastPath::Auto,
            None,
            none(&[]),
            false,
            "off until the devices are listed",
        ),
        (
            FastPath::Auto,
            Some(list(&[])),
            all,
            true,
            "auto: on, no rules found; bypass for connections of this node's pods to pods",
        ),
        (
            FastPath::Auto,
            Some(list(&["chain a"])),
            none(&["chain a", "rule 1"]),
            false,
            "auto: off, because chain a; rule 1",
        ),
        (
            FastPath::Auto,
            Some(list(&[])),
            none(&["a policy"]),
            true,
            "auto: on, no rules found; connections are opened through the stack, because a policy",
        ),
    ];
    for (asked, rules, bypass, is_on, text) in cases {
        let state = FastPathState {
            rules,
            bypass,
            tracks: false,
            ..FastPathState::new(asked, false)
        };
        assert_eq!((state.is_on(), state.to_string().as_str()), (is_on, text));
    }
    for asked in [FastPath::Auto, FastPath::On] {
        let obstacle = Some("it is read-only".to_owned());
        let state = FastPathState {
            rules: Some(list(&[])),
            obstacle,
            ..FastPathState::new(asked, false)
        };
        assert_eq!(
            (state.is_on(), state.to_string().as_str()),
            (false, "off, because it is read-only")
        );
    }
}

#[test]
fn conntrack_leaves_bypass_connections_to_auto() {
    use device::Node;
    let others = "; other connections take the stack, because conntrack tracks them";
    let pass = ", which these rules let pass: chain a, chain b";
    let cases = [
        (
            Bypass::Some {
                among: Among::All,
                not_far: Some("rule 3".to_owned()),
            },
            Node::FAST_OPEN,
            format!(
                "auto: on; bypass for connections between this node's pods{pass}; those to other nodes take the stack, \
                 because rule 3{others}"
            ),
        ),
        (
            Bypass::Some {
                among: Among::Cluster(Vec::new()),
                not_far: None,
            },
            Node::FAST_OPEN | Node::FAST_OPEN_PODS | Node::FAST_OPEN_FAR,
            format!(
                "auto: on; bypass for connections of this node's pods to pods with addresses of the cluster's \
                 networks{pass}{others}"
            ),
        ),
        (
            Bypass::None(list(&["rule 1"])),
            0,
            "auto: off, because rule 1".to_owned(),
        ),
    ];
    for (bypass, flag, text) in cases {
        let state = FastPathState {
            rules: Some(list(&["rule 2"])),
            bypass,
            harmless: list(&["chain a", "chain b"]),
            ..FastPathState::new(FastPath::Auto, false)
        };
        assert_eq!((state.flag(), state.to_string()), (flag, text));
    }
}

#[test]
fn open_connections_skip_the_stack_beside_conntrack_where_rules_let_them() {
    use device::Node;
    let why = "; connections are opened through the stack, because rule 1";
    let others = "; other connections take the stack, because conntrack tracks them";
    let pods = |among, outside| {
        format!(
            "auto: on{why}; open connections between this node's pods{among}, if conntrack tolerates it{outside}{others}"
        )
    };
    let cases = [
        (
            Opened::Some {
                among: Among::All,
                not_outside: None,
            },
            Node::FAST_OPENED | Node::FAST_OPENED_OUTSIDE,
            pods("", ", and UDP exchanges of clients outside with them"),
        ),
        (
            Opened::Some {
                among: Among::Cluster(Vec::new()),
                not_outside: Some("rule 3".to_owned()),
            },
            Node::FAST_OPENED | Node::FAST_OPEN_PODS,
            pods(
                " with addresses of the cluster's networks",
                "; UDP exchanges of clients outside take the stack, because rule 3",
            ),
        ),
        (
            Opened::None(list(&["rule 2"])),
            0,
            "auto: off, because rule 1".to_owned(),
        ),
    ];
    for (opened, flag, text) in cases {
        let rules = Some(list(&["rule 2"]));
        let bypass = Bypass::None(list(&["rule 1"]));
        let mut state = FastPathState {
            rules,
            bypass,
            opened,
            ..FastPathState::new(FastPath::Auto, false)
        };
        assert_eq!((state.flag(), state.to_string()), (flag, text));
        state.forget_pods();
        assert_eq!(state.flag(), 0);
        let on = FastPathState {
            asked: FastPath::On,
            ..state
        };
        assert_eq!(
            on.flag(),
            Node::FAST_PATH,
            "conntrack is liberal as a whole"
        );
    }
}

#[test]
fn bypass_connections_are_kept_while_there_are_any() {
    let mut state = FastPathState::new(FastPath::Auto, true);
    state.rules = Some(vec!["chain a".to_owned()]);
    let left = |bypass| Remaining { bypass, liberal: 0 };
    state.keep(left(1));
    assert_eq!(state.flag(), device::Node::FAST_KEEP);
    state.keep(left(0));
    state.keep(left(1));
    state.keep(left(0));
    assert_eq!(
        state.flag(),
        device::Node::FAST_KEEP,
        "one sweep may have missed it"
    );
    assert!(
        state
            .to_string()
            .ends_with("; connections that were opened past the stack go on past it")
    );
    state.keep(left(0));
    assert_eq!(state.flag(), 0);
    let mut guards = FastPathState {
        rules: Some(list(&["chain a"])),
        ..FastPathState::new(FastPath::Auto, true)
    };
    (0..3).for_each(|_| {
        assert!(!guards.keep(Remaining {
            bypass: 0,
            liberal: 1
        }))
    });
    assert_eq!(
        guards.flag(),
        device::Node::FAST_KEEP,
        "ends of open connections are guarded"
    );
    (0..2).for_each(|_| assert!(!guards.keep(left(0))));
    assert_eq!(guards.flag(), 0);
    assert_eq!(
        FastPathState::new(FastPath::Off, true).flag(),
        0,
        "its programs are not loaded"
    );
}

#[test]
fn bypass_connections_take_the_stack_once_for_each_judgement_against_them() {
    let mut state = FastPathState {
        rules: Some(list(&["rule 1"])),
        ..FastPathState::new(FastPath::Auto, true)
    };
    assert_eq!(
        state.staying(),
        None,
        "no rule speaks against established packets"
    );
    state.staying = Staying::none();
    assert_eq!(state.staying(), Some(&Staying::none()));
    state.note_left(Left {
        connections: 2,
        unknown: Some((1, "its table is full".to_owned())),
    });
    assert_eq!(
        (state.staying(), state.bypass_kept.are_there),
        (None, false)
    );
    let unknown =
        "; conntrack has no entry for 1 connection that takes the stack now: its table is full";
    assert!(state.to_string().ends_with(unknown), "{state}");
    assert_eq!(
        state.flag() & device::Node::FAST_KEEP,
        device::Node::FAST_KEEP,
        "conntrack is liberal with the other one"
    );
    assert!(
        state.keep(Remaining {
            bypass: 1,
            liberal: 0
        }),
        "one was opened meanwhile"
    );
    assert_eq!(state.staying(), Some(&Staying::none()));
}
