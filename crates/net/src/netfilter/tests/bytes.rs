//! Expressions that no current program writes, as bytes.

use netlink_packet_core::{DefaultNla, Emitable};

use super::super::attrs::Attrs;
use super::super::model::{Condition, Field, MarkChange, Part, Rule};
use super::super::{devices, expression, packet};

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let attribute = DefaultNla::new(kind, value.to_vec());
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    bytes
}

fn numbers(numbers: &[(u16, u32)]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|(kind, number)| attribute(*kind, &number.to_be_bytes()))
        .collect()
}

/// Parses a rule of these expressions, each a name and its attributes.
fn rule(expressions: &[(&str, Vec<u8>)]) -> Rule {
    let element = |(name, data): &(&str, Vec<u8>)| {
        attribute(
            1,
            &[
                attribute(1, format!("{name}\0").as_bytes()),
                attribute(2, data),
            ]
            .concat(),
        )
    };
    let list: Vec<u8> = expressions.iter().flat_map(element).collect();
    expression::rule(&Attrs::parse(&list).unwrap()).unwrap()
}

fn xt(kind: &str, name: &str, revision: u32, info: &[u8]) -> Rule {
    let name = attribute(1, format!("{name}\0").as_bytes());
    rule(&[(
        kind,
        [name, numbers(&[(2, revision)]), attribute(3, info)].concat(),
    )])
}

#[test]
fn matches_of_iptables_are_read() {
    let mark = |inverted: u8| {
        let bits = [0x2000_u32.to_ne_bytes(), 0x3000_u32.to_ne_bytes()].concat();
        xt(
            "match",
            "mark",
            1,
            &[&bits[..], &[inverted, 0, 0, 0, 0, 0, 0, 0]].concat(),
        )
    };
    let condition = |field, mask: u32, value: u32, equal| {
        let [mask, value] = [mask, value].map(|bits| bits.to_ne_bytes().to_vec());
        [Part::Condition(Condition {
            field,
            mask,
            value,
            equal,
        })]
    };
    assert_eq!(mark(0), condition(Field::Mark, 0x3000, 0x2000, true));
    assert_eq!(mark(1), condition(Field::Mark, 0x3000, 0x2000, false));
    let kinds = |source: u16, destination: u16, flags: u32| {
        let kinds = [source.to_ne_bytes(), destination.to_ne_bytes()].concat();
        xt(
            "match",
            "addrtype",
            1,
            &[&kinds[..], &flags.to_ne_bytes()].concat(),
        )
    };
    assert_eq!(
        kinds(0, 4, 0),
        condition(Field::DestinationKind, u32::MAX, packet::RTN_LOCAL, true)
    );
    for other in [
        kinds(0, 4, 2),
        kinds(4, 4, 0),
        kinds(0, 6, 0),
        kinds(4, 0, 0),
        kinds(0, 4, 4),
    ] {
        assert_eq!(other, [Part::Maybe]);
    }
    assert_eq!(xt("match", "comment", 0, &[0; 256]), []);
    assert_eq!(
        xt("match", "mark", 0, &[0; 16]),
        [Part::Maybe],
        "an old revision"
    );
    assert_eq!(
        xt("match", "mark", 1, &[0; 8]),
        [Part::Maybe],
        "a short one"
    );
    assert_eq!(xt("match", "u32", 0, &[]), [Part::Maybe]);
    for name in ["recent", "bpf", "psd", "u", ""] {
        let noted = [
            Part::Change(format!("be noted by match {name}")),
            Part::Maybe,
        ];
        assert_eq!(
            xt("match", name, 1, &[]),
            noted,
            "a match that may leave a trace"
        );
    }
}

#[test]
fn targets_of_iptables_are_read() {
    let changes = |what: &str| [Part::Change(what.to_owned())];
    assert_eq!(xt("target", "LOG", 0, &[]), changes("log the packet"));
    assert_eq!(
        xt("target", "REJECT", 0, &[]),
        [Part::Refuse("reject the packet".to_owned())]
    );
    assert_eq!(xt("target", "TCPMSS", 0, &[]), changes("apply TCPMSS"));
    assert_eq!(
        xt("target", "MARK", 2, &[0; 8]),
        [Part::SetMark(Some(MarkChange {
            keep: u32::MAX,
            flip: 0
        }))]
    );
    assert_eq!(
        xt("target", "SNAT", 2, &[]),
        changes("translate the source")
    );
    assert_eq!(xt("target", "NETMAP", 0, &[]), changes("apply NETMAP"));
}

#[test]
fn unknown_loads_hide_what_registers_had() {
    let load = |to| ("meta", numbers(&[(1, to), (2, 3)]));
    let compare = |from| {
        (
            "cmp",
            [
                numbers(&[(1, from), (2, 0)]),
                attribute(3, &attribute(1, &[0; 4])),
            ]
            .concat(),
        )
    };
    let asks = [Part::Condition(Condition {
        field: Field::Mark,
        mask: vec![255; 4],
        value: vec![0; 4],
        equal: true,
    })];
    assert_eq!(rule(&[load(1), compare(1)]), asks);
    assert_eq!(
        rule(&[load(1), compare(8)]),
        asks,
        "one register has two numbers"
    );
    assert_eq!(
        rule(&[load(9), load(1), compare(9)]),
        asks,
        "the next register keeps its content"
    );
    assert_eq!(
        rule(&[load(1), compare(2)]),
        [Part::Maybe],
        "nothing was loaded"
    );
    let header = ("payload", numbers(&[(1, 1), (2, 1), (3, 8), (4, 16)]));
    assert_eq!(
        rule(&[load(9), header, compare(9)]),
        [Part::Maybe],
        "a long load covers it"
    );
    assert_eq!(
        rule(&[load(1), ("rt", numbers(&[(1, 1), (2, 0)])), compare(1)]),
        [Part::Maybe, Part::Maybe]
    );
    let shift = ("bitwise", numbers(&[(1, 1), (2, 1), (3, 4), (6, 1)]));
    assert_eq!(rule(&[load(1), shift, compare(1)]), [Part::Maybe]);
}

#[test]
fn unknown_expressions_change_packets() {
    for (name, data, want) in [
        ("notrack", vec![], "keep conntrack from following"),
        ("log", vec![], "log the packet"),
        ("dynset", vec![], "update a set"),
        (
            "flow_offload",
            vec![],
            "hand the connection to a flow table",
        ),
        ("objref", numbers(&[(1, 3)]), "apply an object"),
        ("synproxy", vec![], "apply synproxy"),
        ("tproxy", vec![], "apply tproxy"),
        ("ct", numbers(&[(2, 3), (4, 1)]), "apply ct"),
        ("meta", numbers(&[(2, 2), (3, 1)]), "apply meta"),
        ("meta", numbers(&[(2, 12), (3, 1)]), "trace the packet"),
    ] {
        assert_eq!(
            rule(&[(name, data)]),
            [Part::Change(want.to_owned())],
            "{name}"
        );
    }
    let verdict = |code: i32| {
        let verdict = attribute(2, &numbers(&[(1, code.cast_unsigned())]));
        rule(&[(
            "immediate",
            [numbers(&[(1, 0)]), attribute(2, &verdict)].concat(),
        )])
    };
    let refuses = |what: &str| [Part::Refuse(what.to_owned())];
    assert_eq!(verdict(0), refuses("drop the packet"));
    assert_eq!(verdict(3), refuses("hold back the packet"), "a queue");
    assert_eq!(
        rule(&[("immediate", numbers(&[(1, 0)]))]),
        refuses("hold back the packet"),
        "none at all"
    );
    assert_eq!(rule(&[("reject", vec![])]), refuses("reject the packet"));
}

#[test]
fn counts_are_bookkeeping() {
    for (name, data) in [
        ("counter", vec![]),
        ("objref", numbers(&[(1, 1)])),
        ("last", vec![]),
    ] {
        assert_eq!(rule(&[(name, data)]), [], "{name}");
    }
    for (name, data) in [
        ("limit", vec![]),
        ("objref", numbers(&[(1, 4)])),
        ("connlimit", vec![]),
        ("quota", vec![]),
    ] {
        assert_eq!(rule(&[(name, data)]), [Part::Maybe], "{name}");
    }
}

#[test]
fn states_of_connections_are_read() {
    let asks = |states: u32, equal| {
        let [mask, value] = [states, 0].map(|bits| bits.to_ne_bytes().to_vec());
        [Part::Condition(Condition {
            field: Field::State,
            mask,
            value,
            equal,
        })]
    };
    let conntrack = |name, revision, flags: u16, inverted: u16, states: u16| {
        let mut info = vec![0; 164];
        for (at, number) in [(146, flags), (148, inverted), (150, states)] {
            info[at..at + 2].copy_from_slice(&number.to_ne_bytes());
        }
        xt("match", name, revision, &info)
    };
    assert_eq!(conntrack("conntrack", 3, 1, 0, 6), asks(6, false));
    assert_eq!(
        conntrack("conntrack", 3, 1, 1, 6),
        asks(6, true),
        "inverted"
    );
    assert_eq!(
        conntrack("state", 3, 0x2001, 0, 1),
        asks(1, false),
        "the older name"
    );
    assert_eq!(
        conntrack("conntrack", 3, 3, 0, 6),
        [Part::Maybe],
        "with the protocol"
    );
    assert_eq!(
        conntrack("conntrack", 3, 2, 0, 6),
        [Part::Maybe],
        "the protocol alone"
    );
    assert_eq!(
        conntrack("conntrack", 3, 1, 0, 0x80),
        [Part::Maybe],
        "translated ones"
    );
    assert_eq!(
        conntrack("conntrack", 1, 1, 0, 6),
        [Part::Maybe],
        "another layout"
    );
    assert_eq!(
        xt("match", "conntrack", 3, &[0; 8]),
        [Part::Maybe],
        "a short one"
    );
    let load = |key: u32, more: &[(u16, u32)]| {
        ("ct", [numbers(&[(1, 1), (2, key)]), numbers(more)].concat())
    };
    let mask = |bits: u32| attribute(1, &bits.to_ne_bytes());
    let bits = [
        numbers(&[(1, 1), (2, 1), (3, 4)]),
        attribute(4, &mask(6)),
        attribute(5, &mask(0)),
    ]
    .concat();
    let compare = (
        "cmp",
        [numbers(&[(1, 1), (2, 1)]), attribute(3, &mask(0))].concat(),
    );
    assert_eq!(
        rule(&[load(0, &[]), ("bitwise", bits.clone()), compare.clone()]),
        asks(6, false)
    );
    for other in [load(1, &[]), load(0, &[(3, 0)])] {
        assert_eq!(
            rule(&[other, ("bitwise", bits.clone()), compare.clone()]),
            [Part::Maybe, Part::Maybe]
        );
    }
}

#[test]
fn devices_without_whole_names_are_unknown() {
    let hook = |names: &[(u16, &str)]| {
        let names: Vec<u8> = names
            .iter()
            .flat_map(|(kind, name)| attribute(*kind, name.as_bytes()))
            .collect();
        devices(&Attrs::parse(&attribute(4, &names)).unwrap()).unwrap()
    };
    assert_eq!(hook(&[(1, "eth0\0"), (1, "lo\0")]), ["eth0", "lo"]);
    assert_eq!(
        hook(&[(1, "eth0\0"), (2, "veth")]),
        [""; 0],
        "all names that begin so"
    );
    let single = attribute(3, b"eth0\0");
    assert_eq!(
        devices(&Attrs::parse(&single).unwrap()).unwrap(),
        ["eth0"],
        "older kernels name one so"
    );
}
