//! A finding: the checked item, its state, and the remedy.

use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Finding {
    pub(crate) level: Level,
    pub(crate) what: &'static str,
    pub(crate) found: String,
    /// The remedy; null if nothing is wrong.
    pub(crate) fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Level {
    Ok,
    /// kpx works, but the operator should look at it.
    Warn,
    /// kpx does not work, at least in part.
    Fail,
}

pub(crate) fn ok(what: &'static str, found: impl Into<String>) -> Finding {
    Finding {
        level: Level::Ok,
        what,
        found: found.into(),
        fix: None,
    }
}

pub(crate) fn warn(
    what: &'static str,
    found: impl Into<String>,
    fix: impl Into<String>,
) -> Finding {
    Finding {
        level: Level::Warn,
        what,
        found: found.into(),
        fix: Some(fix.into()),
    }
}

pub(crate) fn fail(
    what: &'static str,
    found: impl Into<String>,
    fix: impl Into<String>,
) -> Finding {
    Finding {
        level: Level::Fail,
        what,
        found: found.into(),
        fix: Some(fix.into()),
    }
}
