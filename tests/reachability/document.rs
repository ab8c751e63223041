//! Compares `docs/reachability.md` with the cases.

use std::fmt::Write;

use expect_test::expect_file;

use super::case::{Case, Expect, Seen, To};
use super::special::SPECIALS;
use super::table::{ABOUT, ASYMMETRIC, CASES, CASES_OF_FLAGS, NOT_RUN, ON_IPVLAN, SHAPED};

#[test]
fn document_lists_the_cases() {
    expect_file!["../../docs/reachability.md"].assert_eq(&document());
}

#[test]
fn every_case_is_run_or_excused() {
    let run = |id: &str| {
        let rows = CASES.iter().chain(CASES_OF_FLAGS).any(|case| case.id == id);
        rows || SPECIALS.iter().any(|special| special.id == id)
            || NOT_RUN.iter().any(|(excused, _)| *excused == id)
    };
    let missing: Vec<_> = ABOUT.iter().filter(|(id, _)| !run(id)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    for (letter, count) in [('C', 22), ('N', 20), ('L', 16)] {
        let ids = ABOUT.iter().filter(|(id, _)| id.starts_with(letter));
        assert!(
            ids.map(|(id, _)| (*id).to_owned())
                .eq((1..=count).map(|n| format!("{letter}{n:02}"))),
            "{letter}"
        );
    }
}

const HEAD: &str = "\
# Who reaches what

Every case is run with real sockets in network namespaces by `tests/reachability`; this document is generated from it, and a
test compares the two (`UPDATE_EXPECT=1 cargo test -p kpx-tests --test reachability document` writes it again).

Both nodes, n1 and n2, run kpx. p1a, p1b and p1c are pods of n1; p2a and p2b are pods of n2; x is a client outside, xl a
client on the nodes' own segments, ext a server outside.

- **Protocols**: TCP, UDP and SCTP, each over IPv4 and IPv6.
- **Layouts of pods**: on veths without an address, as Calico has them; on veths with the gateway's address, as the plugin ptp and kind
  have them; on a bridge; on a bridge with VXLAN between the nodes, as flannel has it; behind a tunnel of tun devices, whose packets have no
  Ethernet header; and on macvlan devices above a second uplink. In the last two layouts the cases run once, in the default mode with the
  firewall.
- **Payloads**: one byte, more than a segment, bursts of 60 kB, and UDP datagrams of 2,000 and 9,000 bytes in fragments.
- **Settings**: plain; with pods reached over a second device, as over an overlay; and with a firewall that drops what conntrack finds
  invalid, with and without checksum offload. Without offload the tests verify every checksum of every packet. Cases of ClusterIPs also run
  with rp_filter 0, 1 and 2, each with and without a default route.

Nodes of other shapes run fewer cases:
- An uplink that is a VLAN, an uplink that is a bond, pods on netkit pairs, pods on macvlan devices, by `cargo xtask vmtest --only shapes`: SHAPED.
- Pods on ipvlan devices (mode L2) above a second uplink, as kube-proxy masquerades, with rp_filter 2, by the same command: ON_IPVLAN.
- Two uplinks, where x reaches n1 by one uplink and n1 answers by the other, with rp_filter 0 and 2: ASYMMETRIC.

\"Sees\" is the client's address as the backend sees it: the client's own, a node's primary address, or the address of the device
through which n1 or n2 reaches the backend: a bridge's, the gateway's, or the overlay's. The default mode keeps the client's address
where replies return through the node in any case; `--masquerade compat` masquerades as kube-proxy does. In the default mode kpx connects
the TCP sockets of n1 and n2 to a backend at `connect` ([socket-lb.md](socket-lb.md)), and the backend sees the address from which they dial
it directly. In the other mode the tests pass `--socket-lb off`, so that they cover these packets as well.
";

fn document() -> String {
    let mut text = HEAD.to_owned();
    for (name, cases) in [
        ("SHAPED", SHAPED),
        ("ON_IPVLAN", ON_IPVLAN),
        ("ASYMMETRIC", ASYMMETRIC),
    ] {
        text = text.replace(name, &cases.join(", "));
    }
    text += "\n## Cases\n\n| case | what |\n|---|---|\n";
    for (id, what) in ABOUT {
        writeln!(text, "| {id} | {what} |").expect("a string has room");
    }
    text += "\n## Rows\n\n| case | client | dials | by | default mode | `--masquerade compat` |\n|---|---|---|---|---|---|\n";
    CASES.iter().for_each(|case| row(&mut text, case));
    text += "\n## With `--nodeport-addresses` of the nodes' network, `--cluster-ip-external=false`, `--feature-gates AllowServiceExternalIPs=false`\n\n\
             | case | client | dials | by | default mode |\n|---|---|---|---|---|\n";
    CASES_OF_FLAGS
        .iter()
        .for_each(|case| row_of_flags(&mut text, case));
    text += "\n## More than one conversation\n\nIn the default mode, the plain setting.\n\n| case | what |\n|---|---|\n";
    for special in SPECIALS {
        writeln!(text, "| {} | {} |", special.id, special.what).expect("a string has room");
    }
    text += "\n## Not run\n\n| case | why |\n|---|---|\n";
    for (id, why) in NOT_RUN {
        writeln!(text, "| {id} | {why} |").expect("a string has room");
    }
    text
}

fn row(text: &mut String, case: &Case) {
    let Case {
        id,
        client,
        service,
        default,
        compat,
        ..
    } = *case;
    let to = by(case.to);
    let default = outcome(default);
    let compat = outcome(compat);
    writeln!(
        text,
        "| {id} | {client} | {service} | {to} | {default} | {compat} |"
    )
    .expect("a string has room");
}

fn row_of_flags(text: &mut String, case: &Case) {
    let Case {
        id,
        client,
        service,
        default,
        ..
    } = *case;
    writeln!(
        text,
        "| {id} | {client} | {service} | {} | {} |",
        by(case.to),
        outcome(default)
    )
    .expect("a string has room");
}

fn by(to: To) -> String {
    match to {
        To::ClusterIp => "ClusterIP".to_owned(),
        To::ClusterIpOtherPort => "ClusterIP, another port".to_owned(),
        To::NodePort(node) => format!("NodePort of {node}"),
        To::NodePortSecond => "NodePort of n1, second device".to_owned(),
        To::NodePortLoopback => "NodePort, loopback".to_owned(),
        To::NodePortElsewhere => "NodePort of n1, address left out".to_owned(),
        To::ExternalIp => "ExternalIP".to_owned(),
        To::LoadBalancer => "LoadBalancer".to_owned(),
        To::LoadBalancerOtherPort => "LoadBalancer, another port".to_owned(),
    }
}

fn outcome(expect: Expect) -> String {
    let sees = |seen| match seen {
        Seen::Client => "the client".to_owned(),
        Seen::Dialled => "the address dialled".to_owned(),
        Seen::Node(name) => name.to_owned(),
        Seen::Egress(name) => format!("{name}'s device"),
        Seen::Routed => "the address by which it dials the backend itself".to_owned(),
    };
    match expect {
        Expect::Seen(seen) => format!("sees {}", sees(seen)),
        Expect::Other(name, seen) => format!("not intercepted: {name} sees {}", sees(seen)),
        Expect::Refused => "refused at once".to_owned(),
        Expect::Silence => "dropped".to_owned(),
    }
}
