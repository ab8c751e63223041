//! The query of a request.

use std::collections::BTreeMap;
use std::time::Duration;

use super::failure::{Cause, Failure, Outcome};
use super::kinds::Kind;
use super::select::Selector;

/// The parameters of a request; the last of equal names counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query(BTreeMap<String, String>);

/// The parameters of a list or a watch: `ListOptions` of the API.
#[derive(Clone, Debug)]
pub(crate) struct ListOptions {
    pub(crate) selector: Selector,
    /// 0 means no limit.
    pub(crate) limit: usize,
    pub(crate) token: Option<String>,
    pub(crate) version: Option<u64>,
    pub(crate) exact: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) bookmarks: bool,
    pub(crate) send_initial_events: Option<bool>,
}

impl Query {
    pub(crate) fn parse(query: &str) -> Self {
        Self(
            form_urlencoded::parse(query.as_bytes())
                .into_owned()
                .collect(),
        )
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    pub(crate) fn flag(&self, name: &str) -> Option<bool> {
        self.get(name).map(|value| matches!(value, "true" | "1"))
    }

    fn number(&self, name: &str) -> Outcome<Option<u64>> {
        let unreadable = |value: &str| {
            Failure::bad_request(format!(
                "strconv.ParseInt: parsing \"{value}\": invalid syntax"
            ))
        };
        self.get(name)
            .map(|value| value.parse().map_err(|_| unreadable(value)))
            .transpose()
    }
}

impl ListOptions {
    pub(crate) fn parse(
        kind: &Kind,
        query: &Query,
        is_watch: bool,
        streaming_lists: bool,
    ) -> Outcome<Self> {
        let limit = query.number("limit")?.unwrap_or(0);
        let version = query.number("resourceVersion")?;
        let version_match = query.get("resourceVersionMatch");
        let send_initial_events = query.flag("sendInitialEvents");
        match (send_initial_events, version_match) {
            (Some(_), _) if !streaming_lists => {
                let why = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
                return Err(forbidden("sendInitialEvents", why));
            }
            (Some(_), _) if !is_watch => {
                return Err(forbidden(
                    "sendInitialEvents",
                    "sendInitialEvents is forbidden for list",
                ));
            }
            (Some(_), Some("NotOlderThan")) => {}
            (Some(_), _) => {
                let why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
                return Err(forbidden("resourceVersionMatch", why));
            }
            (None, Some(_)) if is_watch => {
                let why = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
                return Err(forbidden("resourceVersionMatch", why));
            }
            (None, Some(_)) if version.is_none() => {
                let why = "resourceVersionMatch is forbidden unless resourceVersion is provided";
                return Err(forbidden("resourceVersionMatch", why));
            }
            (None, Some("Exact")) if version == Some(0) => {
                let why = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
                return Err(forbidden("resourceVersionMatch", why));
            }
            (None, None | Some("Exact" | "NotOlderThan")) => {}
            (None, Some(other)) => {
                let why =
                    format!("\"{other}\": supported values: \"Exact\", \"NotOlderThan\", \"\"");
                let kind = "ListOptions";
                let group = "meta.k8s.io";
                let path = "resourceVersionMatch";
                return Err(Failure::invalid(
                    kind,
                    group,
                    "",
                    path,
                    Cause::NotSupported,
                    &why,
                ));
            }
        }
        let token = query.get("continue").map(str::to_owned);
        if token.is_some() && version.is_some_and(|v| v != 0) {
            return Err(Failure::bad_request(
                "specifying resource version is not allowed when using continue",
            ));
        }
        Ok(Self {
            selector: Selector::parse(
                kind,
                query.get("labelSelector"),
                query.get("fieldSelector"),
            )?,
            // Version 0 accepts any version and is served by the watch cache, which ignores limits.
            limit: if version == Some(0) {
                0
            } else {
                usize::try_from(limit).unwrap_or(usize::MAX)
            },
            token,
            version,
            exact: version_match == Some("Exact") || version_match.is_none() && limit != 0,
            timeout: query
                .number("timeoutSeconds")?
                .filter(|t| *t != 0)
                .map(Duration::from_secs),
            bookmarks: query.flag("allowWatchBookmarks") == Some(true),
            send_initial_events,
        })
    }
}

fn forbidden(path: &str, why: &str) -> Failure {
    Failure::invalid(
        "ListOptions",
        "meta.k8s.io",
        "",
        path,
        Cause::Forbidden,
        why,
    )
}
