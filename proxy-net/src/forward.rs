//! Lists the netfilter rules that forwarded packets meet between the hooks of kpx. Packets of open connections skip
//! them with `--fast-path`.

use std::fs;
use std::io::{self, ErrorKind};

use anyhow::{Context, Result};
use futures::StreamExt;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_netfilter::nftables::{
    ChainAttribute, ChainMessage, Hook, HookNumber, InetHookNumber, NfTablesMessage,
};
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily};
use rtnetlink::proto::new_connection;
use rtnetlink::sys::SocketAddr;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::sysctl;

/// The table of kube-proxy in mode nftables: without Services that kube-proxy serves, no packet meets its rules.
pub(crate) const KUBE_PROXY: &str = "kube-proxy";
/// The parameter that counts the connections that conntrack follows.
pub(crate) const TRACKED: &str = "netfilter/nf_conntrack_count";
/// The kind of chain that changes addresses; only a connection's first packet passes it.
pub(crate) const NAT: &str = "nat";

/// The tables of legacy iptables, by family. Only a process that may open raw sockets can read whether they have rules,
/// and an agent may not. An unused table does not exist, so a table's presence counts.
pub(crate) const LEGACY: [(&str, &str); 2] =
    [("iptables", "/proc/net/ip_tables_names"), ("ip6tables", "/proc/net/ip6_tables_names")];

/// A chain of nftables that a hook calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Chain {
    family: &'static str,
    table: String,
    name: String,
    /// The kind as nft prints it: `filter`, `nat`, `route`.
    kind: String,
    hook: Option<HookNumber>,
    rules: u32,
    drops: bool,
}

/// Returns the chains and tables that may refuse or change forwarded packets, one line each.
pub async fn rules() -> Result<Vec<String>> {
    let chains = chains().await.context("list the chains of nftables")?;
    let mut found: Vec<_> = chains.iter().filter_map(Chain::judges).collect();
    for (tool, path) in LEGACY {
        found.extend(legacy(tool, &legacy_tables(path)?));
    }
    Ok(found)
}

/// Returns true if conntrack may follow connections here. The kernel switches it on for a network namespace with the first rule
/// that needs it, of whichever chain.
pub async fn may_be_tracked() -> Result<bool> {
    let mut has_legacy = false;
    for (_, path) in LEGACY {
        has_legacy |= !legacy_tables(path)?.is_empty();
    }
    if has_legacy || sysctl::read(TRACKED)?.is_some_and(|number| number != "0") {
        return Ok(true);
    }
    let chains = chains().await.context("list the chains of nftables")?;
    Ok(chains.iter().any(|chain| chain.family != "netdev" && chain.rules > 0))
}

impl Chain {
    /// Describes the chain. Returns None if the chain does not concern forwarded packets.
    fn judges(&self) -> Option<String> {
        let Self { family, table, name, kind, hook, rules, drops } = self;
        let is_passed = match hook {
            // Hooks of a device have other numbers: LOCAL_IN elsewhere is the device's egress.
            Some(_) if *family == "netdev" => true,
            Some(HookNumber::Inet(hook)) => match hook {
                InetHookNumber::PreRouting | InetHookNumber::Forward | InetHookNumber::PostRouting => true,
                InetHookNumber::Ingress => *family == "inet",
                _ => false,
            },
            _ => false,
        };
        if !is_passed || table == KUBE_PROXY || kind == NAT || *rules == 0 && !drops {
            return None;
        }
        let what = if *drops { "drops what its rules do not accept".to_owned() } else { format!("has rules: {rules}") };
        Some(format!("chain {name} of table {family} {table} {what}"))
    }

    /// Returns None for a chain that only other chains call, or of another protocol.
    fn from_message(message: NetfilterMessage) -> Option<Self> {
        let family = match message.header.family {
            NetfilterProtoFamily::Inet => "inet",
            NetfilterProtoFamily::IPv4 => "ip",
            NetfilterProtoFamily::IPv6 => "ip6",
            NetfilterProtoFamily::NetDev => "netdev",
            _ => return None,
        };
        let NetfilterMessageInner::NfTables(NfTablesMessage::NewChain(ChainMessage { attributes, .. })) = message.inner
        else {
            return None;
        };
        let mut chain = Self { family, ..Self::default() };
        for attribute in attributes {
            match attribute {
                ChainAttribute::Table(table) => chain.table = table,
                ChainAttribute::Name(name) => chain.name = name,
                ChainAttribute::Type(kind) => chain.kind = kind,
                ChainAttribute::Use(uses) => chain.rules = uses, // A base chain has no other users than its rules.
                ChainAttribute::Policy(verdict) => chain.drops = verdict == 0,
                ChainAttribute::Hook(hook) => {
                    chain.hook = hook.iter().find_map(|part| match part {
                        Hook::Number(number) => Some(*number),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        chain.hook.is_some().then_some(chain)
    }
}

/// Returns the names of the tables of legacy iptables in such a list, one on each line. A kernel without them has no list.
pub(crate) fn legacy_tables(path: &str) -> Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        tables => tables.with_context(|| format!("read {path}")),
    }
}

fn legacy(tool: &str, tables: &str) -> Vec<String> {
    let judge = tables.lines().filter(|table| *table != NAT);
    judge.map(|table| format!("table {table} of {tool}-legacy")).collect()
}

/// Returns the chains; a kernel without nftables has none.
async fn chains() -> io::Result<Vec<Chain>> {
    let (mut connection, handle, _) = new_connection::<NetfilterMessage>(NETLINK_NETFILTER)?;
    connection.set_forward_done(true);
    let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, 0);
    let inner = NfTablesMessage::GetChain(ChainMessage { attributes: Vec::new() });
    let mut request = NetlinkMessage::from(NetfilterMessage::new(header, inner));
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let answers = async {
        let mut answers = handle.request(request, SocketAddr::new(0, 0)).map_err(io::Error::other)?;
        let mut chains = Vec::new();
        while let Some(answer) = answers.next().await {
            match answer.payload {
                NetlinkPayload::InnerMessage(message) => chains.extend(Chain::from_message(message)),
                NetlinkPayload::Done(done) if done.code == 0 => return Ok(chains),
                NetlinkPayload::Done(done) => return Err(io::Error::from_raw_os_error(-done.code)),
                NetlinkPayload::Error(error) if error.to_io().kind() == ErrorKind::InvalidInput => return Ok(chains),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                _ => {}
            }
        }
        Err(ErrorKind::UnexpectedEof.into())
    };
    tokio::select! {
        chains = answers => chains,
        () = connection => Err(ErrorKind::BrokenPipe.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_chains_on_the_forward_path_count() {
        let chain = |hook: InetHookNumber, rules, drops| Chain {
            family: "ip",
            table: "filter".to_owned(),
            name: "FORWARD".to_owned(),
            kind: "filter".to_owned(),
            hook: Some(hook.into()),
            rules,
            drops,
        };
        use InetHookNumber::*;
        let has = Some("chain FORWARD of table ip filter has rules: 2".to_owned());
        let drops = Some("chain FORWARD of table ip filter drops what its rules do not accept".to_owned());
        let cases = [
            ("rules", chain(Forward, 2, false), has.clone()),
            ("a policy", chain(Forward, 0, true), drops),
            ("nothing", chain(Forward, 0, false), None),
            ("before the route", chain(PreRouting, 2, false), has.clone()),
            ("after it", chain(PostRouting, 2, false), has),
            ("of the host", chain(LocalIn, 2, true), None),
            (
                "of a device",
                Chain { family: "netdev", ..chain(LocalIn, 2, false) },
                Some("chain FORWARD of table netdev filter has rules: 2".to_owned()),
            ),
            ("addresses", Chain { kind: NAT.to_owned(), ..chain(PreRouting, 2, false) }, None),
            ("kube-proxy's", Chain { table: KUBE_PROXY.to_owned(), ..chain(Forward, 2, false) }, None),
        ];
        for (name, chain, want) in cases {
            assert_eq!(chain.judges(), want, "{name}");
        }
    }

    #[test]
    fn iptables_tables_other_than_nat_count() {
        assert_eq!(legacy("iptables", "nat\nfilter\n"), ["table filter of iptables-legacy"]);
        assert_eq!(legacy("ip6tables", ""), [""; 0]);
    }
}
