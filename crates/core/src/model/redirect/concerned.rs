//! Finds the Services of a LocalRedirect or pod, and the ineffective parts of LocalRedirects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Terms, annotated, oldest};
use crate::compact::{self, LOCAL_REDIRECT, LocalRedirect};
use crate::input::ObjectName;
use crate::model::read::{Reader, Skipped};
use crate::selector::Selector;
use crate::store::Store;

/// Returns the Service that a LocalRedirect of the same namespace names.
pub(crate) fn redirected_by(store: &Store, name: &ObjectName) -> Option<ObjectName> {
    store
        .redirect(name)?
        .service()
        .filter(|service| service.namespace == name.namespace)
}

/// Returns the Services for which a pod answers.
pub(crate) fn redirected_to(store: &Store, pod: &ObjectName) -> BTreeSet<ObjectName> {
    let Some(pod) = store.pods_in(&pod.namespace).find(|one| one.name == *pod) else {
        return BTreeSet::new();
    };
    let selects = |selector: &Selector| selector.selects(&pod.labels);
    let is_annotated = |service: &&Arc<compact::Service>| {
        service
            .local_redirect
            .as_ref()
            .is_some_and(|text| annotated(text).is_ok_and(|found| selects(&found)))
    };
    let services = store
        .services_of(&pod.name.namespace)
        .filter(is_annotated)
        .map(|service| service.name.clone());
    let selects_pod = |object: &&LocalRedirect| {
        let terms = Terms::of(object, store.redirect_addresses(), &mut Vec::new());
        terms.is_some_and(|terms| selects(&terms.selector))
    };
    let objects = store.redirects_in(&pod.name.namespace).filter(selects_pod);
    services
        .chain(objects.filter_map(LocalRedirect::service))
        .collect()
}

/// Returns the ineffective parts of these LocalRedirects, whether or not their Services exist. The
/// list of a deleted object is empty.
pub(crate) fn skipped_redirects(
    store: &Store,
    names: BTreeSet<ObjectName>,
) -> Vec<(ObjectName, Vec<Skipped>)> {
    let mut oldest_of = BTreeMap::new();
    let mut skipped_of = |name: &ObjectName| {
        let mut skipped = Vec::new();
        let object = store.redirect(name)?;
        if Terms::of(object, store.redirect_addresses(), &mut skipped).is_none() {
            return Some(skipped);
        }
        let service = object.service()?;
        let mut reader = Reader::new("LocalRedirect", name, &mut skipped);
        let field = "spec.redirectFrontend.serviceMatcher.serviceName";
        if store
            .service(&service)
            .is_some_and(|service| service.local_redirect.is_some())
        {
            let why =
                format!("Service {service} has the annotation {LOCAL_REDIRECT}, which counts");
            reader.conflict(format_args!("{field}"), why);
            return Some(skipped);
        }
        let oldest = || oldest(store, &service).map(compact::Compact::name);
        let first: &Option<ObjectName> = oldest_of.entry(service.clone()).or_insert_with(oldest);
        if let Some(first) = first.as_ref().filter(|first| *first != name) {
            let why = format!("LocalRedirect {first} redirects Service {service}, and is older");
            reader.conflict(format_args!("{field}"), why);
        }
        Some(skipped)
    };
    names
        .into_iter()
        .map(|name| {
            let skipped = skipped_of(&name).unwrap_or_default();
            (name, skipped)
        })
        .collect()
}
