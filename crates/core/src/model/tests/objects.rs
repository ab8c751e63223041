//! Objects as text, one on each line: `service web cluster-ip=10.96.0.1 tcp=80`, `slice web-1 of
//! web tcp=80 ready=10.244.0.1 on=here`.
//!
//! The words after the names are builder calls in order, with commas between arguments.
//! `conditions=10.244.0.1,rst` sets the true conditions: ready, serving, terminating. `-` stands
//! for an empty name.

use super::dumps::Dump;
use crate::builders::{ServiceBuilder, SliceBuilder, service, slice};
use crate::input::Input;

/// Defines a test for each name, which compares all sections of that name with `$dump` of their
/// input.
macro_rules! dump_tests {
    ($file:literal, $dump:path: $($test:ident,)*) => {
        $(
            #[test]
            fn $test() {
                crate::model::tests::objects::run(file!(), stringify!($test), $dump);
            }
        )*

        #[test]
        fn every_section_has_a_test() {
            crate::model::tests::dumps::assert_all_run(file!(), include_str!($file));
        }
    };
}
pub(super) use dump_tests;

/// Compares a test's sections with the dumps of their input.
pub(super) fn run(source: &str, test: &str, dump: fn(&[String]) -> String) {
    let sections = Dump::read(source).into_iter();
    let sections: Vec<_> = sections
        .filter(|section| section.name.split('/').next() == Some(test))
        .collect();
    assert!(!sections.is_empty(), "{source} has no section of {test}");
    sections
        .iter()
        .for_each(|section| section.assert_eq(&dump(&section.input)));
}

pub(super) fn objects(lines: &[String]) -> impl Iterator<Item = Input> + '_ {
    lines.iter().map(|line| {
        let words: Vec<&str> = line
            .split_whitespace()
            .map(|word| if word == "-" { "" } else { word })
            .collect();
        match words.as_slice() {
            ["service", name, calls @ ..] => {
                calls.iter().fold(service(name), edited_service).into()
            }
            ["slice", name, "of", service, calls @ ..] => {
                calls.iter().fold(slice(name, service), edited_slice).into()
            }
            _ => panic!("no object: {line}"),
        }
    })
}

fn number(text: &str) -> i32 {
    text.parse()
        .unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

fn port(text: &str) -> (&str, &str, i32) {
    let [name, protocol, port] = text.split(',').collect::<Vec<_>>()[..] else {
        panic!("{text:?} is no port")
    };
    (name, protocol, number(port))
}

fn edited_service(service: ServiceBuilder, call: &&str) -> ServiceBuilder {
    let (name, value) = call.split_once('=').unwrap_or((call, ""));
    let text = Some(value.to_owned());
    match name {
        "affinity" => service.affinity((value != "default").then(|| number(value))),
        "algorithm" => service.algorithm(value),
        "cluster-ip" => service.cluster_ip(value),
        "created" => service.created(number(value).into()),
        "external-ip" => service.external_ip(value),
        "external-local" => service.external_local(),
        "ingress" => match value.split_once(',') {
            Some((ip, mode)) => service.ingress(ip, Some(mode)),
            None => service.ingress(value, None),
        },
        "internal-local" => service.internal_local(),
        "ip-family" => service.edit(|spec| spec.ip_families = Some(vec![value.to_owned()])),
        "label" => service.label(value),
        "node-port" => service.node_port(number(value)),
        "port" => {
            let (name, protocol, port) = port(value);
            service.port(name, protocol, port)
        }
        "session-affinity" => {
            service.edit(|spec| spec.session_affinity = text.filter(|text| !text.is_empty()))
        }
        // Old clients set only this field, not `clusterIPs`.
        "single-cluster-ip" => service.edit(|spec| spec.cluster_ip = text),
        "tcp" => service.tcp(number(value)),
        "type" => service.type_(value),
        "vip" => service.vip(value),
        // `;` stands for a blank.
        "weights" => service.weights(&value.replace(';', " ")),
        _ => panic!("a service has no {name}"),
    }
}

fn edited_slice(slice: SliceBuilder, call: &&str) -> SliceBuilder {
    let (name, value) = call.split_once('=').unwrap_or((call, ""));
    match name {
        "address-type" => slice.address_type(value),
        "conditions" => {
            let (ip, letters) = value
                .split_once(',')
                .expect("conditions have an address and letters");
            let has = |letter| letters.contains(letter);
            slice.conditions(ip, has('r'), has('s'), has('t'))
        }
        "endpoint" => slice.endpoint(value),
        "for-node" => slice.hints(&[value], &[]),
        "label" => slice.label(value, ""),
        // Each of these sets the only condition of the last endpoint.
        "last-not-ready" => {
            slice.edit_last(|last| last.conditions.get_or_insert_default().ready = Some(false))
        }
        "last-not-serving" => {
            slice.edit_last(|last| last.conditions.get_or_insert_default().serving = Some(false))
        }
        "last-terminating" => {
            slice.edit_last(|last| last.conditions.get_or_insert_default().terminating = Some(true))
        }
        // A further address of the last endpoint.
        "more" => slice.edit_last(|last| last.addresses.push(value.to_owned())),
        "on" => slice.on(value),
        "pod" => slice.pod(value),
        "port" => {
            let (name, protocol, port) = port(value);
            slice.port(name, protocol, port)
        }
        "ready" => slice.ready(value),
        "tcp" => slice.tcp(number(value)),
        "terminating" => slice.terminating(value),
        "unready" => slice.unready(value),
        "weight" => slice.weight(value),
        "without-service" => slice.without_service(),
        _ => panic!("a slice has no {name}"),
    }
}
