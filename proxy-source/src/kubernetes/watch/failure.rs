//! Why a list or a watch is over, and what that means.

use std::error::Error as _;

use kube::client::AuthError;
use kube::core::Status;
use tokio::time::error::Elapsed;

/// Why a list or a watch is over.
#[derive(Debug)]
pub(super) enum Over {
    ReceiverGone,
    /// The watch had begun, and came to an end: connections break and servers end watches in the best of clusters.
    Ended(End),
    /// Only a new list can tell what has happened: the server no longer knows our version (410), or what it says
    /// does not follow from what it said before.
    Lost(String),
    /// There was no answer, or not the one that was asked for.
    Failed(kube::Error),
    /// A list that takes longer than any server gives it.
    Late,
}

#[derive(Debug)]
pub(super) enum End {
    /// When the time was over that it was asked for.
    InTime,
    /// The server ended it before that: it goes away, or has lost its own watch of the data.
    Early,
    Broken(String),
}

impl From<kube::Error> for Over {
    fn from(error: kube::Error) -> Self {
        match status(&error) {
            Some(status) if is_lost(status) => Self::Lost(explain(&error)),
            _ => Self::Failed(error),
        }
    }
}

impl From<Elapsed> for Over {
    fn from(_: Elapsed) -> Self {
        Self::Late
    }
}

impl Over {
    /// HTTP status, if the server has said one.
    pub(super) fn code(&self) -> Option<u16> {
        match self {
            Self::Failed(error) => status(error).map(|status| status.code),
            _ => None,
        }
    }

    /// Whether it may be for want of a server, or of one that is well, rather than for what was asked.
    pub(super) fn is_outage(&self) -> bool {
        match self {
            Self::Failed(_) => self.code().is_none_or(|code| matches!(code, 429 | 500..)),
            Self::Late => true,
            _ => false,
        }
    }

    /// Whether the server says that we may not. One that has just started does so until it has read who may.
    pub(super) fn is_denial(&self) -> bool {
        matches!(self.code(), Some(401 | 403))
    }

    /// The reason, if it is one to be told to whoever looks after the cluster.
    pub(super) fn problem(&self) -> Option<String> {
        match self {
            Self::Failed(error) => Some(explain(error)),
            Self::Late => Some("the list did not come to an end in time".to_owned()),
            Self::ReceiverGone | Self::Ended(_) | Self::Lost(_) => None,
        }
    }
}

/// Whether the server says that our version is none of its history: compacted, or from before a backup was restored.
pub(super) fn is_lost(status: &Status) -> bool {
    status.code == 410 || status.message.contains("Too large resource version")
}

/// What the server itself says of an error.
fn status(error: &kube::Error) -> Option<&Status> {
    match error {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

/// The error and its causes, each once: many errors repeat what caused them.
pub(super) fn explain(error: &kube::Error) -> String {
    if let Some(Status { code, reason, message, .. }) = status(error) {
        return format!("{code} {reason}: {message}");
    }
    if let Some(text) = failed_plugin(error) {
        return text;
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// What is said of a credential plugin that failed. Its error holds its environment and its output, which is not for all
/// who may ask for the node's health.
pub(in super::super) fn failed_plugin(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(AuthError::AuthExecRun { out, .. }) = error.downcast_ref() {
            return Some(format!("the kubeconfig's credential plugin failed: {}", out.status));
        }
        cause = error.source();
    }
    None
}
