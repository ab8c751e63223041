//! The content of `/statusz`: which process answers, and since when.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

/// The version of the compiler, set by this crate's build script.
const RUST_VERSION: &str = env!("KPX_RUST_VERSION");
/// The date of `/bin/date` in the locale C, which Kubernetes' components write.
const DATE: &str = "%a %b %e %H:%M:%S UTC %Y";

#[derive(Clone, Debug)]
pub(super) struct Statusz {
    kubernetes_version: String,
    paths: Vec<&'static str>,
    started: Timestamp,
}

/// The fields of `config.k8s.io` that follow after the head of an object.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Data<'a> {
    start_time: String,
    uptime_seconds: i64,
    /// An empty text, which readers of the field take: kpx is no Go program.
    go_version: &'static str,
    binary_version: &'static str,
    emulation_version: &'a str,
    paths: &'a [&'static str],
}

impl Statusz {
    pub(super) fn new(
        kubernetes_version: String,
        paths: Vec<&'static str>,
        started: Timestamp,
    ) -> Self {
        Self {
            kubernetes_version,
            paths,
            started,
        }
    }

    pub(super) fn text(&self, now: Timestamp) -> String {
        let started = self.started.strftime(DATE);
        let up = self.uptime(now);
        let Data {
            binary_version,
            emulation_version,
            ..
        } = self.data(now);
        format!(
            "Started: {started}\nUp: {} hr {:02} min {:02} sec\nRust version: {RUST_VERSION}\n\
             Binary version: {binary_version}\nEmulation version: {emulation_version}\nPaths: {}\n",
            up / 3600,
            up / 60 % 60,
            up % 60,
            self.paths.join(" "),
        )
    }

    pub(super) fn data(&self, now: Timestamp) -> Data<'_> {
        let started = Timestamp::from_second(self.started.as_second()).unwrap_or(self.started);
        Data {
            start_time: started.to_string(),
            uptime_seconds: self.uptime(now),
            go_version: "",
            binary_version: env!("CARGO_PKG_VERSION"),
            emulation_version: &self.kubernetes_version,
            paths: &self.paths,
        }
    }

    /// Returns what the fields of `config.k8s.io` have no place for, where strict readers take it.
    pub(super) fn annotations(&self) -> BTreeMap<&'static str, &'static str> {
        BTreeMap::from([("kpx.dev/rust-version", RUST_VERSION)])
    }

    /// Returns the seconds since the start, none where the clock was set back.
    fn uptime(&self, now: Timestamp) -> i64 {
        (now.as_second() - self.started.as_second()).max(0)
    }
}
