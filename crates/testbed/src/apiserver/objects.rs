//! Writes objects: from a request or a test to the store.

use std::sync::Arc;

use ipnet::IpNet;
use serde_json::{Value, json};

use super::admit::{check_name, complete, decoded, give_name, now, remove, text, typed, validate};
use super::failure::{Cause, Failure, Outcome};
use super::kinds::{KINDS, Kind, NAMESPACE, SERVICE, SERVICE_CIDR, Status};
use super::service::{Addresses, validate_status};
use super::store::{Key, Store};

/// The objects, and the allocations that writes need.
#[derive(Debug)]
pub(crate) struct Objects {
    pub(crate) store: Store,
    addresses: Addresses,
}

#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) kind: &'static Kind,
    pub(crate) namespace: String,
    /// Empty for a creation, which takes the object's own name.
    pub(crate) name: String,
    /// True if the body is a patch.
    pub(crate) patch: bool,
    /// True if only the status is written.
    pub(crate) status: bool,
    /// True to skip the write itself.
    pub(crate) dry_run: bool,
    /// True to refuse unknown fields instead of dropping them.
    pub(crate) strict: bool,
}

impl Objects {
    /// Returns the objects of every new cluster, except the Service `kubernetes`.
    pub(crate) fn new(cidrs: Vec<IpNet>) -> Outcome<Self> {
        let spec = json!({"cidrs": cidrs.iter().map(ToString::to_string).collect::<Vec<_>>()});
        let mut objects = Self {
            store: Store::new(),
            addresses: Addresses::new(cidrs),
        };
        for name in ["default", "kube-node-lease", "kube-public", "kube-system"] {
            objects.put(NAMESPACE, &json!({"metadata": {"name": name}}))?;
        }
        let ready = json!({"type": "Ready", "status": "True", "reason": "", "message": "Kubernetes default Service CIDR is ready",
            "lastTransitionTime": now()});
        objects.put(
            SERVICE_CIDR,
            &json!({"metadata": {"name": "kubernetes"}, "spec": spec, "status": {"conditions": [ready]}}),
        )?;
        Ok(objects)
    }

    pub(crate) fn create(&mut self, target: &Target, sent: &Value) -> Outcome<Arc<Value>> {
        let mut new = decoded(target, sent)?;
        give_name(&mut new);
        let name = text(&new, "/metadata/name").to_owned();
        let key = Key::new(target.kind, &target.namespace, &name);
        check_name(target.kind, &name)?;
        if !text(&new, "/metadata/resourceVersion").is_empty() {
            return Err(Failure::unexplained(
                "resourceVersion should not be set on objects to be created",
            ));
        }
        let home = Key::new(NAMESPACE, "", &target.namespace);
        if target.kind.namespaced && self.store.get(&home).is_none() {
            return Err(Failure::not_found(NAMESPACE, &target.namespace));
        }
        if self.store.get(&key).is_some() {
            return Err(Failure::already_exists(target.kind, &name));
        }
        if target.kind.status == Status::Apart {
            remove(&mut new, "status");
        }
        remove(&mut new["metadata"], "deletionTimestamp");
        complete(target.kind, &mut new, None, &mut self.addresses)?;
        validate(target.kind, &new, None, &self.addresses)?;
        self.write(target, &key, Some(new))
    }

    /// Replaces an object by the result of `change`: a PUT or a PATCH.
    pub(crate) fn update(
        &mut self,
        target: &Target,
        change: impl FnOnce(&Value) -> Outcome<Value>,
    ) -> Outcome<Arc<Value>> {
        let key = Key::new(target.kind, &target.namespace, &target.name);
        let old = self
            .store
            .get(&key)
            .cloned()
            .ok_or_else(|| Failure::not_found(target.kind, &target.name))?;
        let mut new = decoded(target, &change(&old)?)?;
        let version = text(&new, "/metadata/resourceVersion");
        if !version.is_empty() && version != text(&old, "/metadata/resourceVersion") {
            let why = "the object has been modified; please apply your changes to the latest version and try again";
            return Err(Failure::conflict(target.kind, &target.name, why));
        }
        let uid = text(&new, "/metadata/uid");
        if !uid.is_empty() && uid != text(&old, "/metadata/uid") {
            let was = text(&old, "/metadata/uid");
            return Err(match target.patch {
                true => {
                    let why = format!("\"{uid}\": field is immutable");
                    let kind = target.kind;
                    let path = "metadata.uid";
                    Failure::invalid(
                        kind.kind,
                        kind.group,
                        &target.name,
                        path,
                        Cause::Invalid,
                        &why,
                    )
                }
                false => {
                    let why = format!(
                        "Precondition failed: UID in precondition: {uid}, UID in object meta: {was}"
                    );
                    Failure::conflict(target.kind, &target.name, &why)
                }
            });
        }
        if target.status {
            let status = new["status"].take();
            new = Value::clone(&old);
            new["status"] = status;
        } else if let Some(status) = old
            .get("status")
            .filter(|_| target.kind.status != Status::None)
        {
            new["status"] = status.clone();
        }
        complete(target.kind, &mut new, Some(&old), &mut self.addresses)?;
        validate(target.kind, &new, Some(&old), &self.addresses)?;
        if target.status && target.kind.kind == SERVICE.kind {
            validate_status(&new)?;
        }
        let is_waiting = !new["metadata"]["deletionTimestamp"].is_null();
        if is_waiting
            && new["metadata"]["finalizers"]
                .as_array()
                .is_none_or(Vec::is_empty)
        {
            self.write(target, &key, None)?; // The last finalizer is gone.
            return Ok(Arc::new(new));
        }
        if new == *old {
            return Ok(old); // No change: no new version, no event.
        }
        self.write(target, &key, Some(new))
    }

    /// Deletes an object, or marks it while finalizers hold it. Returns the previous object, and
    /// whether it is gone.
    pub(crate) fn delete(
        &mut self,
        target: &Target,
        options: &Value,
    ) -> Outcome<(Arc<Value>, bool)> {
        let key = Key::new(target.kind, &target.namespace, &target.name);
        let old = self
            .store
            .get(&key)
            .cloned()
            .ok_or_else(|| Failure::not_found(target.kind, &target.name))?;
        let uid = ("uid", "UID", "deleted and then recreated");
        for (field, what, might) in [uid, ("resourceVersion", "ResourceVersion", "modified")] {
            let want = options["preconditions"][field].as_str();
            let is = text(&old, &format!("/metadata/{field}"));
            if let Some(want) = want.filter(|want| *want != is) {
                let why = format!(
                    "the {what} in the precondition ({want}) does not match the {what} in record ({is}). \
                     The object might have been {might}"
                );
                return Err(Failure::precondition(target.kind, &target.name, &why));
            }
        }
        if old["metadata"]["finalizers"]
            .as_array()
            .is_some_and(|f| !f.is_empty())
        {
            if !old["metadata"]["deletionTimestamp"].is_null() {
                return Ok((old, false));
            }
            let mut new = Value::clone(&old);
            new["metadata"]["deletionTimestamp"] = json!(now());
            new["metadata"]["deletionGracePeriodSeconds"] = json!(0);
            return Ok((self.write(target, &key, Some(new))?, false));
        }
        self.write(target, &key, None)?;
        if target.kind.kind == NAMESPACE.kind && !target.dry_run {
            self.empty(&target.name);
        }
        Ok((old, true))
    }

    /// Stores a test's object with its status, without validation and without requiring its
    /// namespace.
    pub(crate) fn put(&mut self, kind: &'static Kind, object: &Value) -> Outcome<Arc<Value>> {
        let given = text(object, "/metadata/namespace");
        let namespace = if !kind.namespaced {
            ""
        } else if given.is_empty() {
            "default"
        } else {
            given
        };
        let target = Target {
            kind,
            namespace: namespace.to_owned(),
            name: text(object, "/metadata/name").to_owned(),
            patch: false,
            status: false,
            dry_run: false,
            strict: true,
        };
        if kind.namespaced
            && self
                .store
                .get(&Key::new(NAMESPACE, "", namespace))
                .is_none()
        {
            self.put(NAMESPACE, &json!({"metadata": {"name": namespace}}))?;
        }
        let key = Key::new(kind, namespace, &target.name);
        let old = self.store.get(&key).cloned();
        let mut new = decoded(&target, object)?;
        complete(kind, &mut new, old.as_deref(), &mut self.addresses)?;
        match old.filter(|old| new == **old) {
            Some(old) => Ok(old),
            None => self.write(&target, &key, Some(new)),
        }
    }

    /// Writes, and tracks the Services' addresses. Returns the object as stored, or the deleted
    /// object.
    fn write(&mut self, target: &Target, key: &Key, new: Option<Value>) -> Outcome<Arc<Value>> {
        let old = self.store.get(key).cloned();
        if target.dry_run {
            return Ok(new.map(Arc::new).or(old).unwrap_or_default());
        }
        let new = self.store.write(key, new);
        if target.kind.kind == SERVICE.kind {
            if let Some(old) = &old {
                self.addresses.release(&typed(old)?);
            }
            if let Some(new) = &new {
                self.addresses.claim(&typed(new)?);
            }
        }
        Ok(new.or(old).unwrap_or_default())
    }

    /// Deletes all objects of a namespace, like the namespace controller.
    fn empty(&mut self, namespace: &str) {
        for kind in KINDS.iter().filter(|k| k.namespaced) {
            let keys: Vec<_> = self
                .store
                .objects(kind, namespace)
                .map(|(key, _)| key.clone())
                .collect();
            for key in keys {
                let old = self.store.get(&key).cloned();
                if let Some(service) = old
                    .filter(|_| kind.kind == SERVICE.kind)
                    .and_then(|old| typed(&old).ok())
                {
                    self.addresses.release(&service);
                }
                self.store.write(&key, None);
            }
        }
    }
}
