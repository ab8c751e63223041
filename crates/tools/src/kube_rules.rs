//! The rules that kube-proxy writes, in their exact shape: what a packet meets on a node that
//! kube-proxy serves.

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

/// The default of kube-proxy's mark for packets to masquerade.
const MASQUERADE: &str = "0x4000";

/// The source of the rules of IPv4.
#[derive(Clone, Debug)]
pub struct Rules {
    /// `--cluster-cidr`: who comes from elsewhere is masqueraded.
    pub pods: String,
    pub services: String,
    /// Where node ports are served in mode nftables; mode iptables serves them at every address of
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
    /// Leads to the chains of the first such port instead of to its own. A packet for another
    /// Service does not notice. Tools would take minutes to load the chains of thousands of
    /// Services, as at kube-proxy's start.
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
    /// For `iptables-restore --noflush`.
    pub fn iptables(&self) -> String {
        iptables::text(self)
    }

    /// For `iptables-restore --noflush`: what a change of one port's endpoints adds and deletes.
    pub fn iptables_change(&self, port: &ServicePort, gone: &[SocketAddrV4]) -> String {
        iptables::change(self, port, gone)
    }

    /// For `nft -f`: the same.
    pub fn nftables_change(&self, port: &ServicePort, gone: &[SocketAddrV4]) -> String {
        nftables::change(self, port, gone)
    }

    /// The port to whose chains this one leads.
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

    /// For `nft -f`.
    pub fn nftables(&self) -> String {
        nftables::text(self)
    }

    /// Every port has virtual servers of its own, stand-in or not.
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

/// Returns the first characters of a hash, which tell chains with short or similar names apart.
fn hash(of: &str, length: usize) -> String {
    let mut text = BASE32_NOPAD.encode(&Sha256::digest(of));
    text.truncate(length);
    text
}
