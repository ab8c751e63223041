//! Identifies a cluster by its URL and authorities.

use std::collections::BTreeSet;
use std::fmt;

use kube::Config;

use super::client::without_credentials;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cluster {
    url: http::Uri,
    /// The certificates in DER; empty to trust the system's authorities.
    authorities: BTreeSet<Vec<u8>>,
}

impl Cluster {
    pub(super) fn of(config: &Config) -> Self {
        Self {
            url: config.cluster_url.clone(),
            authorities: config.root_cert.iter().flatten().cloned().collect(),
        }
    }

    /// Returns the difference to another configuration, if that may select another cluster. A
    /// cluster that rotates its authority first publishes the old and the new certificate together.
    pub(super) fn change(&self, new: &Self) -> Option<Change> {
        if self.url != new.url {
            return Some(Change::Url(new.url.clone()));
        }
        let is_renewed =
            self.authorities == new.authorities || !self.authorities.is_disjoint(&new.authorities);
        (!is_renewed).then_some(Change::Authority)
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_credentials(&self.url))
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    Url(http::Uri),
    /// The same URL, and no common authority.
    Authority,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => write!(f, "they now select {}", without_credentials(url)),
            Self::Authority => f.write_str("another authority signs for it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(url: &'static str, authorities: &[&[u8]]) -> Cluster {
        let mut config = Config::new(http::Uri::from_static(url));
        config.root_cert = Some(authorities.iter().map(|der| der.to_vec()).collect());
        Cluster::of(&config)
    }

    #[test]
    fn another_url_or_authority_is_another_cluster() {
        let one = cluster("https://one:6443", &[b"a"]);
        assert_eq!(one.change(&one), None);
        let two = cluster("https://two:6443", &[b"a"]);
        assert_eq!(
            one.change(&two),
            Some(Change::Url(http::Uri::from_static("https://two:6443")))
        );
        assert_eq!(
            one.change(&cluster("https://one:6443", &[b"b"])),
            Some(Change::Authority)
        );
        assert_eq!(
            one.change(&cluster("https://one:6443", &[])),
            Some(Change::Authority)
        );
        assert_eq!(
            one.change(&cluster("https://one:6443", &[b"b", b"a"])),
            None,
            "renewed"
        );
        let none = cluster("https://one:6443", &[]);
        assert_eq!(none.change(&none), None, "the machine's authorities");
    }
}
