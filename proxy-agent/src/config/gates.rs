//! kube-proxy's feature gates: those that kpx obeys, and those that it accepts.

use std::collections::BTreeMap;

use super::kube_version::KubeVersion;

/// Serves ExternalIPs (KEP-5707).
pub(super) const EXTERNAL_IPS: &str = "AllowServiceExternalIPs";
/// Serves node ports at loopback addresses in mode nftables (KEP-6032).
pub(super) const LOCALHOST: &str = "KubeProxyNFTablesLocalhostNodePorts";
/// Permits the mode ipvs (KEP-5495).
pub(super) const IPVS: &str = "KubeProxyIPVS";

/// The first version in which ExternalIPs and IPVS need their gates (KEP-5707, KEP-5495).
const DEPRECATED_OFF: KubeVersion = KubeVersion(40);

/// The gates of kube-proxy since 1.26.
const GATES: [&str; 36] = [
    "AllAlpha",
    "AllBeta",
    EXTERNAL_IPS,
    "AllowServiceLBStatusOnNonLB",
    "AtomicFIFO",
    "ClientsAllowCBOR",
    "ClientsPreferCBOR",
    "ComponentFlagz",
    "ComponentSLIs",
    "ComponentStatusz",
    "ContextualLogging",
    "DisableNodeKubeProxyVersion",
    "IPTablesOwnershipCleanup",
    "InOrderInformers",
    "InformerResourceVersion",
    "KubeProxyDrainingTerminatingNodes",
    IPVS,
    LOCALHOST,
    "LoadBalancerIPMode",
    "LoggingAlphaOptions",
    "LoggingBetaOptions",
    "MinimizeIPTablesRestore",
    "MultiCIDRServiceAllocator",
    "NFTablesNetlink",
    "NFTablesProxyMode",
    "NativeHistograms",
    "PreferSameTrafficDistribution",
    "ProxyTerminatingEndpoints",
    "RelaxedServiceNameValidation",
    "ServiceInternalTrafficPolicy",
    "ServiceNodePortStaticSubrange",
    "ServiceTrafficDistribution",
    "StrictIPCIDRValidation",
    "TopologyAwareHints",
    "WatchListClient",
    "WinDSR",
];
/// Older gates, and gates of other systems.
const OTHERS: [&str; 2] = ["WatchList", "WinOverlay"];

const OBEYED: [&str; 2] = [EXTERNAL_IPS, LOCALHOST];

#[derive(Clone, Copy, Debug)]
pub(super) struct Gates<'a> {
    pub(super) set: &'a BTreeMap<String, bool>,
    pub(super) version: KubeVersion,
}

impl Gates<'_> {
    pub(super) fn external_ips(self) -> bool {
        self.set
            .get(EXTERNAL_IPS)
            .copied()
            .unwrap_or(self.version < DEPRECATED_OFF)
    }

    /// Returns true if kube-proxy would start in mode ipvs.
    pub(super) fn ipvs(self) -> bool {
        self.set
            .get(IPVS)
            .copied()
            .unwrap_or(self.version < DEPRECATED_OFF)
    }

    /// Returns true unless the operator has disabled node ports at loopback addresses. Up to 1.37,
    /// kube-proxy needs the gate. In every version, the operator must configure the addresses.
    pub(super) fn localhost(self) -> bool {
        self.set.get(LOCALHOST).copied().unwrap_or(true)
    }

    /// Returns the gates that no kube-proxy since 1.26 has.
    pub(super) fn unknown(self) -> Vec<String> {
        let is_known = |gate: &str| GATES.contains(&gate) || OTHERS.contains(&gate);
        self.set
            .keys()
            .filter(|gate| !is_known(gate))
            .cloned()
            .collect()
    }

    /// Returns unknown gates that resemble a gate that kpx obeys, with the correct name. The
    /// operator would rely on their effect.
    pub(super) fn misspelt(self) -> Vec<(String, &'static str)> {
        let nearly = |gate: &str| OBEYED.into_iter().find(|obeyed| is_near(gate, obeyed));
        self.unknown()
            .into_iter()
            .filter_map(|gate| nearly(&gate).map(|obeyed| (gate.clone(), obeyed)))
            .collect()
    }
}

/// Returns true if two names differ only in case, or in at most three letters.
fn is_near(name: &str, other: &str) -> bool {
    distance(&name.to_ascii_lowercase(), &other.to_ascii_lowercase()) <= 3
}

/// Returns the Levenshtein distance.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (column, other) in to.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *other);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(set: &[(&str, bool)], version: &str, ask: impl Fn(Gates<'_>) -> T) -> T {
        let set = set
            .iter()
            .map(|(gate, value)| ((*gate).to_owned(), *value))
            .collect();
        ask(Gates {
            set: &set,
            version: version.parse().unwrap(),
        })
    }

    #[test]
    fn gates_have_the_defaults_of_their_version() {
        for (version, external_ips, ipvs) in [
            ("1.30", true, true),
            ("1.36", true, true),
            ("1.39", true, true),
            ("1.40", false, false),
            ("1.42", false, false),
        ] {
            assert_eq!(
                with(&[], version, |gates| gates.external_ips()),
                external_ips,
                "{version}"
            );
            assert_eq!(with(&[], version, |gates| gates.ipvs()), ipvs, "{version}");
            assert!(with(&[], version, |gates| gates.localhost()), "{version}");
        }
        for value in [false, true] {
            for version in ["1.36", "1.40"] {
                assert_eq!(
                    with(&[(EXTERNAL_IPS, value)], version, |gates| gates
                        .external_ips()),
                    value
                );
                assert_eq!(with(&[(IPVS, value)], version, |gates| gates.ipvs()), value);
                assert_eq!(
                    with(&[(LOCALHOST, value)], version, |gates| gates.localhost()),
                    value
                );
            }
        }
    }

    #[test]
    fn gates_of_kube_proxy_are_known() {
        let known = [
            EXTERNAL_IPS,
            IPVS,
            "NFTablesNetlink",
            LOCALHOST,
            "ComponentStatusz",
            "ComponentFlagz",
            "WinOverlay",
            "AllAlpha",
        ];
        let set: Vec<_> = known.iter().map(|gate| (*gate, true)).collect();
        assert_eq!(with(&set, "1.37", |gates| gates.unknown()), [""; 0]);
        assert_eq!(
            with(&[("SidecarContainers", true)], "1.37", |gates| gates
                .unknown()),
            ["SidecarContainers"]
        );
        assert!(
            with(&[("SidecarContainers", true)], "1.37", |gates| gates
                .misspelt())
            .is_empty()
        );
    }

    #[test]
    fn misspelt_gate_is_told_from_another_components() {
        for (gate, meant) in [
            ("AllowServiceExternalIps", EXTERNAL_IPS),
            ("AllowServicesExternalIP", EXTERNAL_IPS),
            ("KubeproxyNFTablesLocalhostNodePort", LOCALHOST),
        ] {
            assert_eq!(
                with(&[(gate, false)], "1.37", |gates| gates.misspelt()),
                [(gate.to_owned(), meant)]
            );
        }
        assert_eq!(
            (
                distance("", "abc"),
                distance("kitten", "sitting"),
                distance("ab", "ab")
            ),
            (3, 3, 0)
        );
    }
}
