//! A version of Kubernetes, and the defaults that depend on it.

use std::fmt;
use std::str::FromStr;

/// A version of Kubernetes, by its minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KubeVersion(pub(super) u16);

impl KubeVersion {
    /// The assumed version of the cluster, unless configured.
    pub(super) const DEFAULT: Self = Self(37);
    /// The first version with the default mode nftables (KEP-5343).
    pub(super) const NFTABLES_DEFAULT: Self = Self(40);

    /// Returns the mode of a configuration without one.
    pub(super) fn default_mode(self) -> &'static str {
        if self >= Self::NFTABLES_DEFAULT {
            "nftables"
        } else {
            "iptables"
        }
    }
}

impl FromStr for KubeVersion {
    type Err = ();

    /// Reads `1.38`, `v1.38` or `v1.38.2+vendor`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let rest = text
            .strip_prefix('v')
            .unwrap_or(text)
            .strip_prefix("1.")
            .ok_or(())?;
        let (minor, patch) = rest.split_once('.').unwrap_or((rest, "0"));
        let is_number =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let patch = patch.split(['-', '+']).next().unwrap_or_default();
        if !is_number(minor) || !is_number(patch) {
            return Err(());
        }
        minor.parse().map(Self).map_err(|_| ())
    }
}

impl fmt::Display for KubeVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_has_a_minor_number() {
        for (text, minor) in [
            ("1.38", 38),
            ("v1.40", 40),
            ("v1.36.2", 36),
            ("v1.39.0-rc.1", 39),
            ("v1.37.3+k3s1", 37),
        ] {
            assert_eq!(text.parse(), Ok(KubeVersion(minor)), "{text}");
        }
        for text in [
            "", "1", "1.", "2.40", "1.x", "1.38.x", "1.38.", "1.-1", "1.99999", "latest", "1.+4",
        ] {
            assert_eq!(text.parse::<KubeVersion>(), Err(()), "{text}");
        }
        assert_eq!(KubeVersion::DEFAULT.to_string(), "1.37");
    }

    #[test]
    fn nftables_is_the_default_mode_from_1_40() {
        for (version, mode) in [
            ("1.25", "iptables"),
            ("1.37", "iptables"),
            ("1.39", "iptables"),
            ("1.40", "nftables"),
        ] {
            assert_eq!(
                version.parse::<KubeVersion>().unwrap().default_mode(),
                mode,
                "{version}"
            );
        }
    }
}
