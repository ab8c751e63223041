//! kube-proxy's rules in their exact form: what packets pass on a node with kube-proxy.

mod iptables;
mod ipvs;
mod nftables;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};

use data_encoding::BASE32_NOPAD;
use sha2::{Digest, Sha256};

pub use self::ipvs::{Ipvs, SETTINGS as IPVS_SETTINGS};

/// The default of kube-proxy's masquerade mark.
const MASQUERADE: &str = "0x4000";

/// The input of the rules for IPv4.
#[derive(Clone, Debug)]
pub struct Rules {
    /// `--cluster-cidr`: clients outside it are masqueraded.
    pub pods: String,
    pub services: String,
    /// The address of node ports in mode nftables; mode iptables serves them at every address of
    /// the node.
    pub node: Ipv4Addr,
    /// The node's own pods.
    pub local: Vec<Ipv4Addr>,
    pub ports: Vec<ServicePort>,
}

#[derive(Clone, Debug)]
pub struct ServicePort {
    /// `namespace/service`.
    pub service: String,
    pub name: String,
    pub proto: Proto,
    pub cluster_ip: Ipv4Addr,
    pub port: u16,
    pub node_port: Option<u16>,
    pub endpoints: Vec<SocketAddrV4>,
    /// Jumps to the chains of the first such port instead of its own. A packet for another Service
    /// sees no difference. Tools would take minutes to load the chains of thousands of Services, as
    /// when kube-proxy starts.
    pub stand_in: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proto {
    Tcp,
    Udp,
}

impl fmt::Display for Proto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

impl Rules {
    /// Returns the input of `iptables-restore --noflush`.
    pub fn iptables(&self) -> String {
        iptables::text(self)
    }

    /// Returns the input of `iptables-restore --noflush` for a change of one port's endpoints.
    pub fn iptables_change(&self, port: &ServicePort, gone: &[SocketAddrV4]) -> String {
        iptables::change(self, port, gone)
    }

    /// Returns the input of `nft -f` for the same.
    pub fn nftables_change(&self, port: &ServicePort, gone: &[SocketAddrV4]) -> String {
        nftables::change(self, port, gone)
    }

    /// Returns the port whose chains this port uses.
    fn owner<'a>(&'a self, port: &'a ServicePort) -> &'a ServicePort {
        let first = if port.stand_in {
            self.ports.iter().find(|other| other.stand_in)
        } else {
            None
        };
        first.unwrap_or(port)
    }

    /// Returns the service ports that have chains.
    fn owners(&self) -> impl Iterator<Item = &ServicePort> {
        let first = self.ports.iter().position(|port| port.stand_in);
        let owns = move |(at, port): &(usize, &ServicePort)| !port.stand_in || Some(*at) == first;
        self.ports
            .iter()
            .enumerate()
            .filter(owns)
            .map(|(_, port)| port)
    }

    /// Returns the input of `nft -f`.
    pub fn nftables(&self) -> String {
        nftables::text(self)
    }

    /// Returns the IPVS rules. Every port has its own virtual servers, even a stand-in.
    pub fn ipvs(&self) -> Ipvs {
        ipvs::all(self)
    }
}

impl ServicePort {
    /// Returns the name in kube-proxy's comments.
    fn full_name(&self) -> String {
        format!("{}:{}", self.service, self.name)
    }
}

/// Returns the first characters of a hash, which distinguish chains with short or similar names.
fn hash(of: &str, length: usize) -> String {
    let mut text = BASE32_NOPAD.encode(&Sha256::digest(of));
    text.truncate(length);
    text
}
