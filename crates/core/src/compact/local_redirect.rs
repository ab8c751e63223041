//! The custom resource LocalRedirect, modelled on Cilium's CiliumLocalRedirectPolicy. The schema is
//! in `deploy/`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::{ListableResource, Metadata, NamespaceResourceScope, Resource};
use serde::{Deserialize, Serialize};

use super::{Compact, Needed, Service, ServicePort, needed};
use crate::input::ObjectName;

/// The name prefix of stand-in Services, which represent redirected addresses. The dot is
/// impossible in a Service's name.
pub(crate) const STAND_IN: &str = "localredirect.";

/// The API object. Missing fields are empty; only the model validates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LocalRedirect {
    pub metadata: ObjectMeta,
    pub spec: LocalRedirectSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LocalRedirectSpec {
    pub redirect_frontend: RedirectFrontend,
    pub redirect_backend: RedirectBackend,
    pub skip_redirect_from_backend: bool,
}

/// The redirected packets. Exactly one matcher is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RedirectFrontend {
    pub address_matcher: Option<AddressMatcher>,
    pub service_matcher: Option<ServiceMatcher>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AddressMatcher {
    pub ip: String,
    pub to_ports: Vec<PortInfo>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceMatcher {
    pub service_name: String,
    pub namespace: String,
    /// The redirected ports of the Service. Empty means all.
    pub to_ports: Vec<PortInfo>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RedirectBackend {
    pub local_endpoint_selector: LabelSelector,
    pub to_ports: Vec<PortInfo>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortInfo {
    pub name: String,
    /// The number, as text.
    pub port: String,
    pub protocol: String,
}

impl LocalRedirect {
    /// Returns the Service that the object names, permitted or not. For an address, returns its
    /// stand-in.
    pub(crate) fn service(&self) -> Option<ObjectName> {
        let RedirectFrontend {
            service_matcher,
            address_matcher,
        } = &self.spec.redirect_frontend;
        match (service_matcher, address_matcher) {
            // The prefix is reserved for stand-ins.
            (Some(matcher), None) if matcher.service_name.starts_with(STAND_IN) => None,
            (Some(matcher), None) => Some(ObjectName::new(
                matcher.namespace.as_str(),
                matcher.service_name.as_str(),
            )),
            (None, Some(_)) => Some(self.stand_in()),
            _ => None,
        }
    }

    pub(crate) fn stand_in(&self) -> ObjectName {
        let own = Compact::name(self);
        ObjectName::new(&*own.namespace, format!("{STAND_IN}{}", own.name))
    }

    /// Returns the stand-in Service of an address. An unreadable port becomes the invalid port 0.
    pub(crate) fn service_of_address(&self) -> Option<Service> {
        let matcher = self.spec.redirect_frontend.address_matcher.as_ref()?;
        let port = |port: &PortInfo| ServicePort {
            name: Some(port.name.to_ascii_lowercase().as_str().into()),
            protocol: Some(port.protocol.as_str().into()),
            port: port.port.parse().unwrap_or_default(),
            node_port: None,
            target_port: None,
        };
        Some(Service {
            name: self.stand_in(),
            uid: self.uid().into(),
            created: self.metadata.creation_timestamp.as_ref().map(|time| time.0),
            is_redirected_address: true,
            type_: Some("ClusterIP".into()),
            cluster_ip: Some(matcher.ip.as_str().into()),
            ports: matcher.to_ports.iter().map(port).collect(),
            ..Service::default()
        })
    }
}

impl Resource for LocalRedirect {
    const API_VERSION: &'static str = "kpx.dev/v1alpha1";
    const GROUP: &'static str = "kpx.dev";
    const KIND: &'static str = "LocalRedirect";
    const VERSION: &'static str = "v1alpha1";
    const URL_PATH_SEGMENT: &'static str = "localredirects";
    type Scope = NamespaceResourceScope;
}

impl ListableResource for LocalRedirect {
    const LIST_KIND: &'static str = "LocalRedirectList";
}

impl Metadata for LocalRedirect {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Compact for LocalRedirect {
    type Object = Self;

    const NEEDED: Needed = needed::LOCAL_REDIRECT_OBJECT;

    fn compact(redirect: Self) -> Self {
        redirect
    }

    fn name(&self) -> ObjectName {
        ObjectName::from(&self.metadata)
    }

    fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }
}
