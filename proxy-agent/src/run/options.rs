//! What `kpx run` is told of Services and of this node, in kube-proxy's words where it has them.

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use ipnet::IpNet;
use proxy_common::frontend::Algorithm;

use crate::node::detect::Detector;
use crate::node::node_ports::NodePortAddresses;
use crate::node::{Masquerade, NodeOptions};

/// Longest name of a device, in bytes (`IFNAMSIZ`, without its final zero).
const DEVICE_NAME_MAX: usize = 15;

#[derive(Args, Debug)]
pub(crate) struct ServiceArgs {
    /// Where node ports are served: the node's addresses in these networks, or `primary` for its primary addresses;
    /// without it all but loopback addresses. A family without a network, or with one of length zero, has them all.
    #[arg(long, value_name = "CIDR,…|primary", value_delimiter = ',')]
    nodeport_addresses: Vec<String>,
    /// Whose addresses are replaced by the node's: those of clients to whom replies would not find back otherwise, or
    /// those that kube-proxy would replace.
    #[arg(long, value_name = "HOW", default_value = "default")]
    masquerade: Masquerade,
    /// Masquerade every client of a ClusterIP.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "true",
        action = clap::ArgAction::Set)]
    masquerade_all: bool,
    /// Where pods have their addresses, one network a family: how clients inside the cluster are told from others.
    #[arg(long, value_name = "CIDR[,CIDR]", value_delimiter = ',')]
    cluster_cidr: Vec<String>,
    /// How local pods are told from other clients.
    #[arg(long, value_name = "MODE", default_value = "ClusterCIDR")]
    detect_local_mode: DetectLocalMode,
    /// The bridge behind which local pods are, in mode BridgeInterface.
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pod_bridge_interface: String,
    /// How the names of local pods' devices begin, in mode InterfaceNamePrefix.
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    pod_interface_name_prefix: String,
    /// Let clients outside the cluster reach ClusterIPs through this node.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t, default_missing_value = "true",
        action = clap::ArgAction::Set)]
    cluster_ip_external: bool,
    /// How new flows are spread over the backends of Services that do not say it by the annotation
    /// `kpx.dev/lb-algorithm`.
    #[arg(long, value_name = "HOW", default_value = "random")]
    lb_algorithm: LbAlgorithm,
}

/// kube-proxy's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DetectLocalMode {
    /// By address: --cluster-cidr.
    #[value(name = "ClusterCIDR")]
    ClusterCidr,
    /// By address: `spec.podCIDRs` of the Node object.
    #[value(name = "NodeCIDR")]
    NodeCidr,
    /// By the bridge that they send through: --pod-bridge-interface.
    #[value(name = "BridgeInterface")]
    BridgeInterface,
    /// By the name of the device that they send through: --pod-interface-name-prefix.
    #[value(name = "InterfaceNamePrefix")]
    InterfaceNamePrefix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LbAlgorithm {
    Random,
    /// By a hash of the client's address and port, on all nodes alike.
    Maglev,
    RoundRobin,
    /// The one with fewer open flows through this node, of two at random.
    LeastConnections,
}

impl ServiceArgs {
    /// `options` with what is said here. Errors name the flag.
    pub(crate) fn apply(&self, options: NodeOptions) -> Result<NodeOptions> {
        Ok(NodeOptions {
            node_ports: self.node_port_addresses().context("--nodeport-addresses")?,
            detector: self.detector()?,
            masquerade: self.masquerade,
            masquerade_all: self.masquerade_all,
            cluster_ip_external: self.cluster_ip_external,
            ..options
        })
    }

    pub(crate) fn algorithm(&self) -> Algorithm {
        match self.lb_algorithm {
            LbAlgorithm::Random => Algorithm::RANDOM,
            LbAlgorithm::Maglev => Algorithm::MAGLEV,
            LbAlgorithm::RoundRobin => Algorithm::ROUND_ROBIN,
            LbAlgorithm::LeastConnections => Algorithm::LEAST_CONNECTIONS,
        }
    }

    fn node_port_addresses(&self) -> Result<NodePortAddresses> {
        const PRIMARY: &str = "primary";
        let given = non_empty(&self.nodeport_addresses);
        match given.as_slice() {
            [] => Ok(NodePortAddresses::All),
            [PRIMARY] => Ok(NodePortAddresses::Primary),
            _ if given.contains(&PRIMARY) => bail!("`{PRIMARY}` stands alone"),
            _ => given.into_iter().map(cidr).collect::<Result<_>>().map(NodePortAddresses::In),
        }
    }

    fn detector(&self) -> Result<Detector> {
        let cluster_cidrs = self.cluster_cidrs().context("--cluster-cidr")?;
        let mode = self.detect_local_mode;
        Ok(match mode {
            DetectLocalMode::ClusterCidr => Detector::ClusterCidr(cluster_cidrs),
            DetectLocalMode::NodeCidr => Detector::NodeCidr,
            DetectLocalMode::BridgeInterface => {
                let name = device_name(&self.pod_bridge_interface);
                Detector::Bridge(
                    name.context("--pod-bridge-interface, which --detect-local-mode BridgeInterface goes by")?,
                )
            }
            DetectLocalMode::InterfaceNamePrefix => {
                let prefix = device_name(&self.pod_interface_name_prefix);
                let flag = "--pod-interface-name-prefix, which --detect-local-mode InterfaceNamePrefix goes by";
                Detector::Prefix(prefix.context(flag)?)
            }
        })
    }

    fn cluster_cidrs(&self) -> Result<Vec<IpNet>> {
        let cidrs = non_empty(&self.cluster_cidr).into_iter().map(cidr).collect::<Result<Vec<_>>>()?;
        let of_family = |ipv4| cidrs.iter().filter(|cidr| cidr.addr().is_ipv4() == ipv4).count();
        ensure!(of_family(true) <= 1 && of_family(false) <= 1, "at most one CIDR of each family");
        Ok(cidrs)
    }
}

/// An empty value says as much as none: kube-proxy's manifests are full of them.
fn non_empty(values: &[String]) -> Vec<&str> {
    values.iter().map(|value| value.trim()).filter(|value| !value.is_empty()).collect()
}

fn cidr(text: &str) -> Result<IpNet> {
    text.parse().with_context(|| format!("{text:?} is no CIDR"))
}

fn device_name(name: &str) -> Result<String> {
    ensure!(!name.is_empty(), "is not set");
    ensure!(name.len() <= DEVICE_NAME_MAX, "{name:?} is longer than {DEVICE_NAME_MAX} bytes");
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ServiceArgs,
    }

    #[test]
    fn flags_become_options() {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
        let none = NodeOptions::default();
        let node_ports = |nets| NodeOptions { node_ports: NodePortAddresses::In(nets), ..NodeOptions::default() };
        let detector = |detector| NodeOptions { detector, ..NodeOptions::default() };
        let cases: [(&str, NodeOptions); 12] = [
            ("", none.clone()),
            ("--nodeport-addresses= --cluster-cidr= --pod-bridge-interface= --masquerade-all=false", none.clone()),
            ("--nodeport-addresses primary", NodeOptions { node_ports: NodePortAddresses::Primary, ..none.clone() }),
            ("--nodeport-addresses 10.0.0.0/8,fd00::/8", node_ports(nets(&["10.0.0.0/8", "fd00::/8"]))),
            (
                "--nodeport-addresses 10.0.0.0/8 --nodeport-addresses 0.0.0.0/0",
                node_ports(nets(&["10.0.0.0/8", "0.0.0.0/0"])),
            ),
            ("--cluster-cidr 10.244.0.0/16", detector(Detector::ClusterCidr(nets(&["10.244.0.0/16"])))),
            (
                "--cluster-cidr=fd00::/48,10.244.0.0/16 --detect-local-mode ClusterCIDR",
                detector(Detector::ClusterCidr(nets(&["fd00::/48", "10.244.0.0/16"]))),
            ),
            ("--detect-local-mode=NodeCIDR", detector(Detector::NodeCidr)),
            (
                "--detect-local-mode BridgeInterface --pod-bridge-interface cni0",
                detector(Detector::Bridge("cni0".into())),
            ),
            (
                "--detect-local-mode InterfaceNamePrefix --pod-interface-name-prefix cali",
                detector(Detector::Prefix("cali".into())),
            ),
            (
                "--masquerade compat --masquerade-all",
                NodeOptions { masquerade: Masquerade::Compat, masquerade_all: true, ..none.clone() },
            ),
            ("--cluster-ip-external=true", NodeOptions { cluster_ip_external: true, ..none }),
        ];
        for (line, want) in cases {
            assert_eq!(options(line).map_err(|error| format!("{error:#}")), Ok(want), "{line}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_and_the_flag_is_named() {
        let cases = [
            ("--nodeport-addresses primary,10.0.0.0/8", "--nodeport-addresses: `primary` stands alone"),
            ("--nodeport-addresses 10.0.0.1", "--nodeport-addresses: \"10.0.0.1\" is no CIDR"),
            ("--cluster-cidr 10.244.0.0/33", "--cluster-cidr: \"10.244.0.0/33\" is no CIDR"),
            ("--cluster-cidr 10.1.0.0/16,10.2.0.0/16", "--cluster-cidr: at most one CIDR of each family"),
            ("--detect-local-mode NodeCIDR --cluster-cidr x", "--cluster-cidr: \"x\" is no CIDR"),
            ("--detect-local-mode BridgeInterface", "--pod-bridge-interface, "),
            ("--detect-local-mode InterfaceNamePrefix", "--pod-interface-name-prefix, "),
            (
                "--detect-local-mode BridgeInterface --pod-bridge-interface abcdefghijklmnop",
                "\"abcdefghijklmnop\" is longer than 15 bytes",
            ),
            ("--detect-local-mode clustercidr", "--detect-local-mode"),
            ("--masquerade some", "--masquerade"),
            ("--lb-algorithm fair", "--lb-algorithm"),
        ];
        for (line, want) in cases {
            let error = format!("{:#}", options(line).expect_err(line));
            assert!(error.contains(want), "{line}: {error}");
        }
    }

    #[test]
    fn algorithms_by_name() {
        for (name, algorithm) in [
            ("random", Algorithm::RANDOM),
            ("maglev", Algorithm::MAGLEV),
            ("round-robin", Algorithm::ROUND_ROBIN),
            ("least-connections", Algorithm::LEAST_CONNECTIONS),
        ] {
            assert_eq!(Cli::parse_from(["kpx", "--lb-algorithm", name]).args.algorithm(), algorithm);
        }
        assert_eq!(Cli::parse_from(["kpx"]).args.algorithm(), Algorithm::RANDOM);
    }

    fn options(line: &str) -> Result<NodeOptions> {
        Cli::try_parse_from(["kpx"].into_iter().chain(line.split_whitespace()))?.args.apply(NodeOptions::default())
    }
}
