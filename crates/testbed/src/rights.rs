//! The permissions of roles, in the API server's record format of requests.

use std::collections::BTreeSet;

use k8s_openapi::api::rbac::v1::ClusterRole;

/// Returns the permissions of a role: verb, group and resource.
pub fn granted(role: &ClusterRole) -> BTreeSet<(&str, &str, &str)> {
    let mut granted = BTreeSet::new();
    for rule in role.rules.iter().flatten() {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                granted.extend(
                    rule.verbs
                        .iter()
                        .map(|verb| (verb.as_str(), group.as_str(), resource.as_str())),
                );
            }
        }
    }
    granted
}
