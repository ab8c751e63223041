//! Finds the Services that an object affects.

use super::Desired;
use crate::input::ObjectName;
use crate::model::{self, Cause, ObjectRef, Skipped};

impl Desired {
    /// Returns the Service of a refused endpoint, `None` for other objects. The Event goes to the
    /// Service, because operators do not look at its slices.
    pub fn service_refused(&self, skipped: &Skipped) -> Option<ObjectRef> {
        let is_endpoint = skipped.cause == Cause::Refused && skipped.object.kind == "EndpointSlice";
        let slice = self
            .store
            .slice(&skipped.object.name)
            .filter(|_| is_endpoint)?;
        Some(ObjectRef {
            kind: "Service",
            name: slice.service.clone()?,
        })
    }

    /// Returns the Services that another object affects: for an EndpointSlice its Service, for a
    /// LocalRedirect the Service that it names, for a Pod the Services that are redirected to it.
    pub fn concerned(&self, object: &ObjectRef) -> Vec<ObjectName> {
        match object.kind {
            "EndpointSlice" => self
                .store
                .slice(&object.name)
                .and_then(|slice| slice.service.clone())
                .into_iter()
                .collect(),
            "LocalRedirect" => model::redirected_by(&self.store, &object.name)
                .into_iter()
                .collect(),
            "Pod" => model::redirected_to(&self.store, &object.name)
                .into_iter()
                .collect(),
            _ => Vec::new(),
        }
    }
}
