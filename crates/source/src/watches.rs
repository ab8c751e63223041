//! The watches on the API server.

use std::sync::LazyLock;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The watches of this process, over all clients.
#[derive(Debug, Default)]
pub struct Watches {
    up: Family<ByKind, Gauge>,
    failures: Family<ByKind, Counter>,
    unreadable: Family<ByKind, Gauge>,
}

static OF_PROCESS: LazyLock<Watches> = LazyLock::new(Watches::default);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByKind {
    kind: String,
}

impl ByKind {
    fn new(kind: &str) -> Self {
        Self {
            kind: kind.to_owned(),
        }
    }
}

impl Watches {
    pub fn of_process() -> &'static Self {
        &OF_PROCESS
    }

    pub fn register(&self, registry: &mut Registry) {
        let help = "1 while the watch of this kind is connected, 0 while it is broken";
        registry.register("watch_up", help, self.up.clone());
        let help = "Lists and watches that failed or broke off, by kind of object";
        registry.register("watch_failures", help, self.failures.clone());
        let help = "Objects that cannot be read; their last readable form stays programmed";
        registry.register("unreadable_objects", help, self.unreadable.clone());
    }

    /// Creates the series of a kind, so that it exists from the start.
    pub fn know(&self, kind: &str) {
        let kind = ByKind::new(kind);
        drop((
            self.up.get_or_create(&kind),
            self.failures.get_or_create(&kind),
        ));
        drop(self.unreadable.get_or_create(&kind));
    }

    /// Removes the series of a kind that the server does not serve, so that its watch does not
    /// count as broken.
    pub fn unserved(&self, kind: &str) {
        self.up.remove(&ByKind::new(kind));
    }

    pub fn failed(&self, kind: &str) {
        self.failures.get_or_create(&ByKind::new(kind)).inc();
    }

    pub fn unreadable(&self, kind: &str, objects: usize) {
        self.unreadable
            .get_or_create(&ByKind::new(kind))
            .set(i64::try_from(objects).unwrap_or(i64::MAX));
    }

    /// Marks the watch of a kind as open until the result is dropped.
    #[must_use]
    pub fn open(&self, kind: &str) -> Open {
        let up = self.up.get_or_create(&ByKind::new(kind)).clone();
        up.set(1);
        Open(up)
    }
}

#[derive(Debug)]
pub struct Open(Gauge);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.set(0);
    }
}
