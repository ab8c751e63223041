//! Finds the pods of this node that answer for a Service, by its annotation or a LocalRedirect of
//! its namespace. A LocalRedirect may also name an address that no Service has: see [`address`].
//!
//! A redirect is active on a port while any of its pods is ready. Otherwise, and for clients on
//! other nodes, the Service's own endpoints answer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::frontend::{Backend, Service};

use super::read::{ObjectRef, Reader, Skipped, addr, port_number, protocol};
use crate::compact::{
    self, LOCAL_REDIRECT, LocalPod, LocalRedirect, PortInfo, SELECTOR_LEN_MAX, STAND_IN,
    ServiceMatcher, TargetPort,
};
use crate::input::ObjectName;
use crate::selector::Selector;
use crate::store::Store;

pub(crate) mod address;
mod concerned;

pub(crate) use concerned::{redirected_by, redirected_to, skipped_redirects};

/// A Service's redirect, with the selected pods of this node.
pub struct Redirect<'a> {
    terms: Terms,
    /// The object that declares the redirect, and the object's selector field.
    from: (ObjectRef, String),
    pods: Vec<&'a LocalPod>,
}

/// The parsed content of a redirect annotation or a LocalRedirect.
struct Terms {
    selector: Selector,
    ports: Ports,
    /// Set if packets of the answering pods go to the Service's own endpoints.
    spares_backends: bool,
}

/// The mapping from Service ports to pod ports.
enum Ports {
    /// The Service's own `targetPort`.
    OfService,
    Listed {
        /// The redirected Service ports. `None` means all.
        frontends: Option<BTreeSet<(Port, Proto)>>,
        backends: Vec<ListedPort>,
    },
}

struct ListedPort {
    name: String,
    number: Port,
    proto: Proto,
}

/// A redirected Service port.
pub(super) struct RedirectedPort<A: Addr> {
    /// The ready pods, by address and port.
    pub(super) backends: Vec<Backend<A>>,
    /// The names of these pods, in the same order.
    pub(super) pods: Vec<ObjectName>,
    /// The answering pods that themselves reach the Service's own endpoints.
    pub(super) spared: BTreeSet<A>,
    pub(super) flags: u16,
}

/// The selector field of a LocalRedirect.
const SELECTOR: &str = "spec.redirectBackend.localEndpointSelector";

impl<'a> Redirect<'a> {
    /// Returns the redirect of a Service, if it has a readable one.
    pub(super) fn of(
        store: &'a Store,
        name: &ObjectName,
        service: &compact::Service,
        has_redirects: bool,
        skipped: &mut Vec<Skipped>,
    ) -> Option<Self> {
        let field = || format!("metadata.annotations[{LOCAL_REDIRECT}]");
        let (kind, object, field, terms) = match &service.local_redirect {
            Some(text) => {
                let mut reader = Reader::new("Service", name, skipped);
                if !has_redirects {
                    reader.skip(
                        format_args!("{}", field()),
                        "ignored: kpx runs without --local-redirect",
                    );
                    return None;
                }
                let selector = reader.take(format_args!("{}", field()), annotated(text))?;
                (
                    "Service",
                    name.clone(),
                    field(),
                    Terms {
                        selector,
                        ports: Ports::OfService,
                        spares_backends: true,
                    },
                )
            }
            None if !has_redirects => return None,
            None => {
                let object = oldest(store, name)?;
                // `skipped_redirects` reports these errors once for each object.
                let terms = Terms::of(object, store.redirect_addresses(), &mut Vec::new())?;
                (
                    "LocalRedirect",
                    compact::Compact::name(object),
                    SELECTOR.to_owned(),
                    terms,
                )
            }
        };
        let mut reader = Reader::new(kind, &object, skipped);
        let texts = [
            ("internalTrafficPolicy", &service.internal_traffic_policy),
            ("externalTrafficPolicy", &service.external_traffic_policy),
        ];
        if let Some((policy, _)) = texts
            .iter()
            .find(|(_, text)| text.as_deref() == Some("Local"))
        {
            let why = format!("Service {name} has {policy} Local, which overrides the redirect");
            reader.skip(format_args!("{field}"), why);
            return None;
        }
        if store.are_pods_refused() {
            reader.skip(
                format_args!("{field}"),
                "the API server does not let kpx list and watch Pods",
            );
            return None;
        }
        let pods = store.pods_in(&name.namespace);
        let pods = pods
            .filter(|pod| pod.is_running && terms.selector.selects(&pod.labels))
            .collect();
        Some(Self {
            terms,
            from: (ObjectRef { kind, name: object }, field),
            pods,
        })
    }

    /// Returns the pods that answer at a port. `None` if the Service's own endpoints answer.
    pub(super) fn port<A: Addr>(
        &self,
        port: &compact::ServicePort,
        number: Port,
        proto: Proto,
        admit: impl Fn(IpAddr) -> Result<(), String>,
        skipped: &mut Vec<Skipped>,
    ) -> Option<RedirectedPort<A>> {
        let mut backends = BTreeMap::new();
        let mut spared = BTreeSet::new();
        let mut spares_node = false;
        let mut lacking = 0;
        let target = self.terms.ports.target(port, number, proto)?;
        for pod in &self.pods {
            let Some(ip) = ip_of::<A>(pod, &admit, skipped) else {
                continue;
            };
            spares_node |= pod.host_network;
            spared.insert(ip);
            match target.number_at(pod, proto) {
                Some(number) if pod.is_ready => {
                    let backend = Backend::new(ip, number, Backend::<A>::LOCAL);
                    backends.insert(SockAddr::new(ip, number), (backend, pod.name.clone()));
                }
                Some(_) => {}
                None => lacking += usize::from(pod.is_ready),
            }
        }
        if backends.is_empty() {
            if lacking > 0 {
                let (ObjectRef { kind, name }, field) = &self.from;
                let why = format!("no ready pod has a port {target} for {proto}");
                Reader::new(kind, name, skipped).skip(format_args!("{field}"), why);
            }
            return None;
        }
        let spares = self.terms.spares_backends;
        let flag = |set: bool, flag| if set { flag } else { 0 };
        if !spares {
            spared.clear();
        }
        let (backends, pods) = backends.into_values().unzip();
        Some(RedirectedPort {
            backends,
            pods,
            flags: Service::REDIRECTED
                | flag(spares, Service::SPARES_PODS)
                | flag(spares && spares_node, Service::SPARES_NODE),
            spared,
        })
    }
}

fn annotated(text: &str) -> Result<Selector, String> {
    if text.len() > SELECTOR_LEN_MAX {
        return Err(format!("a selector may have {SELECTOR_LEN_MAX} bytes"));
    }
    match text.parse()? {
        selector if selector == Selector::default() => {
            Err("an empty selector would select every pod of the namespace".to_owned())
        }
        selector => Ok(selector),
    }
}

fn ip_of<A: Addr>(
    pod: &LocalPod,
    admit: impl Fn(IpAddr) -> Result<(), String>,
    skipped: &mut Vec<Skipped>,
) -> Option<A> {
    let (index, ip) = pod
        .ips
        .iter()
        .enumerate()
        .find_map(|(index, text)| Some((index, addr::<A>(text).ok()?)))?;
    let mut reader = Reader::new("Pod", &pod.name, skipped);
    reader
        .admit(format_args!("status.podIPs[{index}]"), admit(ip.ip()))
        .then_some(ip)
}

/// The pod port of a Service port.
enum Target<'a> {
    Number(Port),
    Name(&'a str),
}

impl Target<'_> {
    /// Returns the port number in this pod. Pods may give one name different numbers.
    fn number_at(&self, pod: &LocalPod, proto: Proto) -> Option<Port> {
        match *self {
            Self::Number(number) => Some(number),
            Self::Name(name) => {
                let is_it = |port: &&compact::ContainerPort| {
                    port.name.as_deref() == Some(name)
                        && protocol(port.protocol.as_deref()) == Ok(proto)
                };
                pod.ports
                    .iter()
                    .find(is_it)
                    .and_then(|port| port_number(port.port).ok())
            }
        }
    }
}

impl fmt::Display for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{}", number.get()),
            Self::Name(name) => write!(f, "named {name:?}"),
        }
    }
}

impl Ports {
    /// Returns the pod port of a Service port. `None` if the port is not redirected.
    fn target<'a>(
        &self,
        port: &'a compact::ServicePort,
        number: Port,
        proto: Proto,
    ) -> Option<Target<'a>> {
        match self {
            Self::OfService => match &port.target_port {
                // Without `targetPort` the API server uses the port itself.
                None | Some(TargetPort::Number(0)) => Some(Target::Number(number)),
                Some(TargetPort::Number(target)) => port_number(*target).ok().map(Target::Number),
                Some(TargetPort::Name(name)) if name.is_empty() => Some(Target::Number(number)),
                Some(TargetPort::Name(name)) => Some(Target::Name(name)),
            },
            Self::Listed {
                frontends,
                backends,
            } => {
                if frontends
                    .as_ref()
                    .is_some_and(|frontends| !frontends.contains(&(number, proto)))
                {
                    return None;
                }
                let name = port.name.as_deref().unwrap_or_default();
                backends
                    .iter()
                    .find(|listed| serves(backends, listed, name, proto))
                    .map(|listed| Target::Number(listed.number))
            }
        }
    }
}

impl Terms {
    /// Parses an object. Errors begin with the field.
    fn of(object: &LocalRedirect, permitted: &[IpNet], skipped: &mut Vec<Skipped>) -> Option<Self> {
        let name = compact::Compact::name(object);
        let mut reader = Reader::new("LocalRedirect", &name, skipped);
        let spec = &object.spec;
        let frontends = frontends(&mut reader, object, permitted)?;
        let selector = reader.take(
            format_args!("{SELECTOR}"),
            Selector::of(&spec.redirect_backend.local_endpoint_selector),
        )?;
        let field = "spec.redirectBackend.toPorts";
        let backends = ports(&mut reader, field, &spec.redirect_backend.to_ports)?;
        if backends.is_empty() {
            reader.skip(format_args!("{field}"), "no port is listed");
            return None;
        }
        if let Some(index) = backends
            .iter()
            .position(|port| backends.len() > 1 && port.name.is_empty())
        {
            reader.skip(
                format_args!("{field}[{index}].name"),
                "with several ports, each needs the name of its Service port",
            );
            return None;
        }
        address::report_unserved(&mut reader, &frontends.of_address, &backends);
        let frontends = Some(frontends.of_service).filter(|ports| !ports.is_empty());
        let spares_backends = spec.skip_redirect_from_backend;
        Some(Self {
            selector,
            ports: Ports::Listed {
                frontends,
                backends,
            },
            spares_backends,
        })
    }
}

#[derive(Default)]
struct Frontends {
    /// The Service's redirected ports. Empty means all.
    of_service: BTreeSet<(Port, Proto)>,
    of_address: Vec<ListedPort>,
}

fn frontends(
    reader: &mut Reader<'_>,
    object: &LocalRedirect,
    permitted: &[IpNet],
) -> Option<Frontends> {
    let frontend = &object.spec.redirect_frontend;
    match (&frontend.service_matcher, &frontend.address_matcher) {
        (Some(matcher), None) => {
            admit_service(reader, object, matcher)?;
            let listed = ports(
                reader,
                "spec.redirectFrontend.serviceMatcher.toPorts",
                &matcher.to_ports,
            )?;
            let of_service = listed
                .into_iter()
                .map(|port| (port.number, port.proto))
                .collect();
            Some(Frontends {
                of_service,
                ..Frontends::default()
            })
        }
        (None, Some(matcher)) => {
            let of_address = address::read(reader, matcher, permitted)?;
            Some(Frontends {
                of_address,
                ..Frontends::default()
            })
        }
        _ => {
            reader.skip(
                format_args!("spec.redirectFrontend"),
                "needs either a serviceMatcher or an addressMatcher",
            );
            None
        }
    }
}

/// Checks that the object is in the Service's namespace: users may not redirect Services of other
/// namespaces.
fn admit_service(
    reader: &mut Reader<'_>,
    object: &LocalRedirect,
    matcher: &ServiceMatcher,
) -> Option<()> {
    if matcher.service_name.starts_with(STAND_IN) {
        let why = format!("{:?} is not a valid Service name", matcher.service_name);
        reader.skip(
            format_args!("spec.redirectFrontend.serviceMatcher.serviceName"),
            why,
        );
        return None;
    }
    let own = object.metadata.namespace.as_deref().unwrap_or_default();
    let named = &matcher.namespace;
    let admitted = match named == own {
        true => Ok(()),
        false => Err(format!(
            "{named:?} is not the object's own namespace; only Services of that namespace can be redirected"
        )),
    };
    reader
        .admit(
            format_args!("spec.redirectFrontend.serviceMatcher.namespace"),
            admitted,
        )
        .then_some(())
}

fn ports(reader: &mut Reader<'_>, field: &str, listed: &[PortInfo]) -> Option<Vec<ListedPort>> {
    let mut ports = Vec::with_capacity(listed.len());
    for (
        index,
        PortInfo {
            name,
            port,
            protocol: proto,
        },
    ) in listed.iter().enumerate()
    {
        let number = port
            .parse()
            .map_err(|_| format!("{port:?} is not a number"))
            .and_then(port_number);
        let number = reader.take(format_args!("{field}[{index}].port"), number)?;
        let proto = reader.take(
            format_args!("{field}[{index}].protocol"),
            protocol(Some(proto)),
        )?;
        ports.push(ListedPort {
            name: name.to_ascii_lowercase(),
            number,
            proto,
        });
    }
    Some(ports)
}

/// Returns true if a pod port serves a port of this name. A single pod port serves all ports of its
/// protocol.
fn serves(backends: &[ListedPort], listed: &ListedPort, name: &str, proto: Proto) -> bool {
    listed.proto == proto && (backends.len() == 1 || listed.name == name)
}

/// Returns true if a Service may be served. A LocalRedirect's stand-in may, if the object is
/// readable and the operator permits its address.
pub(super) fn is_served(store: &Store, name: &ObjectName, service: &compact::Service) -> bool {
    let is_read = |object| Terms::of(object, store.redirect_addresses(), &mut Vec::new()).is_some();
    !service.is_redirected_address || oldest(store, name).is_some_and(is_read)
}

/// Returns the oldest LocalRedirect that names the Service, from the Service's namespace.
fn oldest<'a>(store: &'a Store, service: &ObjectName) -> Option<&'a LocalRedirect> {
    store
        .redirects_of(service)
        .min_by(|one, other| age(one).cmp(&age(other)))
}

fn age(object: &LocalRedirect) -> impl Ord + use<> {
    let created = object.metadata.creation_timestamp.as_ref();
    (
        created.map_or(jiff::Timestamp::MAX, |time| time.0),
        compact::Compact::name(object),
    )
}
