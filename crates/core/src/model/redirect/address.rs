//! LocalRedirects of addresses that no Service has.
//!
//! The model represents such an object as a Service without endpoints, under a name that is
//! impossible for Services. Clients without a serving pod reach the address as if kpx were absent.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{ListedPort, ports, serves};
use crate::compact::{AddressMatcher, STAND_IN};
use crate::input::ObjectName;
use crate::model::read::{ObjectRef, Reader, Skipped, ip, not_on_a_network};

const PORTS_MAX: usize = 100;
const IP: &str = "spec.redirectFrontend.addressMatcher.ip";
const PORTS: &str = "spec.redirectFrontend.addressMatcher.toPorts";

/// Reads an address and its ports. `None` if they may not be served.
pub(super) fn read(
    reader: &mut Reader<'_>,
    matcher: &AddressMatcher,
    permitted: &[IpNet],
) -> Option<Vec<ListedPort>> {
    let ip = reader.take(format_args!("{IP}"), ip(&matcher.ip))?;
    if !reader.admit(format_args!("{IP}"), admit(ip, permitted)) {
        return None;
    }
    let listed = ports(reader, PORTS, &matcher.to_ports)?;
    if listed.is_empty() {
        reader.skip(format_args!("{PORTS}"), "no port is listed");
        return None;
    }
    if listed.len() > PORTS_MAX {
        reader.skip(
            format_args!("{PORTS}"),
            format!("{} ports are more than {PORTS_MAX}", listed.len()),
        );
        return None;
    }
    Some(listed)
}

/// Records the listed ports that no pod port serves.
pub(super) fn report_unserved(
    reader: &mut Reader<'_>,
    listed: &[ListedPort],
    backends: &[ListedPort],
) {
    for (index, port) in listed.iter().enumerate() {
        if !backends
            .iter()
            .any(|backend| serves(backends, backend, &port.name, port.proto))
        {
            reader.skip(
                format_args!("{PORTS}[{index}]"),
                "no port of redirectBackend has its name and protocol",
            );
        }
    }
}

/// Checks that an object may redirect an address. The error names the reason.
fn admit(ip: IpAddr, permitted: &[IpNet]) -> Result<(), String> {
    if ip.is_unspecified() {
        return Err(format!("{ip} is not a unicast address"));
    }
    // Clouds serve metadata at IPv4 link-local addresses, and routers of pod networks forward them.
    let is_metadata = matches!(ip, IpAddr::V4(ip) if ip.is_link_local());
    if let Some(what) = not_on_a_network(ip).filter(|_| !is_metadata) {
        return Err(format!("{ip} is {what}"));
    }
    match permitted.iter().any(|net| net.contains(&ip)) {
        true => Ok(()),
        false => Err(format!(
            "{ip} is not among the operator's local-redirect-addresses"
        )),
    }
}

/// Returns the object behind a name in the model: a Service, or a LocalRedirect of an address.
pub(crate) fn claimant(name: &ObjectName) -> ObjectRef {
    match name.name.strip_prefix(STAND_IN) {
        Some(own) => ObjectRef {
            kind: "LocalRedirect",
            name: ObjectName::new(&*name.namespace, own),
        },
        None => ObjectRef {
            kind: "Service",
            name: name.clone(),
        },
    }
}

/// Replaces a stand-in and its field by the LocalRedirect and its field.
pub(crate) fn name_object(skipped: &mut Skipped) {
    if skipped.object.kind == "Service" && skipped.object.name.name.starts_with(STAND_IN) {
        skipped.object = claimant(&skipped.object.name);
        skipped.field =
            skipped
                .field
                .replacen("spec.clusterIP", IP, 1)
                .replacen("spec.ports", PORTS, 1);
    }
}
