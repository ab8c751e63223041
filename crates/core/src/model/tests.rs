use self::dumps::Dump;
use self::objects::{dump_tests, objects};
use crate::builders::{listed, service, slice};
use crate::desired::Desired;
use crate::input::Input;

mod balancing;
pub(crate) mod dumps;
mod endpoints;
mod external;
mod guard;
mod handover;
mod host_mode;
mod objects;
mod redirect;
mod redirect_address;
mod selection;

/// Returns the tables of a node called `here` for these objects, and the skipped fields.
fn tables(objects: impl IntoIterator<Item = Input>) -> String {
    let mut desired = Desired::new("here");
    for input in listed().into_iter().chain(objects) {
        desired.apply(input);
    }
    let skipped = desired.sync().skipped;
    let skipped: String = skipped
        .iter()
        .map(|skipped| format!("skipped {skipped}\n"))
        .collect();
    format!("{}{skipped}", desired.tables())
}

fn dump(lines: &[String]) -> String {
    tables(objects(lines))
}

fn check<const N: usize>(objects: [Input; N], expected: Dump) {
    expected.assert_eq(&tables(objects));
}

dump_tests! {
    "tests.rs", dump:
    a_service_port_has_the_ready_endpoints_of_its_slices,
    a_service_without_endpoints_is_still_in_the_tables,
    a_port_may_be_tcp_and_udp_and_sctp,
    families_stand_alone,
    the_cluster_ip_determines_the_family_without_ip_families,
    services_without_a_cluster_ip_of_ours_are_left_out,
    the_oldest_service_with_a_cluster_ip_holds_the_port,
}

#[test]
fn an_unreadable_field_costs_only_itself() {
    check(
        [
            service("bad-ip")
                .cluster_ip("10.96.0.300")
                .cluster_ip("fd00:96::1")
                .tcp(80)
                .into(),
            service("bad-ports")
                .cluster_ip("10.96.0.1")
                .tcp(0)
                .tcp(65_536)
                .port("", "ICMP", 80)
                .tcp(80)
                .port("again", "TCP", 80)
                .into(),
            slice("bad-ports-1", "bad-ports")
                .port("", "tcp", 1)
                .tcp(70_000)
                .tcp(8080)
                .edit(|slice| {
                    let mut nameless = slice.ports.iter().flatten().last().cloned().unwrap();
                    nameless.name = None;
                    let mut numberless = nameless.clone();
                    (numberless.name, numberless.port) = (Some(String::new()), None);
                    slice
                        .ports
                        .get_or_insert_default()
                        .extend([nameless, numberless]);
                })
                .ready("10.244.0.1")
                .ready("ten")
                .ready("fd00::1")
                .ready("0.0.0.0")
                .ready("10.244.0.2")
                .ready("-")
                .edit_last(|last| last.addresses.clear())
                .into(),
        ],
        Dump::of_rust(file!(), "an_unreadable_field_costs_only_itself"),
    );
}
