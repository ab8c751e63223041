//! Readers of single fields. An unreadable field is skipped with a reason; the rest of the object
//! counts.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use proxy_common::addr::{Addr, Port, Proto};

use crate::compact::Address;
use crate::input::ObjectName;

/// An ineffective part of an object, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    pub object: ObjectRef,
    /// The path in the object, such as `spec.ports[1].port`.
    pub field: String,
    pub why: String,
    pub cause: Cause,
}

/// The kind of reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The field is unreadable or meaningless.
    Invalid,
    /// Another object holds the value.
    Conflict,
    /// Services may not have the value.
    Refused,
    /// The maps have no space left for the namespace's Services.
    NoRoom,
    /// A device of this host has the address, so the host keeps its packets.
    KeptByHost,
    /// kpx does not translate the address in host mode.
    NotTaken,
}

/// An object reference, shown as `Service default/web`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectRef {
    pub kind: &'static str,
    pub name: ObjectName,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.object, self.field, self.why)
    }
}

/// A reader of one object that records skipped fields.
pub(super) struct Reader<'a> {
    kind: &'static str,
    name: &'a ObjectName,
    skipped: &'a mut Vec<Skipped>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        kind: &'static str,
        name: &'a ObjectName,
        skipped: &'a mut Vec<Skipped>,
    ) -> Self {
        Self {
            kind,
            name,
            skipped,
        }
    }

    pub(super) fn skip(&mut self, field: fmt::Arguments<'_>, why: impl Into<String>) {
        self.push(field, why.into(), Cause::Invalid);
    }

    /// Returns true if the field is admitted. Otherwise records the refusal.
    pub(super) fn admit(
        &mut self,
        field: fmt::Arguments<'_>,
        admitted: Result<(), String>,
    ) -> bool {
        admitted
            .map_err(|why| self.push(field, why, Cause::Refused))
            .is_ok()
    }

    /// Records an address that the host keeps.
    pub(super) fn keep_by_host(&mut self, field: fmt::Arguments<'_>, why: String) {
        self.push(field, why, Cause::KeptByHost);
    }

    /// Records a part that does not fit into the maps.
    pub(super) fn no_room(&mut self, field: fmt::Arguments<'_>, why: String) {
        self.push(field, why, Cause::NoRoom);
    }

    /// Returns true if kpx translates packets to the address. Otherwise records the refusal.
    pub(super) fn take_address(
        &mut self,
        field: fmt::Arguments<'_>,
        taken: Result<(), String>,
    ) -> bool {
        taken
            .map_err(|why| self.push(field, why, Cause::NotTaken))
            .is_ok()
    }

    pub(super) fn conflict(&mut self, field: fmt::Arguments<'_>, why: String) {
        self.push(field, why, Cause::Conflict);
    }

    fn push(&mut self, field: fmt::Arguments<'_>, why: String, cause: Cause) {
        let object = ObjectRef {
            kind: self.kind,
            name: self.name.clone(),
        };
        self.skipped.push(Skipped {
            object,
            field: field.to_string(),
            why,
            cause,
        });
    }

    /// Returns the value if it was readable. Otherwise records the error.
    pub(super) fn take<T>(
        &mut self,
        field: fmt::Arguments<'_>,
        read: Result<T, String>,
    ) -> Option<T> {
        read.map_err(|why| self.skip(field, why)).ok()
    }
}

/// Parses an IP address as leniently as Kubernetes: leading zeros are decimal, and an IPv4-mapped
/// address is IPv4.
pub fn ip(text: &str) -> Result<IpAddr, String> {
    let strict = text.parse::<IpAddr>().ok();
    let ip = strict
        .or_else(|| zero_padded(text).map(IpAddr::V4))
        .ok_or_else(|| format!("{text:?} is not an IP address"))?;
    Ok(ip.to_canonical())
}

/// Returns the kind of an address with a fixed meaning on every host. The API server refuses such
/// addresses in `spec.externalIPs` but not in `status.loadBalancer`. Link-local addresses are
/// included because clouds serve node credentials there.
pub(super) fn not_on_a_network(ip: IpAddr) -> Option<&'static str> {
    match ip {
        ip if ip.is_loopback() => Some("a loopback address"),
        ip if ip.is_multicast() => Some("a multicast address"),
        IpAddr::V4(Ipv4Addr::BROADCAST) => Some("the broadcast address"),
        IpAddr::V4(ip) => ip.is_link_local().then_some("a link-local address"),
        IpAddr::V6(ip) => ip.is_unicast_link_local().then_some("a link-local address"),
    }
}

fn zero_padded(text: &str) -> Option<Ipv4Addr> {
    let mut octets = [0; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        let digits = parts
            .next()
            .filter(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))?;
        let significant = digits.trim_start_matches('0');
        *octet = if significant.is_empty() {
            0
        } else {
            significant.parse().ok()?
        };
    }
    parts.next().is_none().then(|| octets.into())
}

/// Parses a unicast address of one family.
pub(super) fn addr<A: Addr>(text: &str) -> Result<A, String> {
    let addr =
        A::from_ip(ip(text)?).ok_or_else(|| format!("{text:?} is not an {} address", A::FAMILY))?;
    if addr.is_unspecified() {
        Err(format!("{text:?} is not a unicast address"))
    } else {
        Ok(addr)
    }
}

/// Reads an endpoint's unicast address of one family.
pub(super) fn addr_of<A: Addr>(address: &Address) -> Result<A, String> {
    match address {
        Address::Ip(ip) => match A::from_ip(ip.to_canonical()) {
            Some(addr) if !addr.is_unspecified() => Ok(addr),
            _ => addr(&ip.to_string()),
        },
        Address::Text(text) => addr(text),
        Address::Missing => Err("missing".to_owned()),
    }
}

pub(crate) fn ip_of(address: &Address) -> Result<IpAddr, String> {
    match address {
        Address::Ip(ip) => Ok(ip.to_canonical()),
        Address::Text(text) => ip(text),
        Address::Missing => Err("missing".to_owned()),
    }
}

pub(super) fn port_number(number: i32) -> Result<Port, String> {
    match u16::try_from(number) {
        Ok(number @ 1..) => Ok(Port::new(number)),
        Ok(0) | Err(_) => Err(format!("{number} is not in 1..=65535")),
    }
}

pub(super) fn protocol(name: Option<&str>) -> Result<Proto, String> {
    match name {
        None | Some("TCP") => Ok(Proto::TCP),
        Some("UDP") => Ok(Proto::UDP),
        Some("SCTP") => Ok(Proto::SCTP),
        Some(other) => Err(format!("{other:?} is not one of TCP, UDP, SCTP")),
    }
}

/// Parses a network. Host bits are allowed.
pub fn cidr(text: &str) -> Result<IpNet, String> {
    let lenient = || {
        let (addr, bits) = text.split_once('/')?;
        IpNet::new(zero_padded(addr)?.into(), bits.parse().ok()?).ok()
    };
    let net = text.parse::<IpNet>().ok().or_else(lenient);
    net.map(|net| net.trunc())
        .ok_or_else(|| format!("{text:?} is not a CIDR"))
}

#[cfg(test)]
mod tests {
    use proxy_common::addr::{Addr4, Addr6};

    use super::*;

    #[test]
    fn addresses_are_read_leniently_and_made_canonical() {
        let cases = [
            ("10.96.0.1", "10.96.0.1"),
            ("010.096.000.001", "10.96.0.1"),
            ("::ffff:10.96.0.1", "10.96.0.1"),
            ("FD00:0:0:0::000A", "fd00::a"),
        ];
        for (text, canonical) in cases {
            assert_eq!(
                ip(text).map(|ip| ip.to_string()).as_deref(),
                Ok(canonical),
                "{text}"
            );
        }
        for text in [
            "",
            "10.96.0",
            "10.96.0.256",
            "10.96.0.1.",
            "10.96..1",
            "+1.2.3.4",
            "10.96.0.1/32",
            "fd00::g",
        ] {
            assert!(ip(text).is_err(), "{text}");
        }
    }

    #[test]
    fn networks_are_read_leniently() {
        for (text, net) in [
            ("10.0.0.1/8", "10.0.0.0/8"),
            ("010.000.0.0/08", "10.0.0.0/8"),
            ("fd00::1/64", "fd00::/64"),
        ] {
            assert_eq!(
                cidr(text).map(|net| net.to_string()).as_deref(),
                Ok(net),
                "{text}"
            );
        }
        for text in [
            "10.0.0.0",
            "010.0.0.0",
            "010.0.0.0/33",
            "010.0.0.0/",
            "010.0.0/8",
            "/8",
        ] {
            assert!(cidr(text).is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_have_the_requested_family_and_are_specified() {
        assert!(addr::<Addr4>("10.96.0.1").is_ok());
        assert!(addr::<Addr6>("fd00::1").is_ok());
        assert_eq!(
            addr::<Addr4>("fd00::1"),
            Err(r#""fd00::1" is not an IPv4 address"#.to_owned())
        );
        assert!(addr::<Addr6>("::ffff:10.96.0.1").is_err());
        assert!(addr::<Addr4>("0.0.0.0").is_err());
        assert!(addr::<Addr6>("::").is_err());
    }

    #[test]
    fn port_numbers_have_limits() {
        assert_eq!(port_number(1), Ok(Port::new(1)));
        assert_eq!(port_number(65_535), Ok(Port::new(65_535)));
        for number in [0, -1, 65_536, i32::MIN, i32::MAX] {
            assert!(port_number(number).is_err(), "{number}");
        }
    }
}
