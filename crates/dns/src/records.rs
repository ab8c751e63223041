//! The records of a name.

use std::collections::BTreeSet;
use std::net::IpAddr;

use domain::base::iana::Rtype;
use domain::base::{Serial, Ttl};
use domain::rdata::{A, Aaaa, Cname, Ns, Soa, Srv, Txt, ZoneRecordData};
use proxy_core::compact::{Address, EndpointSlice, Service};
use proxy_core::input::ObjectName;

use crate::cluster_names::Known;
use crate::zone::{OwnedName, Subject, Zone, dashes};

pub(crate) type Data = ZoneRecordData<Vec<u8>, OwnedName>;

/// The TTL of all records, as in CoreDNS. It bounds the use of a deleted Service.
pub(crate) const TTL: Ttl = Ttl::from_secs(5);
/// The maximum number of a headless Service's addresses in a response.
const MOST: usize = 100;
/// The version of the specification that the answers follow.
const VERSION: &[u8] = b"1.1.0";

/// The result for one question.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    /// The records of the name, and additional records of the names in them.
    Records(Vec<Data>, Vec<(OwnedName, Data)>),
    /// The name exists without a record of this type.
    NoData,
    NoName,
}

impl Answer {
    fn of(records: Vec<Data>) -> Self {
        if records.is_empty() {
            Self::NoData
        } else {
            Self::Records(records, Vec::new())
        }
    }
}

/// Returns the result for one type of a subject.
pub(crate) fn answer(zone: &Zone, subject: &Subject, rtype: Rtype, known: &Known) -> Answer {
    let exists = |is_there| {
        if is_there {
            Answer::NoData
        } else {
            Answer::NoName
        }
    };
    match subject {
        Subject::Apex => apex(zone, rtype),
        Subject::Inner => Answer::NoData,
        Subject::NameServer => Answer::of(addresses(zone.server(), rtype)),
        Subject::Version => version(rtype),
        Subject::Unknown => Answer::NoName,
        Subject::Namespace(_) => exists(known.is_there),
        Subject::Pod { address, .. } if known.is_there => Answer::of(addresses([*address], rtype)),
        Subject::Pod { .. } => Answer::NoName,
        Subject::Service(_) => match &known.service {
            Some(service) => of_service(service, &known.slices, rtype),
            None => Answer::NoName,
        },
        Subject::Protocol(_) => exists(known.service.is_some()),
        Subject::Port {
            service,
            port,
            protocol,
        } => of_port(zone, service, port, protocol, rtype, known),
        Subject::Endpoint { host, .. } => {
            let endpoints = ready(&known.slices);
            let named: Vec<_> = endpoints
                .filter(|endpoint| endpoint.host == *host)
                .collect();
            match named.is_empty() {
                true => Answer::NoName,
                false => Answer::of(addresses(named.iter().map(|endpoint| endpoint.ip), rtype)),
            }
        }
    }
}

/// Returns the SOA record, which sets the TTL of negative responses (RFC 2308).
pub(crate) fn soa(zone: &Zone) -> Option<Data> {
    let server = zone.below("ns.dns")?;
    let owner = zone.below("hostmaster")?;
    let [refresh, retry, expire] = [7_200, 1_800, 86_400].map(Ttl::from_secs);
    Some(Data::Soa(Soa::new(
        server,
        owner,
        Serial(1),
        refresh,
        retry,
        expire,
        TTL,
    )))
}

fn apex(zone: &Zone, rtype: Rtype) -> Answer {
    match (rtype, zone.below("ns.dns")) {
        (Rtype::NS, Some(server)) => {
            let of_server = addresses(zone.server(), Rtype::ANY)
                .into_iter()
                .map(|data| (server.clone(), data));
            Answer::Records(vec![Data::Ns(Ns::new(server.clone()))], of_server.collect())
        }
        (Rtype::SOA, _) => Answer::of(soa(zone).into_iter().collect()),
        _ => Answer::NoData,
    }
}

fn version(rtype: Rtype) -> Answer {
    let text = Txt::build_from_slice(VERSION)
        .ok()
        .filter(|_| matches!(rtype, Rtype::TXT | Rtype::ANY));
    Answer::of(text.map(Data::Txt).into_iter().collect())
}

fn of_service(service: &Service, slices: &[impl AsRef<EndpointSlice>], rtype: Rtype) -> Answer {
    if let Some(external) = &service.external_name {
        let is_asked = matches!(rtype, Rtype::A | Rtype::AAAA | Rtype::CNAME | Rtype::ANY);
        let name = OwnedName::from_chars(external.chars())
            .ok()
            .filter(|_| is_asked);
        return Answer::of(
            name.map(|name| Data::Cname(Cname::new(name)))
                .into_iter()
                .collect(),
        );
    }
    if is_headless(service) {
        // A large Service does not fit into a response, so each client gets a part, beginning with
        // a random slice.
        let first = rand::random_range(0..slices.len().max(1));
        let (before, from) = slices.split_at(first.min(slices.len()));
        let ips = ready(from)
            .chain(ready(before))
            .map(|endpoint| endpoint.ip)
            .filter(|ip| is_asked(*ip, rtype));
        return Answer::of(addresses(ips.take(MOST), rtype));
    }
    Answer::of(addresses(cluster_ips(service), rtype))
}

fn of_port(
    zone: &Zone,
    name: &ObjectName,
    port: &str,
    protocol: &str,
    rtype: Rtype,
    known: &Known,
) -> Answer {
    let Some(service) = &known.service else {
        return Answer::NoName;
    };
    let is_it = |name: Option<&str>, of: Option<&str>| {
        name.unwrap_or_default() == port && of.unwrap_or("TCP").eq_ignore_ascii_case(protocol)
    };
    let mut targets = BTreeSet::new();
    if is_headless(service) {
        for Ready { slice, ip, host } in ready(&known.slices) {
            let ports = slice
                .ports
                .iter()
                .filter(|port| is_it(port.name.as_deref(), port.protocol.as_deref()));
            let numbers = ports.filter_map(|port| u16::try_from(port.port?).ok());
            targets.extend(numbers.map(|number| (format!("{host}."), number, Some(ip))));
            if targets.len() >= MOST {
                break;
            }
        }
    } else {
        let ports = service
            .ports
            .iter()
            .filter(|port| is_it(port.name.as_deref(), port.protocol.as_deref()));
        targets.extend(
            ports.filter_map(|port| Some((String::new(), u16::try_from(port.port).ok()?, None))),
        );
    }
    if targets.is_empty() {
        return Answer::NoName;
    }
    if !matches!(rtype, Rtype::SRV | Rtype::ANY) {
        return Answer::NoData;
    }
    let mut records = Vec::new();
    let mut additional = Vec::new();
    for (host, number, ip) in targets {
        let Some(target) = zone.below(&format!("{host}{}.{}.svc", name.name, name.namespace))
        else {
            continue;
        };
        let ips = ip.map_or_else(|| cluster_ips(service), |ip| vec![ip]);
        additional.extend(
            addresses(ips, Rtype::ANY)
                .into_iter()
                .map(|data| (target.clone(), data)),
        );
        records.push(Data::Srv(Srv::new(0, 100, number, target)));
    }
    Answer::Records(records, additional)
}

fn is_headless(service: &Service) -> bool {
    service.cluster_ip.as_deref() == Some("None")
}

fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let all = if service.cluster_ips.is_empty() {
        service.cluster_ip.as_slice()
    } else {
        &service.cluster_ips
    };
    all.iter().filter_map(|ip| ip.parse().ok()).collect()
}

struct Ready<'a> {
    slice: &'a EndpointSlice,
    ip: IpAddr,
    /// The endpoint's label below its Service.
    host: String,
}

/// Returns the ready endpoints in arbitrary order.
fn ready(slices: &[impl AsRef<EndpointSlice>]) -> impl Iterator<Item = Ready<'_>> {
    slices
        .iter()
        .map(AsRef::as_ref)
        .flat_map(|slice: &EndpointSlice| {
            slice
                .endpoints
                .iter()
                .enumerate()
                .filter_map(move |(at, endpoint)| match endpoint.address {
                    Address::Ip(ip) if endpoint.ready => {
                        let name = slice.hostnames.get(at).and_then(Option::as_deref);
                        Some(Ready {
                            slice,
                            ip,
                            host: name.map_or_else(|| dashes(ip), str::to_owned),
                        })
                    }
                    _ => None,
                })
        })
}

/// Returns the distinct address records of a type. ANY includes both.
fn addresses(ips: impl IntoIterator<Item = IpAddr>, rtype: Rtype) -> Vec<Data> {
    let ips: BTreeSet<_> = ips.into_iter().filter(|ip| is_asked(*ip, rtype)).collect();
    let record = |ip| match ip {
        IpAddr::V4(ip) => Data::A(A::new(ip)),
        IpAddr::V6(ip) => Data::Aaaa(Aaaa::new(ip)),
    };
    ips.into_iter().map(record).collect()
}

/// Returns true if the type includes the address's family.
fn is_asked(ip: IpAddr, rtype: Rtype) -> bool {
    matches!(
        (ip, rtype),
        (_, Rtype::ANY) | (IpAddr::V4(_), Rtype::A) | (IpAddr::V6(_), Rtype::AAAA)
    )
}
