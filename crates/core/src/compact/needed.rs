//! The fields of each kind that kpx reads. A source drops all other fields, so that they cannot
//! make an object unreadable.

use super::handover::{ACCEPTS, ADDRESSES, SINCE};
use super::service::{
    ALGORITHM, BACKEND_HEALTH, EXTERNAL_FORWARDING, LOCAL_REDIRECT, RESET_ON_NODE_LOSS, WEIGHTS,
};
use super::slice::{HEADLESS, LAST_CHANGE_TRIGGER_TIME, SERVICE_NAME, WEIGHT};

/// The needed fields of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needed {
    /// The whole value.
    All,
    /// These fields. For a list, these fields of each item.
    Fields(&'static [(&'static str, Needed)]),
}

impl Needed {
    /// Returns the needed part of a field. `None` if the field is not needed.
    pub fn of(self, field: &str) -> Option<Self> {
        match self {
            Self::All => Some(Self::All),
            Self::Fields(fields) => fields
                .iter()
                .find(|(name, _)| *name == field)
                .map(|(_, needed)| *needed),
        }
    }
}

/// A tree of fields: `name`, `name { field … }`, or a constant in parentheses.
macro_rules! fields {
    (@list [$($done:expr,)*]) => { Needed::Fields(&[$($done,)*]) };
    (@list [$($done:expr,)*] ($name:expr) $($rest:tt)*) => { fields!(@list [$($done,)* ($name, Needed::All),] $($rest)*) };
    (@list [$($done:expr,)*] $name:ident { $($inner:tt)* } $($rest:tt)*) => {
        fields!(@list [$($done,)* (stringify!($name), fields!($($inner)*)),] $($rest)*)
    };
    (@list [$($done:expr,)*] $name:ident $($rest:tt)*) => {
        fields!(@list [$($done,)* (stringify!($name), Needed::All),] $($rest)*)
    };
    ($($all:tt)+) => { fields!(@list [] $($all)+) };
}

/// The name and version of any object, even an unreadable one.
pub const NAMED: Needed = fields! { metadata { namespace name uid resourceVersion } };

/// The fields of a watch bookmark.
pub const MARK: Needed = fields! { metadata { resourceVersion annotations } };

pub(super) const SERVICE: Needed = fields! {
    metadata {
        namespace name uid resourceVersion creationTimestamp labels
        annotations { (ALGORITHM) (LOCAL_REDIRECT) (WEIGHTS) (BACKEND_HEALTH) (EXTERNAL_FORWARDING) (RESET_ON_NODE_LOSS) }
    }
    spec {
        type clusterIP clusterIPs externalName ipFamilies
        ports { name protocol port nodePort targetPort }
        externalIPs internalTrafficPolicy externalTrafficPolicy sessionAffinity
        sessionAffinityConfig { clientIP { timeoutSeconds } }
        healthCheckNodePort loadBalancerSourceRanges
    }
    status { loadBalancer { ingress { ip ipMode } } }
};

pub(super) const SLICE: Needed = fields! {
    metadata {
        namespace name uid resourceVersion
        labels { (SERVICE_NAME) (HEADLESS) }
        annotations { (LAST_CHANGE_TRIGGER_TIME) (WEIGHT) }
    }
    addressType
    ports { name protocol port }
    endpoints {
        addresses
        conditions { ready serving terminating }
        hostname nodeName zone
        hints { forNodes { name } forZones { name } }
        targetRef { kind namespace name }
    }
};

pub(super) const NODE: Needed = fields! {
    metadata { name uid resourceVersion deletionTimestamp labels }
    spec { podCIDR podCIDRs taints { key } }
    status { addresses { type address } conditions { type status } }
};

pub(super) const PEER_NODE: Needed = fields! {
    metadata { name uid resourceVersion }
    status { addresses { type address } }
};

pub(super) const HANDOVER_LEASE: Needed = fields! {
    metadata {
        namespace name uid resourceVersion ownerReferences
        annotations { (ACCEPTS) (SINCE) (ADDRESSES) }
    }
};

pub(super) const SERVICE_CIDR: Needed = fields! {
    metadata { name uid resourceVersion }
    spec { cidrs }
};

pub(super) const POD: Needed = fields! {
    metadata { namespace name uid resourceVersion deletionTimestamp labels annotations }
    spec {
        hostNetwork runtimeClassName
        containers { name ports { name protocol containerPort } }
        initContainers { name ports { name protocol containerPort } }
    }
    status { phase conditions { type status } podIP podIPs { ip } }
};

pub(super) const LOCAL_REDIRECT_OBJECT: Needed = fields! {
    metadata { namespace name uid resourceVersion creationTimestamp }
    spec {
        redirectFrontend {
            addressMatcher { ip toPorts { name port protocol } }
            serviceMatcher { serviceName namespace toPorts { name port protocol } }
        }
        redirectBackend {
            localEndpointSelector { matchLabels matchExpressions { key operator values } }
            toPorts { name port protocol }
        }
        skipRedirectFromBackend
    }
};
