//! Tests of whole messages, as a client sends and reads them.

use std::future::{Future, ready};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use domain::base::name::ParsedName;
use domain::rdata::AllRecordData;
use expect_test::expect;
use proxy_core::builders::{service, slice};
use proxy_core::store::Store;

use super::*;

#[derive(Clone)]
struct Objects(Option<Arc<Store>>);

impl Cluster for Objects {
    fn known(&self, wanted: Wanted) -> impl Future<Output = Option<Known>> + Send {
        ready(self.0.as_ref().map(|store| Known::of(store, &wanted)))
    }
}

/// Returns a Service of each type, in namespace shop.
fn objects() -> Objects {
    let mut store = Store::new("laptop");
    let external = |name: &str, to: &str| {
        let to = Some(to.to_owned());
        service(name)
            .type_("ExternalName")
            .edit(|spec| spec.external_name = to)
    };
    let web = service("shop/web")
        .cluster_ip("10.96.0.10")
        .cluster_ip("fd00:96::10");
    let db = service("shop/db")
        .cluster_ip("None")
        .port("sql", "TCP", 5432);
    let inputs = [
        web.port("http", "TCP", 80).port("dns", "UDP", 53).into(),
        db.into(),
        external("shop/mail", "mail.example.com").into(),
        external("shop/alias", "web.shop.svc.cluster.local").into(),
        external("shop/circle", "circle.shop.svc.cluster.local").into(),
        slice("shop/db-1", "db")
            .label("service.kubernetes.io/headless", "")
            .port("sql", "TCP", 5432)
            .ready("10.244.1.2")
            .hostname("db-0")
            .ready("10.244.1.3")
            .hostname("DB-1")
            .unready("10.244.1.4")
            .ready("10.244.1.5")
            .into(),
    ];
    for input in inputs {
        let _ = store.apply(input);
    }
    Objects(Some(Arc::new(store)))
}

fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a store answers at once"),
    }
}

fn request(name: &str, rtype: Rtype, edns: Option<u16>) -> Vec<u8> {
    let mut builder = MessageBuilder::new_vec().question();
    builder.header_mut().set_rd(true);
    builder.header_mut().set_id(0x4b50);
    builder
        .push((OwnedName::from_chars(name.chars()).expect("a name"), rtype))
        .expect("room");
    let mut builder = builder.additional();
    if let Some(size) = edns {
        let sized = builder.opt(|opt| {
            opt.set_udp_payload_size(size);
            Ok(())
        });
        sized.expect("room");
    }
    builder.finish()
}

fn ask(cluster: &Objects, request: &[u8]) -> Message<Vec<u8>> {
    let zone = Zone::new("cluster.local")
        .expect("a domain")
        .served_at([127, 0, 0, 153].into());
    let answer = now(reply(&zone, cluster, request, Transport::Datagram)).expect("an answer");
    let answer = Message::from_octets(answer).expect("a message");
    assert!(answer.header().qr() && answer.header().id() == 0x4b50);
    answer
}

/// Returns a message as text, with sorted records.
fn text(message: &Message<Vec<u8>>) -> String {
    let header = message.header();
    let mut text = format!(
        "{}{}\n",
        header.rcode(),
        if header.tc() { " truncated" } else { "" }
    );
    let (_, answer, authority, additional) = message.sections().expect("sections");
    for (kind, section) in [
        ("", answer),
        ("authority ", authority),
        ("additional ", additional),
    ] {
        let records = section.into_records::<AllRecordData<_, ParsedName<_>>>();
        let mut lines: Vec<_> = records
            .map(|record| record.expect("a record"))
            .map(|record| {
                format!(
                    "  {kind}{} {} {} {}\n",
                    record.owner(),
                    record.ttl().as_secs(),
                    record.rtype(),
                    record.data()
                )
            })
            .collect();
        lines.sort();
        text.extend(lines);
    }
    text
}

const QUESTIONS: [(&str, Rtype); 25] = [
    ("web.shop.svc.cluster.local", Rtype::A),
    ("web.shop.svc.cluster.local", Rtype::AAAA),
    ("web.shop.svc.cluster.local", Rtype::ANY),
    ("web.shop.svc.cluster.local", Rtype::MX),
    ("_http._tcp.web.shop.svc.cluster.local", Rtype::SRV),
    ("_http._udp.web.shop.svc.cluster.local", Rtype::SRV),
    ("_tcp.web.shop.svc.cluster.local", Rtype::SRV),
    ("db.shop.svc.cluster.local", Rtype::A),
    ("_sql._tcp.db.shop.svc.cluster.local", Rtype::SRV),
    ("db-1.db.shop.svc.cluster.local", Rtype::A),
    ("10-244-1-5.db.shop.svc.cluster.local", Rtype::A),
    ("10-244-1-4.db.shop.svc.cluster.local", Rtype::A),
    ("mail.shop.svc.cluster.local", Rtype::A),
    ("alias.shop.svc.cluster.local", Rtype::A),
    ("alias.shop.svc.cluster.local", Rtype::CNAME),
    ("10-244-1-2.shop.pod.cluster.local", Rtype::A),
    ("10-244-1-9.shop.pod.cluster.local", Rtype::A),
    ("shop.svc.cluster.local", Rtype::A),
    ("nothing.svc.cluster.local", Rtype::A),
    ("nothing.shop.svc.cluster.local", Rtype::A),
    ("cluster.local", Rtype::SOA),
    ("cluster.local", Rtype::A),
    ("dns-version.cluster.local", Rtype::TXT),
    ("example.com", Rtype::A),
    ("cluster.local", Rtype::AXFR),
];

#[test]
fn a_cluster_answers_for_its_services() {
    let objects = objects();
    let mut all = String::new();
    for (name, rtype) in QUESTIONS {
        let answer = ask(&objects, &request(name, rtype, None));
        all += &format!("{name} {rtype}: {}", text(&answer));
    }
    expect![[r#"
        web.shop.svc.cluster.local A: NOERROR
          web.shop.svc.cluster.local 5 A 10.96.0.10
        web.shop.svc.cluster.local AAAA: NOERROR
          web.shop.svc.cluster.local 5 AAAA fd00:96::10
        web.shop.svc.cluster.local ANY: NOERROR
          web.shop.svc.cluster.local 5 A 10.96.0.10
          web.shop.svc.cluster.local 5 AAAA fd00:96::10
        web.shop.svc.cluster.local MX: NOERROR
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        _http._tcp.web.shop.svc.cluster.local SRV: NOERROR
          _http._tcp.web.shop.svc.cluster.local 5 SRV 0 100 80 web.shop.svc.cluster.local
          additional web.shop.svc.cluster.local 5 A 10.96.0.10
          additional web.shop.svc.cluster.local 5 AAAA fd00:96::10
        _http._udp.web.shop.svc.cluster.local SRV: NXDOMAIN
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        _tcp.web.shop.svc.cluster.local SRV: NOERROR
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        db.shop.svc.cluster.local A: NOERROR
          db.shop.svc.cluster.local 5 A 10.244.1.2
          db.shop.svc.cluster.local 5 A 10.244.1.3
          db.shop.svc.cluster.local 5 A 10.244.1.5
        _sql._tcp.db.shop.svc.cluster.local SRV: NOERROR
          _sql._tcp.db.shop.svc.cluster.local 5 SRV 0 100 5432 10-244-1-5.db.shop.svc.cluster.local
          _sql._tcp.db.shop.svc.cluster.local 5 SRV 0 100 5432 db-0.db.shop.svc.cluster.local
          _sql._tcp.db.shop.svc.cluster.local 5 SRV 0 100 5432 db-1.db.shop.svc.cluster.local
          additional 10-244-1-5.db.shop.svc.cluster.local 5 A 10.244.1.5
          additional db-0.db.shop.svc.cluster.local 5 A 10.244.1.2
          additional db-1.db.shop.svc.cluster.local 5 A 10.244.1.3
        db-1.db.shop.svc.cluster.local A: NOERROR
          db-1.db.shop.svc.cluster.local 5 A 10.244.1.3
        10-244-1-5.db.shop.svc.cluster.local A: NOERROR
          10-244-1-5.db.shop.svc.cluster.local 5 A 10.244.1.5
        10-244-1-4.db.shop.svc.cluster.local A: NXDOMAIN
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        mail.shop.svc.cluster.local A: NOERROR
          mail.shop.svc.cluster.local 5 CNAME mail.example.com.
        alias.shop.svc.cluster.local A: NOERROR
          alias.shop.svc.cluster.local 5 CNAME web.shop.svc.cluster.local.
          web.shop.svc.cluster.local 5 A 10.96.0.10
        alias.shop.svc.cluster.local CNAME: NOERROR
          alias.shop.svc.cluster.local 5 CNAME web.shop.svc.cluster.local.
        10-244-1-2.shop.pod.cluster.local A: NOERROR
          10-244-1-2.shop.pod.cluster.local 5 A 10.244.1.2
        10-244-1-9.shop.pod.cluster.local A: NXDOMAIN
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        shop.svc.cluster.local A: NOERROR
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        nothing.svc.cluster.local A: NXDOMAIN
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        nothing.shop.svc.cluster.local A: NXDOMAIN
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        cluster.local SOA: NOERROR
          cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        cluster.local A: NOERROR
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
        dns-version.cluster.local TXT: NOERROR
          dns-version.cluster.local 5 TXT "1.1.0"
        example.com A: REFUSED
        cluster.local AXFR: REFUSED
    "#]]
    .assert_eq(&all);
}

#[test]
fn name_server_has_an_address() {
    let questions = [
        ("cluster.local", Rtype::NS),
        ("ns.dns.cluster.local", Rtype::A),
        ("ns.dns.cluster.local", Rtype::AAAA),
    ];
    let answers =
        questions.map(|(name, rtype)| text(&ask(&objects(), &request(name, rtype, None))));
    expect![[r#"
        NOERROR
          cluster.local 5 NS ns.dns.cluster.local.
          additional ns.dns.cluster.local 5 A 127.0.0.153
        NOERROR
          ns.dns.cluster.local 5 A 127.0.0.153
        NOERROR
          authority cluster.local 5 SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5
    "#]]
    .assert_eq(&answers.concat());
}

#[test]
fn names_that_lead_in_circles_end() {
    let answer = ask(
        &objects(),
        &request("circle.shop.svc.cluster.local", Rtype::A, None),
    );
    assert_eq!(answer.header().rcode(), Rcode::SERVFAIL);
}

#[test]
fn a_cluster_that_is_not_listed_yet_is_no_absence() {
    let answer = ask(
        &Objects(None),
        &request("web.shop.svc.cluster.local", Rtype::A, None),
    );
    assert_eq!(answer.header().rcode(), Rcode::SERVFAIL);
}

#[test]
fn an_answer_is_cut_to_what_its_client_takes() {
    let mut store = Store::new("laptop");
    let _ = store.apply(service("shop/db").cluster_ip("None").into());
    let many = (1..=60).map(|last| format!("10.244.1.{last}"));
    let _ = store.apply(
        many.fold(slice("shop/db-1", "db"), |slice, ip| slice.ready(&ip))
            .into(),
    );
    let objects = Objects(Some(Arc::new(store)));
    let asked = |edns| {
        ask(
            &objects,
            &request("db.shop.svc.cluster.local", Rtype::A, edns),
        )
    };
    for (edns, limit, is_cut) in [
        (None, 512, true),
        (Some(600), 600, true),
        (Some(4_096), 1_232, false),
    ] {
        let answer = asked(edns);
        assert!(
            answer.as_slice().len() <= limit,
            "{} bytes",
            answer.as_slice().len()
        );
        assert_eq!(answer.header().tc(), is_cut);
        assert_eq!(answer.opt().is_some(), edns.is_some());
        assert!(answer.header_counts().ancount() > 20);
    }
    let zone = Zone::new("cluster.local").expect("a domain");
    let request = request("db.shop.svc.cluster.local", Rtype::A, None);
    let stream = now(reply(&zone, &objects, &request, Transport::Stream)).expect("an answer");
    let (length, message) = stream.split_first_chunk::<2>().expect("a length");
    assert_eq!(usize::from(u16::from_be_bytes(*length)), message.len());
    assert_eq!(
        Message::from_octets(message)
            .expect("a message")
            .header_counts()
            .ancount(),
        60
    );
}

#[test]
fn a_server_refuses_what_is_no_question() {
    let zone = Zone::new("cluster.local").expect("a domain");
    let objects = objects();
    let good = request("web.shop.svc.cluster.local", Rtype::A, Some(1_232));
    for length in 0..good.len() {
        // Truncation never causes an error, and a message shorter than the header has no response.
        let answer = now(reply(&zone, &objects, &good[..length], Transport::Datagram));
        assert_eq!(answer.is_some(), length >= 12, "{length}");
    }
    let changed = |byte: usize, value: u8| {
        let mut request = good.clone();
        request[byte] = value;
        now(reply(&zone, &objects, &request, Transport::Datagram)).map(|answer| answer[3] & 0xf)
    };
    assert_eq!(changed(2, 0x80), None, "an answer");
    assert_eq!(
        changed(2, 0x10),
        Some(Rcode::NOTIMP.to_int()),
        "another operation"
    );
    assert_eq!(
        changed(5, 2),
        Some(Rcode::FORMERR.to_int()),
        "two questions"
    );
    assert_eq!(changed(5, 0), Some(Rcode::FORMERR.to_int()), "no question");
    let class = good.len() - 12;
    assert_eq!(
        changed(class, 3),
        Some(Rcode::REFUSED.to_int()),
        "class CHAOS"
    );
}
