//! Classifies the ends of lists and watches.

use kube::core::Status;
use tokio::time::error::Elapsed;

use crate::kubernetes::errors::{explain, status};

/// The reason why a list or a watch ended.
#[derive(Debug)]
pub(super) enum WatchEnd {
    ReceiverGone,
    /// The end of a watch that had begun. Connections break and servers end watches in healthy
    /// clusters too.
    Closed(StreamEnd),
    /// A gap that only a new list can fill: the server has dropped the version (410), or its events
    /// contradict each other.
    Lost(String),
    /// A request without an answer, or with an unexpected answer.
    Failed(kube::Error),
    /// A list that takes longer than any server allows, or a watch that does not begin in time.
    Late,
}

#[derive(Debug)]
pub(super) enum StreamEnd {
    /// The end at the requested time.
    InTime,
    /// An earlier end by the server, which shuts down or has lost its own watch on the storage.
    Early,
    Broken(String),
}

impl From<kube::Error> for WatchEnd {
    fn from(error: kube::Error) -> Self {
        match status(&error) {
            Some(status) if is_lost(status) => Self::Lost(explain(&error)),
            _ => Self::Failed(error),
        }
    }
}

impl From<Elapsed> for WatchEnd {
    fn from(_: Elapsed) -> Self {
        Self::Late
    }
}

impl WatchEnd {
    /// Returns the HTTP status, if the server has sent one.
    pub(super) fn code(&self) -> Option<u16> {
        match self {
            Self::Failed(error) => status(error).map(|status| status.code),
            _ => None,
        }
    }

    /// Returns true if the cause may be a missing or failing server, rather than the request.
    pub(super) fn is_outage(&self) -> bool {
        match self {
            Self::Failed(_) => self.code().is_none_or(|code| matches!(code, 429 | 500..)),
            Self::Late => true,
            _ => false,
        }
    }

    /// Returns true if the server denies access. A server that has just started does so until it
    /// has loaded its rules.
    pub(super) fn is_denial(&self) -> bool {
        matches!(self.code(), Some(401 | 403))
    }

    /// Returns the reason, if the operator should see it.
    pub(super) fn problem(&self) -> Option<String> {
        match self {
            Self::Failed(error) => Some(explain(error)),
            Self::Late => Some("the answer did not come to an end in time".to_owned()),
            Self::ReceiverGone | Self::Closed(_) | Self::Lost(_) => None,
        }
    }
}

/// Returns true if the server's history has no such version: compacted, or an older backup was
/// restored.
pub(super) fn is_lost(status: &Status) -> bool {
    status.code == 410 || status.message.contains("Too large resource version")
}
